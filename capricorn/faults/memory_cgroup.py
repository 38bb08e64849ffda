"""A memory cgroup of one's own, of version 1 or 2, in which the kernel kills who takes too much.

Must hold no process but the one that joined it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from capricorn.errors import ConfigError
from capricorn.units import MIB, Bytes

_ROOT: Final = Path("/sys/fs/cgroup")
_ROOM_BYTES: Final = 16 * MIB
"""What a process may still take after it has joined."""
_CHUNK_BYTES: Final = MIB
PREFIX: Final = "capricorn-"
_LIMITS: Final = ("memory.max", "memory.limit_in_bytes")


class _Version(NamedTuple):
    """Where groups are made, and the files by which the kernel speaks of their memory."""

    parent: Path
    limit: str
    usage: str
    swap: str
    """The limit of what may be swapped; of memory and swap together in version 1."""
    counts_both: bool


def why_not() -> str:
    """Makes a group and removes it again; returns why that does not work here, nothing if it does."""
    try:
        make(f"capricorn-probe-{os.getpid()}").rmdir()
    except ConfigError as error:
        return str(error)
    return ""


def make(name: str) -> Path:
    """Makes a group and returns its folder.

    Raises:
        ConfigError: it cannot be made.
    """
    for version in _versions():
        folder = version.parent / name
        with contextlib.suppress(OSError):
            folder.rmdir()  # of an earlier failure of the same rank, which has ended
        with contextlib.suppress(OSError):
            folder.mkdir()
            if os.access(folder / version.limit, os.W_OK):
                return folder
            folder.rmdir()
    raise ConfigError(f"no memory cgroup can be made below {_ROOT}; run as root where it is mounted for writing")


def exhaust(folder: Path) -> None:
    """Moves this process into the group and takes memory until the kernel kills it, rather than swap.

    Raises:
        ConfigError: the kernel did not.
    """
    limit = _join(folder, swaps=False)
    taken = _take(8 * _ROOM_BYTES)
    raise ConfigError(f"{taken} bytes were taken in {folder}, whose limit is {limit}, and nothing happened")


def swap_out(folder: Path) -> None:
    """Moves this process into the group and takes more memory than its limit, which the kernel has to swap."""
    _join(folder, swaps=True)
    _take(2 * _ROOM_BYTES)


def why_no_swap() -> str:
    """Returns why this machine cannot swap; nothing if it can."""
    return "" if psutil.swap_memory().total else "this machine has no swap; add some (swapon)"


def _join(folder: Path, *, swaps: bool) -> Bytes:
    """Moves this process into the group, which may take some more memory; returns its limit."""
    version = next(each for each in _versions() if (folder / each.limit).exists())
    (folder / "cgroup.procs").write_text(str(os.getpid()))
    limit = int((folder / version.usage).read_text()) + _ROOM_BYTES
    (folder / version.limit).write_text(str(limit))
    if not swaps and (folder / version.swap).exists():  # a kernel may be without; then it does not count swap
        (folder / version.swap).write_text(str(limit if version.counts_both else 0))
    return limit


def _take(num_bytes: Bytes) -> Bytes:
    """Takes that much memory, writes all of it, and gives it back; returns how much it was."""
    return sum(map(len, [b"\1" * _CHUNK_BYTES for _ in range(num_bytes // _CHUNK_BYTES)]))


def remove(name: str) -> None:
    """Removes the group, wherever it was made; its process has ended."""
    for version in _versions():
        with contextlib.suppress(OSError):
            (version.parent / name).rmdir()


def find_all() -> list[Path]:
    """Returns all groups that were made here, by whomever, wherever they are."""
    return [
        Path(folder) / name
        for folder, names, _ in os.walk(_ROOT)
        for name in sorted(names)
        if name.startswith(PREFIX) and any((Path(folder) / name / limit).exists() for limit in _LIMITS)
    ]


def processes_in(folder: Path) -> list[str]:
    """Returns the ids of the processes in a group."""
    return _lines(folder / "cgroup.procs")


def _versions() -> list[_Version]:
    """Returns where groups may be made: below our own group if that is shown, else at the top."""
    own = {line.split(":")[1]: line.split(":", 2)[2].strip().lstrip("/") for line in _lines(Path("/proc/self/cgroup"))}
    v1, v2 = _ROOT / "memory", _ROOT
    return [
        *(
            _Version(v1 / path, "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.memsw.limit_in_bytes", True)
            for path in (own.get("memory", ""), "")
        ),
        *(
            _Version(v2 / path, "memory.max", "memory.current", "memory.swap.max", False)
            for path in (own.get("", ""), "")
        ),
    ]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
