"""Threads that do one piece of work together; knows nothing of what it is."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeAlias

from capricorn.runtime.deadline import Deadline
from capricorn.runtime.watched_thread import WatchedThread

Work: TypeAlias = Callable[[], None]


class StagingTeam:
    """A number of threads, of which the one that calls `run` is the first; alone, it starts no other."""

    def __init__(self, num_threads: int) -> None:
        self._work: SimpleQueue[Work | None] = SimpleQueue()
        self._ends: SimpleQueue[BaseException | None] = SimpleQueue()
        names = (f"capricorn-stage-{number}" for number in range(1, num_threads))
        self._helpers = [WatchedThread(target=self._help, name=name, daemon=True) for name in names]
        for helper in self._helpers:
            helper.start()

    def run(self, work: Work) -> None:
        """Calls `work` on all threads at once, and returns when none is at it any more.

        Raises:
            BaseException: what one of the calls raised; of several, one.
        """
        for _ in self._helpers:
            self._work.put(work)
        end = _end_of(work)
        # Also after an error: what they copy from may change, and what they copy into be used again, from then on.
        ends = [end, *(self._ends.get() for _ in self._helpers)]
        if error := next(filter(None, ends), None):
            raise error

    def close(self, deadline: Deadline) -> None:
        """Ends the threads; waits until then at most for what they are at."""
        for _ in self._helpers:
            self._work.put(None)
        for helper in self._helpers:
            helper.join(deadline.left_s)

    def _help(self) -> None:
        while (work := self._work.get()) is not None:
            self._ends.put(_end_of(work))


def _end_of(work: Work) -> BaseException | None:
    """Returns the error that ends a call, None if it returns."""
    try:
        work()
    except BaseException as error:  # noqa: BLE001 - whatever it is, the caller of `run` hears of it
        return error
    return None
