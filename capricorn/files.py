"""How files are opened and written that users name or that a run leaves: without a wait, whole or not at all, and with
errors of one line that name the path. Knows nothing of what is in them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir, mkdtemp
from typing import BinaryIO, Final

from capricorn.errors import CapricornError, ConfigError
from capricorn.units import Seconds

LOCK: Final = "lock"
"""The file in a temporary folder whose lock its command holds."""
STARTING_S: Final[Seconds] = 10.0
"""A command has made its lock by then."""
ON_THE_WAY: Final = frozenset({
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ESTALE,
    errno.EINTR, errno.EAGAIN, errno.EPIPE, errno.ETIMEDOUT, errno.EBUSY,
})  # fmt: skip
"""Errors that come from the machine while something is done; all others are about the path that was given."""
_KINDS: Final = (
    (stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"), (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"),
)  # fmt: skip


def failure(act: str, error: OSError) -> CapricornError:
    """Returns the error for what could not be done: `cannot write run.json: No space left on device`."""
    kind = CapricornError if error.errno in ON_THE_WAY else ConfigError
    return kind(f"cannot {act}: {error.strerror or error}")


def path_and_cause(error: OSError) -> str:
    """Returns the path of an error, where it has one, and its cause: `/x/run.json: Read-only file system`."""
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{error.strerror or error}"


@contextmanager
def named(act: str) -> Iterator[None]:
    """Makes an OSError of what is done within the one line `cannot ACT: CAUSE`.

    Raises:
        CapricornError: something failed on the way, such as a full disk.
        ConfigError: the path is not one for it.
    """
    try:
        yield
    except OSError as error:
        raise failure(act, error) from error


def open_descriptor(path: Path, flags: int, mode: int = 0o644) -> int:
    """Returns a descriptor of a regular file, as `os.open` does, and never waits for the other end of a FIFO.

    Raises:
        OSError: that is not possible, or something else than a file is there.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    try:
        check_regular(path, os.fstat(descriptor).st_mode)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def check_regular(path: Path, mode: int | None = None) -> None:
    """Raises OSError unless a file is there; `mode` is that of its status, where that is known."""
    found = path.stat().st_mode if mode is None else mode
    if stat.S_ISDIR(found):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    for is_kind, what in _KINDS:
        if is_kind(found):
            raise OSError(errno.EINVAL, f"it is {what}, not a file", str(path))


def open_file(path: Path) -> BinaryIO:
    """Returns a regular file opened to be read.

    Raises:
        OSError: it cannot be read, or is something else than a file.
    """
    return os.fdopen(open_descriptor(path, os.O_RDONLY), "rb")


def read_bytes(path: Path) -> bytes:
    """Returns the content of a regular file.

    Raises:
        OSError: it cannot be read, or is something else than a file.
    """
    with open_file(path) as file:
        return file.read()


def read_text(path: Path) -> str:
    """Returns the text of a regular file.

    Raises:
        OSError: it cannot be read, or is something else than a file.
        UnicodeDecodeError: it is no UTF-8.
    """
    return read_bytes(path).decode()


def memory_file() -> BinaryIO:
    """Returns a file without a name, in memory: unlike a temporary one it needs no folder that may be written."""
    return os.fdopen(os.memfd_create("capricorn"), "w+b")


def write_text(path: Path, text: str) -> None:
    """Writes a file so that a reader sees the old one or the new one, never a part.

    Raises:
        CapricornError: there is no room for it, or none may be written there.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    with named(f"write {path}"):
        try:
            descriptor = open_descriptor(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            with os.fdopen(descriptor, "wb") as file:
                file.write(text.encode())
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):  # what is wrong has been said by the first
                temporary.unlink(missing_ok=True)
            raise


@contextmanager
def temporary_folder(prefix: str, remove: Callable[[Path], None]) -> Iterator[Path]:
    """Makes a folder for temporary files, and removes it at the end; by its lock it is told from a leftover.

    The lock ends with the command, however that ends; see `temporary_folders`.
    """
    folder = Path(mkdtemp(prefix=prefix))
    with (folder / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            with contextlib.suppress(OSError):
                remove(folder)


def temporary_folders(prefix: str) -> list[tuple[Path, bool]]:
    """Returns the folders made with that prefix, each with whether its command is alive, or another user's."""
    return [(folder, _is_live(folder)) for folder in sorted(Path(gettempdir()).glob(f"{prefix}*"))]


def _is_live(folder: Path) -> bool:
    try:
        with (folder / LOCK).open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        # Killed before it made its lock, unless it is about to.
        return folder.exists() and time.time() - folder.stat().st_ctime < STARTING_S
    except OSError:
        return True
    return False
