"""Idle priority: which threads of a rank go first when they compete for the cores."""

from __future__ import annotations

import contextlib
import os


def use_idle_priority() -> None:
    """Puts the calling thread into SCHED_IDLE: it runs only on CPU time that no other thread wants.

    Where computing and moving bytes share the cores, the bytes then move while training waits for an all-to-all. Not
    for staging, which an update waits for. Where the system does not allow it, nothing changes.
    """
    # Not allowed in some containers, where it is no loss but of a few per cent of speed.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
