"""To which failure a recovery is attributed."""

from __future__ import annotations

from typing import Any

from capricorn.records.recoveries import recoveries_of
from capricorn.records.samples import EventSample

KILL, JUMP = "kill@rank=1,iteration=9,op=before_update", "clock-jump@rank=0,iteration=3,op=before_update,seconds=60"


def event(name: str, at_s: float, attempt: int, detail: str = "") -> EventSample:
    values: dict[str, Any] = {"event": name, "at_s": at_s, "attempt": attempt, "rank": 0, "detail": detail}
    return EventSample.model_validate(values)


def test_a_recovery_is_that_from_the_last_failure_before_it_was_noticed() -> None:
    events = [
        event("ready", 1.0, 0), event("fault", 2.0, 0, JUMP), event("fault", 5.0, 0, KILL),
        event("failed", 5.01, 0, "killed by signal 9"), event("ready", 5.1, 1),
    ]  # fmt: skip
    (recovery,) = recoveries_of(events, [])
    assert recovery.what == KILL
    assert round(recovery.detect_s, 3) == 0.01
    assert round(recovery.restart_s, 3) == 0.09


def test_a_failure_that_nobody_injected_is_named_by_what_was_noticed() -> None:
    events = [event("ready", 1.0, 0), event("failed", 2.0, 0, "killed by signal 9"), event("ready", 2.5, 1)]
    (recovery,) = recoveries_of(events, [])
    assert (recovery.what, recovery.detect_s, recovery.restart_s) == ("rank 0: killed by signal 9", 0.0, 0.5)
