"""torch_checkpointing, the real library: staged into shared memory beside training, written by a process of its own.

The library has the name of this module and is meant by every absolute import of it. Where the storage is modelled,
bytes go to a real folder after (when written) or before (when read) the time that they would take.
"""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, partial
from math import ceil
from multiprocessing import process, resource_sharer
from pathlib import Path
from typing import Any, ClassVar, Final

from torch_checkpointing import CheckpointManager
from torch_checkpointing.barriers import DefaultStoreBarrierConfig
from torch_checkpointing.checkpoint_process import CheckpointProcess, CheckpointProcessConfig
from torch_checkpointing.checkpoint_saver import AsyncCheckpointSaver
from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
from torch_checkpointing.config import AsyncCheckpointSaverConfig
from torch_checkpointing.staging import CheckpointStagerConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorage, LocalFileSystemStorageConfig, WriteStream

from capricorn.emulation.storage import Storage
from capricorn.errors import StoreError
from capricorn.process import die_with_parent
from capricorn.systems.interface import JobContext
from capricorn.units import Seconds

from .file_checkpoints import FileCheckpoints, Library, Write

KEY: Final = "state"
"""Of the one item, which becomes one file a rank."""
UNFINISHED: Final = "tmp_"
"""What the name of a folder begins with until all ranks have written."""
TICK_S: Final[Seconds] = 0.001
START_S: Final = 60
"""What the process is given to start, which is mostly imports."""
END_S: Final = 2
MAX_LENGTH: Final = 89
"""Of a folder for sockets: the kernel takes names of 107 bytes, and Python's are up to 18."""


class _Manager(Library):
    """Its default commit: all ranks meet in the store of the job, then rank 0 gives the folder its name."""

    is_async: ClassVar[bool] = True
    _manager: CheckpointManager | None = None
    _num_opened = 0

    def open(self) -> None:
        is_first = self._num_opened == 0
        share_in(self.job.store_dir)
        if is_first and self.job.rank == 0:
            assert self.job.files_dir is not None
            for folder in self.job.files_dir.glob(f"{UNFINISHED}*"):
                shutil.rmtree(folder)
        self._manager = CheckpointManager(settings(self.job, self._num_opened, self.clocks))
        if is_first:  # later ones start beside training
            self._process.wait_for_init()
            self._manager.prewarm_staging({KEY: self.tensors})
        self._num_opened += 1

    def begin(self, folder: Path) -> Write:
        assert self._manager is not None
        written = self._manager.save(str(folder), {KEY: self.tensors})
        assert written is not None
        return partial(self._finish, written, folder)

    def isolate(self, timeout_s: Seconds) -> bool:
        assert self._manager is not None
        try:
            with self._manager.lock():  # its deadline is `timeout_s` rounded up
                return True
        except RuntimeError:
            return False

    def is_whole(self, folder: Path, num_ranks: int) -> bool:
        return all(_file_of(folder, rank).exists() for rank in range(num_ranks))

    def load(self, folder: Path) -> None:
        assert self._manager is not None
        self.charge(_file_of(folder, self.job.rank).stat().st_size)
        self._manager.load(str(folder), into={KEY: self.tensors}, strict=True)

    def recover(self) -> None:
        self.close()  # the process ends with the first save that fails in it
        self.open()

    def give_up(self) -> None:
        daemon = self._process.process
        if daemon is not None:
            daemon.processes[0].kill()

    def close(self) -> None:
        if self._manager is not None:
            process = self._process
            manager, self._manager = self._manager, None
            manager._write_future = None  # whether it failed has been told
            manager.close()
            if process._parent_end is not None:
                process._parent_end.close()  # which the library leaves open
            end_sharing(END_S)

    @property
    def _process(self) -> CheckpointProcess:
        assert self._manager is not None
        assert isinstance(self._manager._saver, AsyncCheckpointSaver)
        return self._manager._saver._checkpoint_process

    def _finish(self, written: Future[Any], folder: Path) -> list[Path]:
        try:
            written.result()
        except Exception as error:  # noqa: BLE001 - a process reports what it likes
            raise StoreError(str(error).strip().rpartition("\n")[2]) from None  # the rest is the process's traceback
        deadline_s = time.monotonic() + self.timeout_s
        while not folder.exists():  # until rank 0 has named it
            if time.monotonic() > deadline_s:
                raise StoreError(f"rank {self.job.rank}: {folder} is written but rank 0 has not put it there")
            time.sleep(TICK_S)
        return [_file_of(folder, self.job.rank)]


