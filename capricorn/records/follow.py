"""Follows the JSON lines that several processes append to a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Generic, TypeVar

from capricorn.config.fields import FrozenModel
from capricorn.records.samples import read_line

S = TypeVar("S", bound=FrozenModel)


class Follower(Generic[S]):
    """Yields each sample of a growing file once; who reads the file at the end counts the lines that are damaged."""

    def __init__(self, path: Path, kind: type[S]) -> None:
        self._path, self._kind, self._offset = path, kind, 0
        self._unknown: set[str] = set()

    def new(self) -> Iterator[S]:
        """Yields the samples that came since the last call; a line without its end waits for the next."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                if (sample := read_line(line, self._kind, self._unknown)) is not None:
                    yield sample
