"""torch.distributed.checkpoint (DCP), the real library, as systems: written while training waits, or beside it.

Its files are written without checksums that nobody reads, and charged where the storage is modelled: bytes go to a real
folder after (when written) or before (when read) the time that they would take.
"""

from __future__ import annotations

import io
import os
import shutil
import threading
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import cache, partial
from multiprocessing import parent_process, resource_sharer
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint import _async_process_executor as executor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save, save

from capricorn.emulation.storage import Storage
from capricorn.errors import StoreError
from capricorn.systems.flat_state import FlatState
from capricorn.systems.interface import JobContext
from capricorn.units import Seconds

from .checkpoint_folders import REMOVED
from .file_checkpoints import FileCheckpoints, Library, Write, in_words
from .file_settings import DcpAsyncSettings, DcpSettings
from .torch_save import without_crc32

SIGN: Final = ".metadata"
FLAT: Final = {"flatten_state_dict": False, "flatten_sharded_tensors": False}
"""Our tensors are named and whole already."""
START_S: Final = 60.0
"""What the process that writes is given to start, which is mostly imports."""
END_S: Final = 2.0


# --- the libraries: while training waits, by a thread, by a process


class DcpLibrary(Library):
    """Saves tensors under their global names, and small values, which every rank has, under that of the rank."""

    needs_group: ClassVar[bool] = True

    def __init__(self, job: JobContext, state: FlatState) -> None:
        super().__init__(job, state)
        # Its own fsync leaves out the folder, and of .metadata what is still in Python's buffer; ours does not.
        self.options: dict[str, Any] = {"thread_count": job.settings.threads, "sync_files": False}

    @property
    def named(self) -> dict[str, Tensor]:
        prefix = f"rank{self.job.rank}/"
        return {f"{prefix}{k}" if k.startswith("value/") else k: tensor for k, tensor in self.tensors.items()}

    def begin(self, folder: Path) -> Write:
        return partial(self._save, folder)

    def is_whole(self, folder: Path, num_ranks: int) -> bool:
        return (folder / SIGN).exists()

    def load(self, folder: Path) -> None:
        reader, planner = PacedReader(folder, self.storage), DefaultLoadPlanner(**FLAT)
        with as_error():
            load(self.named, storage_reader=reader, planner=planner, process_group=self.group)

    def close(self) -> None:
        _forget_plans()
        super().close()

    def how(self, folder: Path) -> dict[str, Any]:
        """Returns the arguments of a save besides what is saved."""
        return {"storage_writer": self.writer(folder), "planner": _Planner(), "process_group": self.group}

    def writer(self, folder: Path) -> FileSystemWriter:
        return PacedWriter(folder, self.storage, **self.options)

    def files(self, folder: Path) -> list[Path]:
        """Returns what this rank has written."""
        files = sorted(folder.glob(f"__{self.job.rank}_*.distcp"))
        return [*files, folder / SIGN] if self.job.rank == 0 else files

    def _save(self, folder: Path) -> list[Path]:
        with as_error():
            save(self.named, **self.how(folder))
        return self.files(folder)


class DcpThread(DcpLibrary):
    """Staged by a thread into buffers that are kept, for which the next update waits, and written by another."""

    is_async: ClassVar[bool] = True
    kind: ClassVar[AsyncCheckpointerType] = AsyncCheckpointerType.THREAD
    _stager: DefaultStager | None = None
    _staged: Future[None] | None = None

    def open(self) -> None:
        super().open()
        on_cuda, is_shared = self.job.device.type == "cuda", self.kind is AsyncCheckpointerType.PROCESS
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=on_cuda,
                use_shared_memory=is_shared,
                use_async_staging=True,
                use_non_blocking_copy=on_cuda,
            )
        )

    def begin(self, folder: Path) -> Write:
        saving = self._start(self.named, folder)
        self._staged = saving.staging_completion
        return partial(self._finish, saving.upload_completion, folder)

    def isolate(self, timeout_s: Seconds) -> bool:
        return self._staged is None or not wait([self._staged], timeout_s).not_done

    def close(self) -> None:
        stager, self._stager = self._stager, None
        if stager is not None:
            stager.close()
        super().close()

    def _start(self, named: Mapping[str, Tensor], folder: Path) -> AsyncSaveResponse:
        how = {"async_stager": self._stager, "async_checkpointer_type": self.kind, **self.how(folder)}
        with as_error():
            saving = async_save(dict(named), **how)
        assert isinstance(saving, AsyncSaveResponse)
        return saving

    def _finish(self, written: Future[None], folder: Path) -> list[Path]:
        with as_error():
            written.result()
        return self.files(folder)


class DcpProcess(DcpThread):
    """Staged into shared memory, from which a process writes that is started beforehand."""

    kind: ClassVar[AsyncCheckpointerType] = AsyncCheckpointerType.PROCESS

    def open(self) -> None:
        super().open()
        assert self.job.files_dir is not None
        folder = self.job.files_dir / f"{REMOVED}warm-up"
        # The first save would wait for the process to start.
        written = self._start({f"rank{self.job.rank}": torch.zeros(1)}, folder).upload_completion
        if wait([written], START_S).not_done:
            raise StoreError(f"rank {self.job.rank}: the process that writes has not started in {START_S:.0f} s")
        with as_error():
            written.result()
        if self.job.rank == 0:
            shutil.rmtree(folder)

    def writer(self, folder: Path) -> FileSystemWriter:
        return DaemonWriter(folder, self.clocks, **self.options)

    def abandon(self) -> None:
        end_daemon(0.0)
        super().abandon()

    def close(self) -> None:
        end_daemon(END_S)
        super().close()


