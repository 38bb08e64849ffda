"""The file systems behind the storage interface of torch.distributed.checkpoint: plain, or modelled.

Bytes go to a real folder; where it is modelled, after (when written) or before (when read) the time that they would
take. Knows no system.
"""

from __future__ import annotations

import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter

from capricorn.emulation.storage import Storage

from .quick_save import without_crc32


class PlainWriter(FileSystemWriter):
    """DCP's own writer of files, without checksums; `options` are those of `FileSystemWriter`."""

    def __init__(self, path: Path, **options: Any) -> None:
        super().__init__(path, **options)
        self.fs = _PlainFileSystem()


class PacedWriter(FileSystemWriter):
    """DCP's own writer of files, without checksums and charged for what it writes."""

    def __init__(self, path: Path, storage: Storage, **options: Any) -> None:
        super().__init__(path, **options)
        self.fs = _PacedFileSystem(storage)


class PacedReader(FileSystemReader):
    """DCP's own reader of files, charged for what it reads."""

    def __init__(self, path: Path, storage: Storage) -> None:
        super().__init__(path)
        self.fs = _PacedFileSystem(storage)


class _PlainFileSystem(FileSystem):
    """DCP's local files; each thread that writes one opens it here."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        with without_crc32(), super().create_stream(path, mode) as stream:
            yield stream


class _PacedFileSystem(FileSystem):
    """DCP's local files, each charged."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        raw = _PacedFile(path, mode, self._storage)
        with without_crc32(), io.BufferedWriter(raw) if raw.writable() else io.BufferedReader(raw) as stream:
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
