"""Follows the JSON lines that several processes append to a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Generic, TypeVar

from capricorn.config.fields import FrozenModel

S = TypeVar("S", bound=FrozenModel)


class Follower(Generic[S]):
    """Yields each sample of a growing file once."""

    def __init__(self, path: Path, kind: type[S]) -> None:
        self._path, self._kind, self._offset = path, kind, 0

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
                yield self._kind.model_validate_json(line)
