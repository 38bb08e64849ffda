"""The gate that every chunk passes on its way out: it knows when the link is idle, here and at the holder.

Opened and closed as training goes along; threads that send wait in it. Knows no socket, and of a plan only its limits.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from capricorn.planner.link_model import LinkModel
from capricorn.planner.plan import Limit
from capricorn.units import Bytes, Seconds

LEAST_BYTES = 4096
"""A smaller part of a chunk is not worth its system calls."""


class Admission(NamedTuple):
    """The bytes that the gate has let out, and under which conditions."""

    num_bytes: Bytes
    has_waited: bool
    is_idle: bool
    """Whether it is taken to have the link for itself."""
    is_urgent: bool
    """Whether it passed because an update or the next checkpoint waited for it."""


class Gate:
    """Lets chunks pass while the link is idle. It is ungated, so that all pass, until a plan says when that is.

    A reactive gate looks at what really happens: so much of a chunk passes as will have left before the idle span is
    expected to end, once the holder has come to the same span. Until then a rank may wait in a communication for a
    straggler, while its link is idle. A chunk that could go earlier than planned, does.

    A gate that is not reactive lets out in each span what is planned for it, and the overflow after the last span.
    """

    def __init__(
        self, *, is_reactive: bool, patience_s: Seconds = math.inf, clock: Callable[[], Seconds] = time.perf_counter
    ) -> None:
        """Makes an ungated gate.

        Args:
            is_reactive: whether chunks pass by what the link really does, or by the plan alone.
            patience_s: no chunk is held for longer: a holder that hears nothing for too long takes us for dead.
            clock: tells the time.
        """
        self.link: LinkModel | None = None
        """How long transfers take, once it is known."""
        self._is_reactive, self._patience_s, self._clock = is_reactive, patience_s, clock
        self._changed = threading.Condition()
        self._is_ungated = True
        self._is_urgent = self._is_deadline_missed = self._is_late = False
        self._number = 0
        self._is_computing, self._is_over = True, False
        self._limit = Limit(0.0, 0)
        self._end_s: Seconds = 0.0
        self._budget: Bytes = 0
        self._heard: dict[int, int] = {}

    def open(self, number: int, begin_s: Seconds, limit: Limit) -> None:
        """Notes that idle span `number`, counted over all iterations, has begun here."""
        with self._changed:
            self._is_ungated, self._is_computing, self._is_over = False, True, False
            self._number, self._limit = number, limit
            self._end_s = begin_s + limit.end_s
            self._budget += limit.num_bytes
            self._changed.notify_all()

    def close(self, *, is_last: bool = False) -> None:
        """Notes that this rank has come to the communication that ends the span; `is_last` in its iteration."""
        with self._changed:
            self._is_computing, self._is_over = False, is_last
            if is_last:
                self._changed.notify_all()

    def release(self) -> None:
        """Ungates everything until the next span begins: nobody trains, or it is not known what comes when."""
        with self._changed:
            self._is_ungated = True
            self._changed.notify_all()

    def set_urgent(self, is_urgent: bool) -> None:
        """Notes whether an update waits for what is to pass."""
        with self._changed:
            self._is_urgent = is_urgent
            self._changed.notify_all()

    def begin_save(self, *, is_late: bool) -> None:
        """Notes that a new checkpoint starts, which has no claim to what the last one has not used of its spans.

        One that is late, some time after its iteration, may use all spans, and while this rank computes it need not
        mind the limit: nobody communicates without us.
        """
        with self._changed:
            self._budget, self._is_late, self._is_deadline_missed = 0, is_late, False

    def note_deadline_missed(self) -> None:
        """Lets the checkpoint on its way pass, as it holds up the next one; or all later ones would be late too."""
        with self._changed:
            self._is_deadline_missed = True
            self._changed.notify_all()

    def hear(self, holder: int, number: int) -> None:
        """Notes that a holder has come to idle span `number`."""
        with self._changed:
            self._heard[holder] = max(number, self._heard.get(holder, 0))
            self._changed.notify_all()

    def wait(
        self, holder: int, num_bytes: Bytes, in_flight_bytes: Callable[[], Bytes], *, is_overflow: bool
    ) -> Admission:
        """Returns when a chunk, or a part of it, may start, with how much of it may.

        Args:
            holder: the rank it is for.
            num_bytes: size of the chunk.
            in_flight_bytes: returns what was handed to the network before and has not left yet.
            is_overflow: whether the plan has no span for it.
        """
        if self._is_ungated:
            # Without the lock: who sends may be off the processor with it, and training would wait for it to close.
            return Admission(num_bytes, has_waited=False, is_idle=False, is_urgent=False)
        has_waited, until_s = False, self._clock() + self._patience_s
        with self._changed:
            while not (passing := self._passing_bytes(holder, num_bytes, in_flight_bytes, is_overflow)):
                left_s = until_s - self._clock()
                if left_s <= 0:
                    return Admission(num_bytes, has_waited, is_idle=False, is_urgent=True)
                has_waited = True
                self._changed.wait(min(left_s, threading.TIMEOUT_MAX))
            self._budget -= passing
            is_urgent = self._is_urgent or (self._is_deadline_missed and not self._is_ungated)
            # By the plan alone a chunk may also pass while communication moves bytes.
            may_be_idle = self._is_reactive or self._is_computing
            is_idle = may_be_idle and not (is_urgent or self._is_ungated)
            return Admission(passing, has_waited, is_idle=is_idle, is_urgent=is_urgent)

    def _passing_bytes(
        self, holder: int, num_bytes: Bytes, in_flight_bytes: Callable[[], Bytes], is_overflow: bool
    ) -> Bytes:
        if self._is_ungated or self._is_urgent or self._is_deadline_missed:
            return num_bytes
        if not self._is_reactive:
            return num_bytes if self._is_due(is_overflow) else 0
        if not self._is_idle_at(holder):
            return 0
        if self._is_late and self._is_computing:
            return num_bytes
        is_unused = not self._limit.num_bytes and not self._is_late
        return 0 if is_unused else self._fitting_bytes(num_bytes, in_flight_bytes())

    def _is_due(self, is_overflow: bool) -> bool:
        """Tells whether a chunk may pass by the plan alone."""
        return self._is_over if is_overflow else self._budget > 0

    def _fitting_bytes(self, num_bytes: Bytes, in_flight_bytes: Bytes) -> Bytes:
        """Returns how much of a chunk leaves before the span is expected to end; 0 rather than a scrap."""
        left_s = self._end_s - self._clock()
        if self.link is None:
            return num_bytes if left_s > 0 else 0
        fitting = min(num_bytes, self.link.capacity_bytes(left_s) - in_flight_bytes)
        return fitting if fitting >= min(num_bytes, LEAST_BYTES) else 0

    def _is_idle_at(self, holder: int) -> bool:
        # The datagrams of a holder that was never heard are held back somewhere: then our own end alone counts.
        return self._heard.get(holder, self._number) >= self._number
