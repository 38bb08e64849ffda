"""GPUs are counted by what the driver says; ranks that find none are refused in one line. The driver is played."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from capricorn.cli.options import scenario_from

from capricorn.config.scenario import CUDA_BLOCK_BYTES
from capricorn.errors import ConfigError
from capricorn.launch import preflight
from capricorn.sizing.gpus import Gpu, Gpus, ask_driver, find_gpus
from capricorn.units import GIB, KIB

BIG = Gpu(140 * GIB, 139 * GIB)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(preflight, "find_gpus", lambda: Gpus((BIG,)))
    return monkeypatch


@pytest.mark.parametrize("words", ["NoDevFiles", "-1", "", "0,1", "GPU-5ebe9f43"])
def test_words_of_schedulers_are_no_devices(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", words)
    find_gpus.cache_clear()
    assert preflight.num_cuda_devices() == len(find_gpus().found)
    if find_gpus().why_none:
        assert scenario_from().cluster.device == "cpu"
    find_gpus.cache_clear()


@pytest.mark.parametrize(
    ("program", "found", "why"),
    [
        ('print(\'[{"total_bytes": 9, "free_bytes": 7}]\')', (Gpu(9, 7),), ""),
        ("print('[]')", (), "no device is visible"),
        ("raise SystemExit('cuInit: error 100')", (), "no device is visible"),
        ("raise SystemExit('cuInit: error 803')", (), "the CUDA driver fails: cuInit: error 803"),
        ("import ctypes; ctypes.CDLL('libnone.so.1')", (), "cannot open shared object file"),
        ("import time; time.sleep(60)", (), "the CUDA driver does not answer: TimeoutExpired"),
    ],
)
def test_whatever_the_driver_answers_there_are_gpus_or_a_reason_in_words(
    program: str, found: tuple[Gpu, ...], why: str
) -> None:
    gpus = ask_driver((sys.executable, "-c", program), timeout_s=2.0 if "sleep" in program else 20.0)
    assert gpus.found == found
    assert why in gpus.why_none
    assert bool(gpus.why_none) != bool(found)


def test_the_one_who_asks_the_real_driver_gets_an_answer_in_words_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if find_gpus().found:
        pytest.skip("this machine has a GPU")
    assert find_gpus().why_none in ("this torch is not built for CUDA", "no driver in /dev", "no device is visible")


def test_one_gpu_with_one_rank_is_fine_and_blocks_are_large(machine: pytest.MonkeyPatch) -> None:
    scenario = scenario_from()
    assert (scenario.cluster.device, scenario.cluster.nodes, scenario.cluster.ranks_per_node) == ("cuda", 1, 1)
    assert scenario.system.block_bytes == CUDA_BLOCK_BYTES
    assert scenario_from(device="cpu").system.block_bytes == 256 * KIB
    assert scenario_from(assignments=["system.block_bytes=64KiB"]).system.block_bytes == 64 * KIB
    found = {check.name: check for check in preflight.checks(scenario, Path("results"))}
    assert found["cuda"].ok
    assert found["GPU memory"].ok


def test_more_ranks_than_gpus_are_refused_in_one_line(machine: pytest.MonkeyPatch) -> None:
    scenario = scenario_from(nodes=2, device="cuda")
    with pytest.raises(ConfigError, match=r"^cuda: this run needs a GPU for each of 2 ranks .*found 1 GPU; use fewer"):
        preflight.require(scenario)


def test_on_real_machines_only_the_ranks_of_this_one_need_a_gpu_here(machine: pytest.MonkeyPatch) -> None:
    scenario = scenario_from(nnodes=2, rdzv_endpoint="127.0.0.1:29555", device="cuda")
    found = {check.name: check for check in preflight.checks(scenario, Path("results"))}
    assert found["cuda"].ok


def test_a_model_that_a_gpu_has_no_room_for_is_refused_in_one_line(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(preflight, "find_gpus", lambda: Gpus((Gpu(140 * GIB, 2 * GIB),)))
    with pytest.raises(ConfigError, match=r"^GPU memory: this run needs .* a rank, found 2.15 GB free; use a smaller"):
        preflight.require(scenario_from(model="mixtral-small", nodes=1))


def test_cuda_without_a_gpu_is_refused_with_the_reason(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(preflight, "find_gpus", lambda: Gpus(why_none="no driver in /dev"))
    with pytest.raises(ConfigError, match=r"found 0 GPUs \(no driver in /dev\); use --device cpu"):
        preflight.require(scenario_from(device="cuda"))