class TorchCheckpointing(FileCheckpoints):
    """`CheckpointManager.save` of every checkpoint.

    What stays wrong: a flipped bit loads without a word; files are unpickled without restriction when they are read;
    shared memory and the process that writes are not part of the memory shown.
    Source: torch_checkpointing 0.1.
    """

    library: ClassVar[type[Library]] = _Manager


def _file_of(folder: Path, rank: int) -> Path:
    return folder / f"{KEY}_{rank}.pt"


# --- its settings, and the files behind its storage interface


def settings(job: JobContext, num_opened: int, clocks: tuple[Path, int] | None) -> CheckpointManager.Config:
    """Returns the library's defaults, with our deadlines, and without what needs a GPU or aligned memory."""
    deadline_s, on_cuda = ceil(job.config.timeout_s), job.device.type == "cuda"
    # By default the barrier is named by torchrun's restart count, which differs between nodes once one was lost.
    generation = f"{job.run_id}.{job.attempt}.{num_opened}"
    writer = CheckpointWriterConfig(
        checkpoint_write_barrier_timeout_sec=deadline_s,
        barrier_config=DefaultStoreBarrierConfig(generation=generation, timeout_barrier_init_sec=START_S),
        temp_dir_prefix=UNFINISHED,
    )
    saver = AsyncCheckpointSaverConfig(
        writer_config=writer,
        wait_timeout_secs=deadline_s,
        staging_config=CheckpointStagerConfig(use_pinned_memory=on_cuda, use_non_blocking_copy=on_cuda),
        process_config=CheckpointProcessConfig(
            subprocess_init_timeout_secs=START_S, subprocess_shutdown_timeout_secs=END_S
        ),
    )
    return CheckpointManager.Config(
        save=saver,
        storage_config=FilesConfig(use_direct_io=False, clocks=clocks),
        subprocess_init_fn=partial(die_with_parent, os.getpid()),
    )


@dataclass
class FilesConfig(LocalFileSystemStorageConfig):
    """The library's own files, charged if there is a modelled storage; what that is made of does not travel."""

    clocks: tuple[Path, int] | None = None
    """Folder and node of the modelled storage."""

    def create_storage(self) -> LocalFileSystemStorage:
        return _PacedFiles(self, self.clocks) if self.clocks is not None else LocalFileSystemStorage(self)


class _PacedFiles(LocalFileSystemStorage):
    """Writes local files that are charged."""

    def __init__(self, config: FilesConfig, clocks: tuple[Path, int]) -> None:
        super().__init__(config)
        self._clocks = clocks

    def stream_write(self, path: Path) -> WriteStream:
        return _PacedStream(path, _storage(*self._clocks))


class _PacedStream(WriteStream):
    """One such file."""

    def __init__(self, path: Path, storage: Storage) -> None:
        super().__init__(path, use_direct_io=False)
        self._storage = storage

    def write(self, data: Any) -> int:
        self._storage.charge(memoryview(data).nbytes)
        return super().write(data)


@cache
def _storage(folder: Path, node: int) -> Storage:
    """Opened where the first byte is written, which is in the process."""
    return Storage(folder, node)


# --- the thread and the socket by which Python hands shared memory over to the process


def share_in(folder: Path) -> None:
    """Puts the socket into that folder, which others remove, unless it is made already or the name is too long.

    By default it is in a folder below /tmp that stays if the trainer is killed.
    """
    config = process.current_process()._config  # type: ignore[attr-defined]
    if config.get("tempdir") is None and len(str(folder)) <= MAX_LENGTH:
        config["tempdir"] = str(folder)


def end_sharing(patience_s: Seconds) -> None:
    """Ends the thread, and removes the socket."""
    resource_sharer.stop(timeout=patience_s)
