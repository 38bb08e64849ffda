"""Kills this process right before the N-th change of its memory store or of its files, in whatever thread.

Hears of changes by Python's audit events: those of files, and the store's own. Other ways to write are not heard of.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from capricorn.runtime.store.slot import AUDIT_EVENT

Argument: TypeAlias = int | None
CHANGES: Final[Mapping[str, tuple[tuple[int, Argument], ...]]] = MappingProxyType({
    "open": ((0, None),), "os.truncate": ((0, None),), "os.remove": ((0, 1),), "os.rmdir": ((0, 1),),
    "os.mkdir": ((0, 2),), "os.rename": ((0, 2), (1, 3)), "os.link": ((1, 3),), "os.symlink": ((1, 2),),
})  # fmt: skip
"""By audit event the places of its arguments that say what changes: a path, and the folder it is relative to.

Source: "Audit events table" of the Python library reference.
"""
_WRITING: Final = os.O_WRONLY | os.O_RDWR


class KillPoint:
    """Does nothing until it is armed, and then counts changes down."""

    def __init__(self) -> None:
        self._at = 0
        self._folders: Sequence[str] = ()
        self._changes = count(1)

    def arm(self, call: int, folders: Sequence[Path]) -> None:
        """Kills this process before change number `call` from now on, of the store and of files below these folders."""
        self._at, self._folders = call, [f"{folder}{os.sep}" for folder in folders]
        sys.addaudithook(self._hear)  # stays for good, as does the process, for a few changes

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        # Threads come here too: to take the next number is one step under the interpreter's lock.
        if (event == AUDIT_EVENT or self._is_ours(event, arguments)) and next(self._changes) == self._at:
            os.kill(os.getpid(), signal.SIGKILL)

    def _is_ours(self, event: str, arguments: tuple[Any, ...]) -> bool:
        """Returns whether the event is a change of a file below our folders."""
        if event not in CHANGES or (event == "open" and not arguments[2] & _WRITING):
            return False
        return any(path.startswith(folder) for path in _paths(event, arguments) for folder in self._folders)


def _paths(event: str, arguments: tuple[Any, ...]) -> Iterator[str]:
    """Yields the absolute paths that an event of files is about to change."""
    for at, folder_at in CHANGES[event]:
        if isinstance(arguments[at], int):
            continue  # an open file, of whose opening we have heard
        folder = -1 if folder_at is None else arguments[folder_at]
        base = os.getcwd() if folder < 0 else os.readlink(f"/proc/self/fd/{folder}")
        yield os.path.join(base, os.fsdecode(arguments[at]))
