"""Files that appear whole, and all together, or not at all. Knows nothing of what is in them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from capricorn.errors import ConfigError
from capricorn.files import named


class Outputs:
    """The files of one command, written beside their places and put there by `commit`."""

    def __init__(self) -> None:
        self._written: dict[Path, Path] = {}
        """Temporary files, by the path that they are to have."""
        self._made: list[Path] = []
        """Folders, the innermost first."""

    @contextmanager
    def open(self, path: Path) -> Iterator[IO[bytes]]:
        """Yields a file to be written; its folders are made.

        Raises:
            ConfigError: the path is taken by something else than a file, or cannot be written.
        """
        place = path.resolve()
        if place in self._written:
            raise ConfigError(f"{path} is named twice as an output: give each a path of its own")
        if place.exists() and not place.is_file():
            raise ConfigError(f"{path} is {'a folder' if place.is_dir() else 'no file'}: name a file to write")
        temporary = place.with_name(f".{place.name}.{os.getpid()}.tmp")
        with named(f"write {path}"):
            self._make(place.parent)
            with temporary.open("xb") as file:
                self._written[place] = temporary
                yield file

    def write(self, path: Path, data: bytes) -> None:
        """Writes a file with that content.

        Raises:
            ConfigError: as `open`.
        """
        with self.open(path) as file:
            file.write(data)

    def commit(self) -> None:
        """Puts every file into its place.

        Raises:
            ConfigError: that is not possible.
        """
        for place, temporary in list(self._written.items()):
            with named(f"write {place}"):
                temporary.replace(place)
            del self._written[place]
        self._made.clear()

    def discard(self) -> None:
        """Removes what was not put into its place, with the folders made for it."""
        for temporary in self._written.values():
            temporary.unlink(missing_ok=True)
        for folder in self._made:
            with contextlib.suppress(OSError):  # something else may lie in it by now
                folder.rmdir()

    def _make(self, folder: Path) -> None:
        missing = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        self._made = [*missing, *self._made]


def read_whole(path: Path) -> str:
    """Returns the text of a file that may be of anyone; empty if there is none.

    Raises:
        ConfigError: it cannot be read.
    """
    with named(f"read {path}"):
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


@contextmanager
def all_or_nothing() -> Iterator[Outputs]:
    """Yields outputs that are committed if all goes well, and leave nothing behind otherwise."""
    outputs = Outputs()
    try:
        yield outputs
        outputs.commit()
    finally:
        outputs.discard()
