"""What torch_checkpointing is given: its settings in a job, and the modelled file system behind its storage interface.

Bytes go to a real folder, after the time that they would take. Reading is charged by the caller.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any, Final

from torch_checkpointing import CheckpointManager
from torch_checkpointing.barriers import DefaultStoreBarrierConfig
from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
from torch_checkpointing.config import AsyncCheckpointSaverConfig
from torch_checkpointing.staging import CheckpointStagerConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorage, LocalFileSystemStorageConfig, WriteStream

from capricorn.emulation.storage import Storage
from capricorn.process import die_with_parent
from capricorn.systems.interface import JobContext

UNFINISHED: Final = "tmp_"
"""What the name of a folder begins with until all ranks have written."""
START_S: Final = 60
"""What the process is given to start, which is mostly imports."""
END_S: Final = 2


def settings(job: JobContext, num_opened: int) -> CheckpointManager.Config:
    """The library's defaults, with our deadlines, and without what needs a GPU or aligned memory."""
    deadline_s, on_cuda = ceil(job.config.timeout_s), job.device.type == "cuda"
    clocks = (job.storage_dir, job.topology.node_of(job.rank)) if job.storage_dir is not None else None
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
        subprocess_init_fn=die_with_parent,
    )


@dataclass
class FilesConfig(LocalFileSystemStorageConfig):
    """The library's own files, charged if there is a modelled storage; what that is made of does not travel."""

    clocks: tuple[Path, int] | None = None
    """Folder and node of the modelled storage."""

    def create_storage(self) -> LocalFileSystemStorage:
        return _PacedFiles(self, self.clocks) if self.clocks is not None else LocalFileSystemStorage(self)


class _PacedFiles(LocalFileSystemStorage):
    def __init__(self, config: FilesConfig, clocks: tuple[Path, int]) -> None:
        super().__init__(config)
        self._clocks = clocks

    def stream_write(self, path: Path) -> WriteStream:
        return _PacedStream(path, _storage(*self._clocks))


class _PacedStream(WriteStream):
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
