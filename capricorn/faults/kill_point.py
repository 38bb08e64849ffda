"""Kills this process right before the N-th change of its memory store or of its files, in whatever thread."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any, Final

CHANGES: Final = frozenset({"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate"})
_WRITING: Final = os.O_WRONLY | os.O_RDWR


class Countdown:
    """Counts from the moment it is started; until then it does nothing."""

    def __init__(self) -> None:
        self._at = 0
        self._folders: Sequence[str] = ()
        self._calls = count(1)

    def start(self, call: int, folders: Sequence[Path]) -> None:
        """From now on `call` changes are left, of the store that is tapped and of files below these folders."""
        self._at, self._folders = call, [f"{folder}{os.sep}" for folder in folders]
        sys.addaudithook(self._hear)  # stays for good, as does the process, for a few calls

    def tap(self, call: str) -> None:
        """A change of the store comes next."""
        # Threads call this too: to take the next number is one step under the interpreter's lock.
        if self._at and next(self._calls) == self._at:
            os.kill(os.getpid(), signal.SIGKILL)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if (event in CHANGES or (event == "open" and arguments[2] & _WRITING)) and self._is_ours(event, arguments):
            self.tap(event)

    def _is_ours(self, event: str, arguments: tuple[Any, ...]) -> bool:
        path = arguments[0]
        if not isinstance(path, str | os.PathLike):
            return False
        path = os.fspath(path)
        if event != "open" and isinstance(arguments[-1], int) and arguments[-1] >= 0:  # relative to an open folder
            path = f"{os.readlink(f'/proc/self/fd/{arguments[-1]}')}{os.sep}{path}"
        return any(path.startswith(folder) for folder in self._folders)
