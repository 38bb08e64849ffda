"""How our processes are started and tied to the life of their parent: a killed launcher or node leaves nothing behind.

Modules are never looked for in the working folder first: a user's `random.py` there would stand in for Python's own.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

PYTHON: Final = (sys.executable, "-P", "-m")
"""Starts a module: `[*PYTHON, MODULE, *ARGS]`."""
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Has the kernel kill this process, from now on, when its parent ends, however the parent ends.

    Who knows the parent names it: in a container it may be process 1, which else is what adopts orphans.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    is_orphan = os.getppid() == 1 if parent is None else os.getppid() != parent
    if is_orphan:  # the parent was gone before the call
        os.kill(os.getpid(), signal.SIGKILL)
