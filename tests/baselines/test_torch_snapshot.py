"""What is corrected of TorchSnapshot, next to the library as it ships, and that nothing of it stays behind."""

from __future__ import annotations

import asyncio
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torchsnapshot.scheduler
import torchsnapshot.snapshot
from capricorn.baselines.torch_snapshot import corrected
from torchsnapshot import Snapshot, StateDict
from torchsnapshot.dist_store import LinearBarrier
from torchsnapshot.io_preparers.tensor import TensorBufferStager
from torchsnapshot.storage_plugins.fs import FSStoragePlugin

BUDGET_BYTES = 1 << 20


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is written until this is set."""
    event, write = threading.Event(), FSStoragePlugin.write

    async def write_late(self: FSStoragePlugin, write_io: Any) -> None:
        assert await asyncio.get_running_loop().run_in_executor(None, event.wait, 10.0)
        await write(self, write_io)

    monkeypatch.setattr(FSStoragePlugin, "write", write_late)
    return event


def take(folder: Path, tensors: dict[str, torch.Tensor], held: threading.Event) -> dict[str, torch.Tensor]:
    """What is restored of tensors that were overwritten as soon as `async_take` had returned."""
    pending = Snapshot.async_take(str(folder), {"state": StateDict(**tensors)})
    for tensor in tensors.values():
        tensor.fill_(2)
    held.set()
    snapshot = pending.wait()
    restored = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
    snapshot.restore({"state": StateDict(**restored)})
    return restored


@pytest.mark.parametrize("slab_bytes", [1, 2000, 10**6])
def test_what_is_overwritten_after_a_take_is_restored_as_it_was(
    slab_bytes: int, tmp_path: Path, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHSNAPSHOT_SLAB_SIZE_THRESHOLD_BYTES_OVERRIDE", str(slab_bytes))
    tensors = {"large": torch.ones(1000), "small": torch.ones(10), "gaps": torch.ones(900, 2)[:, 0]}
    with corrected(BUDGET_BYTES, 5.0):
        restored = take(tmp_path, tensors, held)
    assert all(bool((tensor == 1).all()) for tensor in restored.values())


def test_the_same_holds_where_tensors_are_not_batched(
    tmp_path: Path, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHSNAPSHOT_DISABLE_BATCHING", "1")
    with corrected(BUDGET_BYTES, 5.0):
        restored = take(tmp_path, {"small": torch.ones(10)}, held)
    assert bool((restored["small"] == 1).all())


def test_the_library_as_it_ships_writes_what_came_later(
    tmp_path: Path, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails the library has become better, and needs that correction no more."""
    monkeypatch.setenv("TORCHSNAPSHOT_SLAB_SIZE_THRESHOLD_BYTES_OVERRIDE", "2000")
    assert bool((take(tmp_path, {"large": torch.ones(1000)}, held)["large"] == 2).all())


def lose_store(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("the store is gone")

    monkeypatch.setattr(LinearBarrier, "arrive", gone)
    monkeypatch.setattr(LinearBarrier, "report_error", gone)


def test_a_take_whose_store_is_gone_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lose_store(monkeypatch)
    with corrected(BUDGET_BYTES, 5.0):
        pending = Snapshot.async_take(str(tmp_path), {"state": StateDict(weight=torch.ones(10))})
    with pytest.raises(RuntimeError, match="the store is gone"):
        pending.wait()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_library_as_it_ships_takes_that_for_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails the library has become better, and needs that correction no more."""
    lose_store(monkeypatch)
    pending = Snapshot.async_take(str(tmp_path), {"state": StateDict(weight=torch.ones(10))})
    pending.wait()
    assert not (tmp_path / ".snapshot_metadata").exists()


def test_a_peer_is_waited_for_as_long_as_was_said(tmp_path: Path) -> None:
    with corrected(BUDGET_BYTES, 7.0):
        pending = Snapshot.async_take(str(tmp_path), {"state": StateDict(weight=torch.ones(10))})
    assert pending.DEFAULT_BARRIER_TIMEOUT.total_seconds() == 7
    assert torchsnapshot.snapshot.PendingSnapshot.DEFAULT_BARRIER_TIMEOUT.total_seconds() == 1800
    pending.wait()


def test_the_budget_is_what_was_said_and_nothing_stays_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budgets, execute = [], torchsnapshot.scheduler.sync_execute_write_reqs

    def note(**options: Any) -> Any:
        budgets.append(options["memory_budget_bytes"])
        return execute(**options)

    monkeypatch.setattr(torchsnapshot.snapshot, "sync_execute_write_reqs", note)
    before = vars(torchsnapshot.snapshot).copy(), TensorBufferStager._should_copy_cpu_tensor
    for settings in (corrected(BUDGET_BYTES, 5.0), nullcontext()):
        with settings:
            Snapshot.async_take(str(tmp_path / str(len(budgets))), {"state": StateDict(w=torch.ones(9))}).wait()
    assert budgets[0] == BUDGET_BYTES != budgets[1]
    assert (vars(torchsnapshot.snapshot), TensorBufferStager._should_copy_cpu_tensor) == before
