"""The device of a rank: its own GPU, sums in a fixed order, cores that are near; by a CUDA that is played."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from capricorn.errors import ConfigError
from capricorn.trainer.device_setup import ASYNC_ERRORS, CUBLAS_WORKSPACE, bind_near, pci_address, set_up_device

ADDRESS = "0000:3b:00.0"


class FakeCuda:
    def __init__(self, count: int) -> None:
        self.count, self.current = count, None

    def device_count(self) -> int:
        return self.count

    def set_device(self, device: Any) -> None:
        self.current = device

    def get_device_properties(self, device: Any) -> SimpleNamespace:
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, _ in (CUBLAS_WORKSPACE, ASYNC_ERRORS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    yield
    torch.use_deterministic_algorithms(False)


def test_each_rank_has_a_gpu_of_its_own_and_computes_in_a_fixed_order() -> None:
    cuda = FakeCuda(2)
    assert set_up_device("cuda", 1, cuda) == torch.device("cuda", 1) == cuda.current
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ[CUBLAS_WORKSPACE[0]] == CUBLAS_WORKSPACE[1]


@pytest.mark.parametrize(("count", "rank"), [(0, 0), (1, 1)])
def test_a_rank_without_a_gpu_is_refused_in_words(count: int, rank: int) -> None:
    with pytest.raises(ConfigError, match=f"rank {rank} of this machine has no GPU, there are {count}; use"):
        set_up_device("cuda", rank, FakeCuda(count))


def test_on_the_cpu_nothing_is_set() -> None:
    assert set_up_device("cpu", 7, FakeCuda(0)) == torch.device("cpu")
    assert not torch.are_deterministic_algorithms_enabled()
    assert CUBLAS_WORKSPACE[0] not in os.environ


def machine(folder: Path, node: str, cpulist: str) -> Path:
    device = folder / "bus/pci/devices" / ADDRESS
    device.mkdir(parents=True)
    (device / "numa_node").write_text(node + "\n")
    (folder / "devices/system/node/node1").mkdir(parents=True)
    (folder / "devices/system/node/node1/cpulist").write_text(cpulist + "\n")
    return folder


@pytest.mark.parametrize(
    ("node", "cpulist", "bound"),
    [
        ("1", "1,4-7", {1, 4, 5}),
        ("-1", "0-5", set()),  # the machine does not tell
        ("1", "0-63", set()),  # all that we have are there
        ("1", "8-15", set()),  # none that we have is there
        ("1", "", set()),
        ("0", "1", set()),  # a node of which nothing is told
    ],
)
def test_a_rank_is_bound_to_the_cores_near_its_gpu_where_there_is_something_to_bind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: str, cpulist: str, bound: set[int]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    calls: list[Any] = []
    assert bind_near(ADDRESS, machine(tmp_path, node, cpulist), lambda *call: calls.append(call)) == bound
    assert calls == ([(0, bound)] if bound else [])


def test_the_address_of_a_gpu_is_the_one_that_sys_has() -> None:
    assert pci_address(FakeCuda(1).get_device_properties(0)) == ADDRESS
    assert pci_address(SimpleNamespace()) == ""
