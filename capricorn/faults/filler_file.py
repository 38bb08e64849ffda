"""Fills a small file system up, and empties it again. Never one that is not small: it may be the machine's own."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Final

from capricorn.errors import ConfigError
from capricorn.units import GIB, MIB, format_bytes

FILLER: Final = "filler"
NOTES: Final = "fillers"
"""The file in the store of a run that names, before it is made, each filler file that lies elsewhere."""
MAX_BYTES: Final = GIB
"""A file system of this size or more is not filled."""


def why_not_fill(folder: Path) -> str:
    """Returns why the file system of a folder, which need not exist yet, may not be filled; nothing if it may."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    facts = os.statvfs(there)
    size = facts.f_blocks * facts.f_frsize
    if size == 0:
        return f"the file system of {there} has no limit; mount a small tmpfs and put it there"
    if size < MAX_BYTES:
        return ""
    return (
        f"the file system of {there} has {format_bytes(size)}, and none of that size is filled; "
        "mount a small tmpfs and put it there"
    )


def fill(folder: Path) -> None:
    """Leaves no room in the file system of that folder.

    Raises:
        ConfigError: the file system is too large for that.
    """
    if reason := why_not_fill(folder):
        raise ConfigError(reason)
    path, size = folder / FILLER, 0
    with path.open("ab") as file:
        for step in (MIB, 4096):
            while size < MAX_BYTES and _claim(file.fileno(), size, step):
                size += step


def empty(folder: Path) -> None:
    """Removes the filler file again."""
    (folder / FILLER).unlink(missing_ok=True)


def note(store_dir: Path, folder: Path) -> None:
    """Notes in the store that a filler file is to come in that folder, so that it is found if the run is killed."""
    with (store_dir / NOTES).open("a", encoding="utf-8") as notes:
        notes.write(json.dumps(str(folder / FILLER)) + "\n")


def noted(store_dir: Path) -> list[Path]:
    """Returns the filler files that a run of this user has noted in its store."""
    notes = store_dir / NOTES
    try:
        if not stat.S_ISREG((facts := notes.lstat()).st_mode) or facts.st_uid != os.geteuid():
            return []
        paths = [Path(json.loads(line)) for line in notes.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError, TypeError):  # none, or torn off by the kill
        return []
    return [path for path in dict.fromkeys(paths) if path.is_absolute() and path.name == FILLER]


def _claim(fd: int, offset: int, num_bytes: int) -> bool:
    try:
        os.posix_fallocate(fd, offset, num_bytes)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return False
    return True
