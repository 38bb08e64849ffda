"""Carries what ranks of one machine write into their run's folder to the folder of machine 0, while the run goes on.

Records are only ever appended to, so what is carried is what files have grown by, at the ends of lines. Files that are
written at once, as the reason to stop, are carried as a whole; of several machines' the first one counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

from capricorn.errors import TransportError
from capricorn.files import write_text
from capricorn.machines.control_messages import FileGrew
from capricorn.records.job_file import JOB, WORKERS
from capricorn.units import MIB, Bytes

MAX_PIECE_BYTES: Final[Bytes] = MIB
"""Of one file in one message; what is longer follows in the next ones."""
AT_ONCE: Final = ".json"
"""The suffix of files that are written at once."""
OF_THE_MACHINE: Final = frozenset({JOB, WORKERS})
"""What concerns the processes of one machine alone."""


class RecordReader:
    """Finds what has been appended to the files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}

    def grown(self, *, is_last: bool = False) -> Iterator[FileGrew]:
        """Yields what has come since the last call; a line without its end only if it is the last call."""
        for path in sorted(self._folder.rglob("*")):
            name = path.relative_to(self._folder)
            if name.parts[0] in OF_THE_MACHINE or path.suffix == ".tmp" or not path.is_file():
                continue
            yield from self._grown(path, name.as_posix(), is_last=is_last)

    def _grown(self, path: Path, name: str, *, is_last: bool) -> Iterator[FileGrew]:
        is_new = path not in self._offsets
        offset = self._offsets.setdefault(path, 0)
        if is_new and not path.stat().st_size:
            yield FileGrew(name=name, text="")
        with path.open("rb") as file:
            file.seek(offset)
            while data := file.read(MAX_PIECE_BYTES):
                is_end = len(data) < MAX_PIECE_BYTES
                whole = data if is_end and (is_last or path.suffix == AT_ONCE) else _lines_of(data, is_end=is_end)
                if not whole:
                    return
                offset += len(whole)
                self._offsets[path] = offset
                file.seek(offset)
                yield FileGrew(name=name, text=whole.decode(errors="replace"))


def _lines_of(data: bytes, *, is_end: bool) -> bytes:
    """Returns the lines that are whole; of one that is longer than a piece, as many characters as are."""
    if (end := data.rfind(b"\n") + 1) or is_end:
        return data[:end]
    start = len(data) - 1
    while start and data[start] & 0xC0 == 0x80:  # within a character of UTF-8
        start -= 1
    return data[:start] or data


def append_to(folder: Path, grown: FileGrew) -> None:
    """Appends what a file on another machine has grown by to that of the same name here.

    Raises:
        TransportError: its name leads out of the folder, or is of what each machine has of its own.
        OSError, CapricornError: it cannot be written.
    """
    name = PurePosixPath(grown.name)
    if name.is_absolute() or ".." in name.parts or not name.parts or name.parts[0] in OF_THE_MACHINE:
        raise TransportError(f"a file {grown.name!r} was announced, which is none of the run")
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == AT_ONCE:
        if not path.exists():
            write_text(path, grown.text)
        return
    with path.open("ab", buffering=0) as file:  # in one call: others append to the same file
        file.write(grown.text.encode())
