"""Ties the life of a process to that of its parent, so that a killed launcher or node leaves nothing behind."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """From now on the kernel kills this process when its parent ends, however the parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:  # the parent was gone before the call
        os.kill(os.getpid(), signal.SIGKILL)