class _Planner(DefaultSavePlanner):
    """Plans once: ranks send their plans again only if they have changed. The library keeps them by this name."""

    def __init__(self) -> None:
        super().__init__(**FLAT, enable_plan_caching=True)


def _forget_plans() -> None:
    for plans in vars(SavePlanner).values():
        if isinstance(plans, dict):
            plans.pop(_Planner.__name__, None)


@contextmanager
def as_error() -> Iterator[None]:
    """Makes of what the library raises, which is no Exception, a StoreError that names the rank."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        if not isinstance(cause, Exception):
            raise cause from None  # a signal that came meanwhile
        raise StoreError(f"rank {rank}: {in_words(cause)}") from None


# --- the systems


class Dcp(FileCheckpoints):
    """`dcp.save` of every checkpoint.

    What stays wrong: a flipped bit loads without a word.
    Source: torch.distributed.checkpoint of the torch that is installed.
    """

    settings = DcpSettings
    library: ClassVar[type[Library]] = DcpLibrary


class DcpAsync(FileCheckpoints):
    """`dcp.async_save` of every checkpoint, by a thread or a process.

    What stays wrong: a flipped bit loads without a word.
    Source: torch.distributed.checkpoint of the torch that is installed.
    """

    settings = DcpAsyncSettings

    def make_library(self, job: JobContext, state: FlatState) -> Library:
        return DcpProcess(job, state) if job.settings.mode == "process" else DcpThread(job, state)


# --- the process that writes: what it is sent, and that it ends with its trainer


class DaemonWriter(FileSystemWriter):
    """Names a writer here, and is one in the process: what a modelled storage is made of does not travel."""

    def __init__(self, folder: Path, clocks: tuple[Path, int] | None, **options: Any) -> None:
        """`clocks`: folder and node of a modelled storage."""
        super().__init__(folder, **options)
        self._arrives_as = (folder, clocks, options)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack, self._arrives_as


def end_daemon(patience_s: Seconds) -> None:
    """Asks the process to end, if there is one, and sees to it."""
    daemon, executor._CHECKPOINT_PROCESS = executor._CHECKPOINT_PROCESS, None
    if daemon is None:
        return
    with suppress(OSError):  # it has ended by itself
        daemon._send(executor._CheckpointSaveProcessControlOpts.TERMINATE)
    process = daemon._save_process
    process.join(patience_s)
    if process.is_alive():
        process.kill()
        process.join(patience_s)
    resource_sharer.stop(timeout=patience_s)  # a thread that hands out what is shared with the process


def _unpack(folder: Path, clocks: tuple[Path, int] | None, options: dict[str, Any]) -> FileSystemWriter:
    _end_with_trainer()
    return PacedWriter(folder, None if clocks is None else _storage(*clocks), **options)


@cache
def _storage(folder: Path, node: int) -> Storage:
    return Storage(folder, node)


@cache
def _end_with_trainer() -> None:
    """Makes this process go as soon as its trainer does, in the middle of a save or of a wait for others."""
    trainer = parent_process()
    assert trainer is not None

    def follow() -> None:
        trainer.join()
        os._exit(1)

    threading.Thread(target=follow, name="capricorn-follow", daemon=True).start()


# --- its files


class PacedWriter(FileSystemWriter):
    """DCP's own writer of files, without checksums, and charged for what it writes if the storage is modelled."""

    def __init__(self, path: Path, storage: Storage | None, **options: Any) -> None:
        """`options` are those of `FileSystemWriter`."""
        super().__init__(path, **options)
        self.fs = _PacedFileSystem(storage)


class PacedReader(FileSystemReader):
    """DCP's own reader of files, charged for what it reads if the storage is modelled."""

    def __init__(self, path: Path, storage: Storage | None) -> None:
        super().__init__(path)
        self.fs = _PacedFileSystem(storage)


class _PacedFileSystem(FileSystem):
    """DCP's local files; each thread that writes one opens it here."""

    def __init__(self, storage: Storage | None) -> None:
        self._storage = storage

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        with without_crc32(), self._open(path, mode) as stream:
            yield stream

    @contextmanager
    def _open(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        if self._storage is None:
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        raw = _PacedFile(path, mode, self._storage)
        with io.BufferedWriter(raw) if raw.writable() else io.BufferedReader(raw) as stream:
            yield stream


class _PacedFile(io.FileIO):
    """An unbuffered file, so what is charged is what passes between the process and its file system."""

    def __init__(self, path: str | os.PathLike[str], mode: str, storage: Storage) -> None:
        super().__init__(os.fspath(path), mode)
        self._storage = storage

    def write(self, data: Any) -> int:
        self._storage.charge(memoryview(data).nbytes)
        return super().write(data)

    def readinto(self, place: Any) -> int:
        num_bytes = super().readinto(place)
        self._storage.charge(num_bytes)
        return num_bytes

    def readall(self) -> bytes:
        data = super().readall()
        self._storage.charge(len(data))
        return data
