"""When what the training thread has launched is reached: at once on the CPU, by events on a GPU.

On a GPU the training thread runs ahead of the device, so the moment of a hook is not the moment of the op.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol, TypeAlias

import torch

from capricorn.errors import CapricornError
from capricorn.runtime.deadline import Deadline
from capricorn.runtime.watched_thread import WatchedThread
from capricorn.units import Seconds

DEADLINE_S: Seconds = 120.0
CLOSE_S: Seconds = 5.0
CHECK_S: Seconds = 1.0
"""How often a wait for the device looks whether the thread that follows it is still there."""

Reached: TypeAlias = Callable[[Seconds], None]
"""Called with the time, by `time.perf_counter`, at which the moment was reached; must be short."""


class Clock(Protocol):
    """Tells when moments are reached, in the order in which they were marked."""

    def at(self, reached: Reached) -> None:
        """Calls `reached` once all that this thread has launched so far is done."""
        ...

    def settle(self) -> None:
        """Returns when all moments marked so far are reached.

        Raises:
            CapricornError: they are not reached within DEADLINE_S.
        """
        ...

    def check(self) -> None:
        """Tells whether moments are still followed.

        Raises:
            CapricornError: the thread that follows them has ended, and why.
        """
        ...

    def close(self) -> None: ...


class CpuClock:
    """The clock of the CPU, where everything launched is done at once."""

    def at(self, reached: Reached) -> None:
        reached(time.perf_counter())

    def settle(self) -> None:
        """Returns at once."""

    def check(self) -> None:
        """Does nothing, as nothing runs."""

    def close(self) -> None:
        """Does nothing, as nothing runs."""


class CudaClock:
    """Records an event at each moment, and one thread waits for them in turn."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: SimpleQueue[tuple[torch.cuda.Event, Reached] | None] = SimpleQueue()
        self._thread = WatchedThread(target=self._follow, name="capricorn-clock", daemon=True)
        self._thread.start()

    def at(self, reached: Reached) -> None:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._marks.put((event, reached))

    def settle(self) -> None:
        reached, deadline = threading.Event(), Deadline(DEADLINE_S)
        self.at(lambda now_s: reached.set())
        while not reached.wait(CHECK_S):
            self.check()
            if not deadline.left_s:
                raise CapricornError(f"the device has not come to the end of an iteration within {DEADLINE_S:.0f} s")

    def check(self) -> None:
        self._thread.check()

    def close(self) -> None:
        self._marks.put(None)
        self._thread.join(CLOSE_S)  # behind a collective whose peer is gone an event is never reached

    def _follow(self) -> None:
        while (mark := self._marks.get()) is not None:
            event, reached = mark
            event.synchronize()
            reached(time.perf_counter())


def make_clock(device: torch.device) -> Clock:
    """Returns the clock of a device."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()
