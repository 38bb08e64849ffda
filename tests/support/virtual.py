"""Time for tests: it passes only while all sleep, so what is measured by it is exact on any machine."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from itertools import count

DEADLINE_S = 60.0


class VirtualTime:
    """Work takes no time, and the threads of `run` take turns in the order in which they wake."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._changed = threading.Condition()
        self._numbers = count()
        self._sleepers: list[tuple[float, int]] = []
        self._awake: tuple[float, int] | None = None

    def clock(self) -> float:
        return self.now

    def sleep(self, duration_s: float) -> None:
        with self._changed:
            ticket = self._lie_down(self.now + duration_s)
            self._wake_next()
            self._wait_for(ticket)

    def run(self, *functions: Callable[[], object]) -> None:
        """Runs each function in a thread of its own until all have ended."""
        with self._changed:
            tickets = [self._lie_down(self.now) for _ in functions]
            threads = [
                threading.Thread(target=self._take_turns, args=pair) for pair in zip(functions, tickets, strict=True)
            ]
            for thread in threads:
                thread.start()
            self._wake_next()
        for thread in threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()

    def _take_turns(self, function: Callable[[], object], ticket: tuple[float, int]) -> None:
        with self._changed:
            self._wait_for(ticket)
        try:
            function()
        finally:
            with self._changed:
                self._wake_next()

    def _lie_down(self, wake: float) -> tuple[float, int]:
        ticket = (wake, next(self._numbers))
        heapq.heappush(self._sleepers, ticket)
        return ticket

    def _wake_next(self) -> None:
        self._awake = heapq.heappop(self._sleepers) if self._sleepers else None
        if self._awake is not None:
            self.now = self._awake[0]
        self._changed.notify_all()

    def _wait_for(self, ticket: tuple[float, int]) -> None:
        assert self._changed.wait_for(lambda: self._awake == ticket, DEADLINE_S)
