"""What a run has failed by: of all that its ranks and nodes have said, what came first, and not what followed from it.

A rank whose peer dies only sees a connection close. Must know no process.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from capricorn.records.samples import EventSample

_ECHO: Final = re.compile(
    r"^(TransportError|Connection\w*Error|BrokenPipeError|PeerLostError)\b"
    r"|connection .{0,20}(closed|reset|refused|aborted)|socket closed|pair closure|got 0 bytes|broken pipe|timed? ?out"
    r"|SystemExit: signal",
    re.IGNORECASE,
)
"""What a rank says that lost its connection to another, waited for it in vain, or was told to leave."""


def injected(events: Sequence[EventSample]) -> list[EventSample]:
    """Returns the faults that were injected, in order; not those that were announced and then not done."""
    taken_back = [(event.rank, event.attempt, event.detail) for event in events if event.event == "not-injected"]
    return [
        event
        for event in events
        if event.event == "fault" and (event.rank, event.attempt, event.detail) not in taken_back
    ]


def cause_of(events: Sequence[EventSample]) -> str:
    """Returns in words what the newest failed attempt has failed by, with the rank; empty if nothing has failed.

    That is the first failure that is no echo of another. Where there are only echoes, it is the ranks that ended
    without a word, as one does that is killed.
    """
    failed = [event for event in events if event.event == "failed"]
    if not failed:
        return ""
    of_attempt = [event for event in events if event.attempt == failed[-1].attempt]
    failed = [event for event in of_attempt if event.event == "failed"]
    own = [event for event in failed if not _ECHO.search(event.detail)]
    if not own and (mute := _mute(of_attempt)):
        ranks = ", ".join(map(str, mute))
        return f"rank{'s' * (len(mute) > 1)} {ranks} ended without a word; rank {failed[0].rank}: {failed[0].detail}"
    first = min(own or failed, key=lambda event: event.at_s)
    return first.detail if first.rank < 0 else f"rank {first.rank}: {first.detail}"


def _mute(events: Sequence[EventSample]) -> list[int]:
    """Returns the ranks that have started in an attempt and not told its end."""
    started = {event.rank for event in events if event.event == "started"}
    return sorted(started - {event.rank for event in events if event.event in ("failed", "finished")})
