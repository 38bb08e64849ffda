"""TorchSnapshot, the real library: a checkpoint is staged in memory while training waits, and written beside it.

What would make its checkpoints wrong or its failures endless is corrected; `TorchSnapshot.notes` has what stays.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

import torch.distributed as dist
from torchsnapshot import Snapshot, StateDict
from torchsnapshot.dist_store import LinearBarrier
from torchsnapshot.manifest import ChunkedTensorEntry, Entry

from .file_settings import TorchSnapshotSettings
from .files import FileCheckpoints
from .library import Library, Write
from .snapshot_corrections import Pending, corrected
from .snapshot_storage import PROTOCOL, PacedPlugin, storage_options

SIGN: Final = ".snapshot_metadata"
KEY: Final = "state"
"""All tensors are under one: a restore reads the whole snapshot once for each."""


class _Snapshots(Library):
    """Asynchronous takes, each of a folder of its own."""

    _pending: Pending | None = None
    _path: str = ""

    def open(self) -> None:
        super().open()
        # What waits at a barrier holds the store; another's connection is needed to end that.
        self._store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]

    def begin(self, folder: Path) -> Write:
        place = self._place(folder)
        self._path = place["path"]
        with self._corrected():
            pending = Snapshot.async_take(**place, app_state={KEY: StateDict(**self.tensors)})
        assert isinstance(pending, Pending)
        self._pending = pending
        return partial(self._finish, pending, folder)

    def is_whole(self, folder: Path, num_ranks: int) -> bool:
        return (folder / SIGN).exists()

    def load(self, folder: Path) -> None:
        with self._corrected():
            Snapshot(**self._place(folder)).restore({KEY: StateDict(**self.tensors)})

    def close(self) -> None:
        self._pending = None  # or the group would live on in it
        super().close()

    def abandon(self) -> None:
        # Whoever waits for a rank at the library's barrier is told that it has failed.
        for rank in range(self.job.topology.world_size):
            barrier = LinearBarrier(f"torchsnapshot_{self._path}", self._store, rank, 0, 0)
            with suppress(RuntimeError):  # the store is gone too, and with it the wait
                barrier.report_error(f"rank {self.job.rank} gave up")
        self._pending = None  # or the group would live on in it
        super().abandon()

    def give_up(self) -> None:
        if self._pending is not None and isinstance(self._pending.storage, PacedPlugin):
            self._pending.storage.give_up()
        super().give_up()

    def _finish(self, pending: Pending, folder: Path) -> list[Path]:
        pending.thread.join()
        if pending.exc_info is not None:
            raise pending.exc_info[1]
        prefix, is_first = f"{self.job.rank}/", self.job.rank == 0
        mine = {place for key, entry in pending.manifest.items() if key.startswith(prefix) for place in _places(entry)}
        return [folder / place for place in (*sorted(mine), *([SIGN] if is_first else []))]

    def _place(self, folder: Path) -> dict[str, Any]:
        if self.job.storage_dir is None:
            return {"path": str(folder), "pg": self.group}
        options = storage_options(self.job.storage_dir, self.job.topology.node_of(self.job.rank))
        return {"path": f"{PROTOCOL}://{folder}", "pg": self.group, "storage_options": options}

    def _corrected(self) -> AbstractContextManager[None]:
        return corrected(self.job.settings.budget_bytes or 2 * self.num_bytes, self.timeout_s)


def _places(entry: Entry) -> list[str]:
    """Where a tensor lies in its folder."""
    if isinstance(entry, ChunkedTensorEntry):
        return [chunk.tensor.location for chunk in entry.chunks]
    return [entry.location] if hasattr(entry, "location") else []


class TorchSnapshot(FileCheckpoints):
    """`Snapshot.async_take` of every checkpoint, and one on its way at a time.

    Source: torchsnapshot 0.1.0.
    """

    settings = TorchSnapshotSettings
    library: ClassVar[type[Library]] = _Snapshots
    notes: ClassVar[tuple[str, ...]] = (
        "a truncated file restores nothing of what lay beyond its end, without a word",
        "a flipped bit loads without a word",
        "a bfloat16 tensor of odd length cannot be saved",
        "float8 cannot be saved",
    )
