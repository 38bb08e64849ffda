"""TorchSnapshot, the real library: a checkpoint is staged in memory while training waits, and written beside it.

What would make its checkpoints wrong or its failures endless is corrected, by what is known of the inside of version
0.1.0, as it is no longer maintained; `TorchSnapshot` says what stays wrong. Where the storage is modelled, bytes go to
a real folder, after (when written) or before (when read) the time that they would take.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final
from unittest.mock import patch

import torch.distributed as dist
import torchsnapshot.snapshot
from torchsnapshot import Snapshot, StateDict
from torchsnapshot.dist_store import LinearBarrier
from torchsnapshot.io_preparers.tensor import TensorBufferStager
from torchsnapshot.io_types import ReadIO, WriteIO
from torchsnapshot.knobs import get_slab_size_threshold_bytes, is_batching_disabled
from torchsnapshot.manifest import ChunkedTensorEntry, Entry
from torchsnapshot.serialization import Serializer
from torchsnapshot.storage_plugins.fs import FSStoragePlugin

from capricorn.emulation.storage import Storage
from capricorn.errors import ConfigError
from capricorn.systems.flat_state import FlatState
from capricorn.systems.interface import JobContext
from capricorn.units import Bytes, Seconds

from .file_checkpoints import FileCheckpoints, Library, Write
from .file_settings import TorchSnapshotSettings

SIGN: Final = ".snapshot_metadata"
KEY: Final = "state"
"""All tensors are under one: a restore reads the whole snapshot once for each."""
PROTOCOL: Final = "paced"
"""Of the URL that leads TorchSnapshot to the plugin: `paced:///folder`, by an entry point of that name."""


class _Snapshots(Library):
    """Asynchronous takes, each of a folder of its own."""

    is_async: ClassVar[bool] = True
    needs_group: ClassVar[bool] = True
    _pending: Pending | None = None
    _path: str = ""

    def __init__(self, job: JobContext, state: FlatState) -> None:
        super().__init__(job, state)
        self._budget_bytes = job.settings.budget_bytes or 2 * self.num_bytes

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
        if self.clocks is None:
            return {"path": str(folder), "pg": self.group}
        options = storage_options(*self.clocks)
        return {"path": f"{PROTOCOL}://{folder}", "pg": self.group, "storage_options": options}

    def _corrected(self) -> AbstractContextManager[None]:
        return corrected(self._budget_bytes, self.timeout_s)


def _places(entry: Entry) -> list[str]:
    """Returns where a tensor lies in its folder."""
    if isinstance(entry, ChunkedTensorEntry):
        return [chunk.tensor.location for chunk in entry.chunks]
    return [entry.location] if hasattr(entry, "location") else []


class TorchSnapshot(FileCheckpoints):
    """`Snapshot.async_take` of every checkpoint, and one on its way at a time.

    What stays wrong: a truncated file restores nothing of what lay beyond its end, and a flipped bit loads, both
    without a word; a bfloat16 tensor of odd length, and float8, cannot be saved.
    Source: torchsnapshot 0.1.0.
    """

    settings = TorchSnapshotSettings
    library: ClassVar[type[Library]] = _Snapshots


# --- what is corrected


@contextmanager
def corrected(budget_bytes: Bytes, timeout_s: Seconds) -> Iterator[None]:
    """Inside, the library copies what it must, and waits for no peer longer than that.

    The RAM budget is set here too, since the library takes it from the environment, which is everybody's.
    """
    with (
        patch.object(torchsnapshot.snapshot, "get_process_memory_budget_bytes", lambda pg: budget_bytes),
        patch.object(torchsnapshot.snapshot, "PendingSnapshot", partial(Pending, timeout_s)),
        patch.object(TensorBufferStager, "_should_copy_cpu_tensor", _is_live),
    ):
        yield


class Pending(torchsnapshot.snapshot.PendingSnapshot):
    """A take that waits for peers as long as we say (the library: 1800 s), and has failed if its thread has."""

    def __init__(self, timeout_s: Seconds, **parts: Any) -> None:
        self.DEFAULT_BARRIER_TIMEOUT = timedelta(seconds=timeout_s)
        self.manifest: dict[str, Entry] = parts["metadata"].manifest
        self.storage = parts["storage"]
        super().__init__(**parts)

    def _complete_snapshot(self, *arguments: Any, **parts: Any) -> None:
        try:
            super()._complete_snapshot(*arguments, **parts)
        except Exception:  # noqa: BLE001 - a store that is gone raises in the library's own handler
            self.exc_info = sys.exc_info()


def _is_live(stager: TensorBufferStager) -> bool:
    """Returns whether the memory that will be written is the live tensor's own, so that it has to be copied.

    The library means to ask that, but compares a string with an enum and never copies. What goes into a slab is copied
    there, and what is not contiguous on the way.
    """
    is_raw = stager.entry.serializer == Serializer.BUFFER_PROTOCOL.value
    has_slab = not is_batching_disabled() and stager.tensor.nbytes < get_slab_size_threshold_bytes()
    return is_raw and stager.tensor.is_contiguous() and not has_slab


# --- the modelled storage behind its storage interface


def storage_options(folder: Path, node: int) -> dict[str, Any]:
    """Returns what TorchSnapshot is given with the URL; not part of it, as all ranks are made to use that of rank 0."""
    return {"storage": str(folder), "node": node}


class PacedPlugin(FSStoragePlugin):
    """TorchSnapshot's own plugin for files, charged for what it moves."""

    def __init__(self, root: str, options: dict[str, Any] | None = None) -> None:
        """Opens the clocks that `storage_options` names; TorchSnapshot closes them.

        Raises:
            ConfigError: the options do not say which storage, and of which node.
            TransportError: that storage is not there.
        """
        if options is None or not {"storage", "node"} <= options.keys():
            raise ConfigError(f"{PROTOCOL}://{root} needs the storage_options 'storage' and 'node'; got {options}")
        super().__init__(root)
        self._storage = Storage(Path(options["storage"]), options["node"])
        # One thread, so that a rank is one flow however many of its files are on their way.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="capricorn-storage")

    async def write(self, write_io: WriteIO) -> None:
        await self._charge(memoryview(write_io.buf).nbytes)
        await super().write(write_io)

    async def read(self, read_io: ReadIO) -> None:
        await super().read(read_io)
        await self._charge(read_io.buf.getbuffer().nbytes)

    def give_up(self) -> None:
        """Makes what is on its way fail."""
        self._storage.close()

    async def close(self) -> None:
        self._executor.shutdown()
        self._storage.close()

    async def _charge(self, num_bytes: Bytes) -> None:
        # Beside the event loop, which has other files to move meanwhile.
        await asyncio.get_running_loop().run_in_executor(self._executor, self._storage.charge, num_bytes)
