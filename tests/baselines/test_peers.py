"""The extra `peers`: the system around torch_checkpointing, real runs of both, and what is said where it is missing."""

from __future__ import annotations

import dataclasses
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from capricorn.cli.main import main

from capricorn.emulation.storage import Storage
from capricorn.errors import NoCompleteCheckpointError
from capricorn.systems import registry
from capricorn.systems.registry import SYSTEMS
from tests.support import runs
from tests.support.booked import charged_bytes
from tests.support.peers import Toy, job_of, left_over
from tests.support.spawn import run_ranks

LM, TC = "lm-resiliency", "torch-checkpointing"
needs_lm = pytest.mark.skipif(not SYSTEMS[LM].is_installed, reason=SYSTEMS[LM].install)
needs_tc = pytest.mark.skipif(not SYSTEMS[TC].is_installed, reason=SYSTEMS[TC].install)
CLOCKS = "storage"


def write_and_restore(rank: int, num_nodes: int, folder: str) -> list[Any]:
    """The process that writes is killed before iteration 3 is; a modelled storage is charged for the rest."""
    job = dataclasses.replace(job_of(rank, num_nodes, Path(folder), timeout_s=20.0), storage_dir=Path(folder) / CLOCKS)
    toy = Toy(TC, job)
    toy.train(1, 2)
    toy.system.drain(20.0)
    for child in left_over()[2]:
        child.kill()
    toy.train(3, 5)
    complaint = toy.complaint()
    completed, sent_bytes = toy.system.take_completed(), toy.system.counters().sent_bytes
    toy.system.close()
    toy.system.close()
    left = left_over() == toy.before
    dist.barrier()
    folders = sorted(path.name for path in (Path(folder) / "files").iterdir())
    again = Toy(TC, dataclasses.replace(job, attempt=1))
    report = again.system.restore()
    restored = again.holds(report.iteration)
    again.system.close()
    with closing(Storage(Path(folder) / CLOCKS, rank)) as storage:
        is_charged = charged_bytes(storage) >= sent_bytes
    return [completed, complaint, report.iteration, list(report.sources), restored, left, folders, is_charged]


@pytest.mark.slow
@needs_tc
def test_a_save_whose_process_is_killed_is_counted_and_another_process_writes_the_next(tmp_path: Path) -> None:
    Storage.create(tmp_path / CLOCKS, 2, 1e9, None)
    for completed, complaint, iteration, sources, restored, left, folders, is_charged in run_ranks(
        write_and_restore, 2, str(tmp_path)
    ):
        assert completed == [1, 2, 4, 5]
        assert "1 saves failed" in complaint
        assert "iteration 3" in complaint
        assert (iteration, sources, restored) == (5, ["persistent"] * 2, True)
        assert left
        assert [name for name in folders if name.startswith("iteration-")] == [
            "iteration-00000004",
            "iteration-00000005",
        ]
        assert is_charged


def find_unfinished(rank: int, num_nodes: int, folder: str) -> list[str]:
    """A job starts after one that was killed while it wrote."""
    job = job_of(rank, num_nodes, Path(folder), timeout_s=20.0)
    assert job.files_dir is not None
    if rank == 0:
        (job.files_dir / "tmp_iteration-00000009").mkdir()
        (job.files_dir / "tmp_iteration-00000009" / "state_0.pt").write_bytes(b"half")
    dist.barrier()
    toy = Toy(TC, job)
    try:
        toy.system.restore()
    except NoCompleteCheckpointError:
        return sorted(path.name for path in job.files_dir.iterdir())
    finally:
        toy.system.close()
    return ["restored"]


@needs_tc
def test_what_was_half_written_is_neither_restored_nor_kept(tmp_path: Path) -> None:
    assert run_ranks(find_unfinished, 2, str(tmp_path)) == [[], []]


# --- runs


@pytest.mark.slow
@needs_lm
@needs_tc
@pytest.mark.parametrize(("system", "sources"), [(LM, ["local", "peer"]), (TC, ["persistent", "persistent"])])
@pytest.mark.parametrize("fault", ["kill@rank=1,iteration=11", "node-loss@node=1,iteration=11"])
def test_losses_after_a_failure_are_those_of_the_undisturbed_run(
    tmp_path: Path, system: str, sources: list[str], fault: str
) -> None:
    reference = runs.run(tmp_path / "none", "--system", "none")
    ended = runs.run(tmp_path / "peer", "--system", system, "--fault", fault)
    runs.assert_ok(ended)
    runs.assert_same_losses(ended, reference)
    assert ended.sources == [sources]


# --- without the extra


@pytest.fixture(params=[LM, TC])
def missing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A system whose library is not there."""
    module, find = SYSTEMS[request.param].needs, registry.util.find_spec
    monkeypatch.setattr(registry.util, "find_spec", lambda name: None if name == module else find(name))
    return str(request.param)


def cli(*arguments: str) -> int:
    with pytest.raises(SystemExit) as raised:
        main(list(arguments))
    assert isinstance(raised.value.code, int)
    return raised.value.code


def test_a_run_without_the_extra_says_in_one_line_what_to_install(
    missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli("run", "--system", missing) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"system {missing} needs the module {SYSTEMS[missing].needs}" in error
    assert "pip install 'capricorn-bench[peers]'" in error


def test_list_and_doctor_name_the_missing_extra(missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli("list", "systems", "--json") == 0
    details = json.loads(capsys.readouterr().out)["details"]
    assert details[missing]["here"] == "no: pip install 'capricorn-bench[peers]'"
    cli("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks[f"system {missing}"]["found"] == "not installed"
    assert checks[f"system {missing}"]["advice"] == "pip install 'capricorn-bench[peers]'"
