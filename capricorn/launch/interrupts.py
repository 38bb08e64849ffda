"""Turns Ctrl-C, SIGTERM and a closed terminal into a question to ask, so that no clean-up is ever cut short.

A signal that was ignored when the program started (SIGHUP under nohup, SIGINT of a shell's background job) stays so.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def are_heard(*numbers: signal.Signals) -> list[signal.Signals]:
    """Returns those of the signals that this process does not ignore."""
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


class Interrupts:
    """Only notes the signals that end a program, while it is open; `check` raises at a moment that suits.

    After the first, all further ones are ignored for good: the program is on its way out. On another thread than the
    main one signals are left as they are.
    """

    def __init__(self) -> None:
        self._has_come = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in are_heard(*SIGNALS)}
        return self

    def check(self) -> None:
        """Raises KeyboardInterrupt if a signal has come."""
        if self._has_come:
            raise KeyboardInterrupt

    def __exit__(self, *error: object) -> None:
        if not self._has_come:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._has_come = True
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
