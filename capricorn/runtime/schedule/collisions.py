"""Counts which part of the checkpoint traffic ran into communication of the training. Knows times and bytes alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from capricorn.hooks import OpKey
from capricorn.systems.interface import ChunkEvent
from capricorn.units import Bytes, Seconds


class Collisions:
    """Sets the communications of one rank against what it sent.

    A rank that waits for a straggler holds nobody up, so of a communication only its last `moving_s` count.
    """

    def __init__(self) -> None:
        self.moving_s: dict[OpKey, Seconds] = {}
        """By communication, as it was measured last; all of one that was never measured counts."""
        self._busy: deque[tuple[Seconds, Seconds]] = deque()
        self._before: list[tuple[Seconds, Seconds]] = []
        self._begin_s: Seconds = 0.0

    def begin(self, now_s: Seconds) -> None:
        """Notes that this rank has come to a communication."""
        self._begin_s = now_s

    def end(self, op: OpKey, now_s: Seconds) -> None:
        """Notes that the communication is done."""
        self._busy.append((max(self._begin_s, now_s - self.moving_s.get(op, now_s)), now_s))

    def take(self, sent: Sequence[ChunkEvent]) -> Bytes:
        """Returns how many bytes of these transfers left during communications.

        The communications are those since the last call or the one before it; the transfers come in any order. What
        leaves spreads evenly over the duration of its transfer.
        """
        # A transfer is told of once it has ended, and may have begun before the last call.
        before, self._before = self._before, [self._busy.popleft() for _ in range(len(self._busy))]
        busy = before + self._before
        colliding, first = 0.0, 0
        for event in sorted(sent, key=lambda event: event.begin_s):
            while first < len(busy) and busy[first][1] <= event.begin_s:
                first += 1
            colliding += _share(event, busy[first:]) * event.num_bytes
        return round(colliding)


def _share(event: ChunkEvent, busy: Sequence[tuple[Seconds, Seconds]]) -> float:
    """Returns the fraction of a transfer's duration that lies in these intervals."""
    lasted_s = event.end_s - event.begin_s
    if lasted_s <= 0:
        return 0.0
    overlap_s = 0.0
    for begin_s, end_s in busy:
        if begin_s >= event.end_s:
            break
        overlap_s += max(0.0, min(end_s, event.end_s) - max(begin_s, event.begin_s))
    return min(1.0, overlap_s / lasted_s)
