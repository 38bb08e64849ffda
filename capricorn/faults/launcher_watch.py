"""How long a process goes on that helps with a fault: until it is told to end, or the launcher is gone.

Must import little: a helper has to be there soon.
"""

from __future__ import annotations

import fcntl
import os
import signal
from types import FrameType


class LauncherWatch:
    """Watches the launcher by the lock that it holds, and notes a SIGTERM."""

    def __init__(self, lock: str) -> None:
        """Opens the file of the lock, and takes SIGTERM, which the rank may block that has started this process."""
        self._fd = os.open(lock, os.O_RDWR)
        self._is_told = False
        signal.signal(signal.SIGTERM, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def goes_on(self) -> bool:
        """Returns whether there is still something to help with."""
        return not self._is_told and self._is_locked()

    def _is_locked(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._is_told = True
