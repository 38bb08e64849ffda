"""What a run has failed by, of all that was said; and which faults count as injected."""

from __future__ import annotations

import pytest

from capricorn.records.failures import cause_of, injected
from capricorn.records.samples import EventName, EventSample

GLOO = "RuntimeError: Connection closed by peer [127.0.0.1]:4711"
KILLED = "killed by signal 9"
BUG = "ValueError: the loss is not a number"


def event(name: EventName, rank: int, detail: str = "", *, attempt: int = 0, at_s: float = 0.0) -> EventSample:
    return EventSample(event=name, rank=rank, detail=detail, attempt=attempt, at_s=at_s)


def failed(rank: int, detail: str, *, attempt: int = 0, at_s: float = 0.0) -> EventSample:
    return event("failed", rank, detail, attempt=attempt, at_s=at_s)


STARTED = [event("started", rank) for rank in (0, 1)]


def test_nothing_has_failed() -> None:
    assert cause_of(STARTED) == ""


@pytest.mark.parametrize(
    "echo",
    [
        GLOO,
        "RuntimeError: Read error [127.0.0.1]:47: Connection reset by peer",
        "RuntimeError: Timed out waiting 120000ms for recv operation to complete",
        "RuntimeError: Application timeout caused pair closure",
        "DistNetworkError: failed to recv, got 0 bytes",
        "DistBackendError: Connection was likely closed",
        "TransportError: rank 1 has closed the link",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "SystemExit: signal 15",
    ],
)
def test_the_rank_that_died_is_named_and_not_the_one_that_noticed_first(echo: str) -> None:
    assert cause_of([*STARTED, failed(0, echo, at_s=1.0), failed(1, KILLED, at_s=2.0)]) == f"rank 1: {KILLED}"
    assert cause_of([*STARTED, failed(0, echo, at_s=1.0), failed(1, BUG, at_s=2.0)]) == f"rank 1: {BUG}"


def test_a_rank_that_died_without_a_word_is_named_where_nobody_else_knows() -> None:
    assert cause_of([*STARTED, failed(0, GLOO)]) == f"rank 1 ended without a word; rank 0: {GLOO}"


def test_where_all_have_spoken_the_first_is_named() -> None:
    assert cause_of([*STARTED, failed(1, GLOO, at_s=2.0), failed(0, "SystemExit: signal 15", at_s=1.0)]) == (
        "rank 0: SystemExit: signal 15"
    )


def test_of_two_causes_the_first_is_named_and_only_the_newest_attempt_counts() -> None:
    events = [failed(0, "older"), failed(1, BUG, attempt=1, at_s=3.0), failed(0, KILLED, attempt=1, at_s=2.0)]
    assert cause_of(events) == f"rank 0: {KILLED}"


def test_what_is_no_ranks_failure_names_none() -> None:
    assert cause_of([failed(-1, "no rank has made progress")]) == "no rank has made progress"


def test_a_fault_that_was_announced_and_not_done_was_not_injected() -> None:
    one, other = "kill@rank=1,iteration=3", "slow-link@node=0,iteration=3"
    events = [event("fault", 1, one), event("fault", 0, other), event("not-injected", 0, other)]
    assert [each.detail for each in injected(events)] == [one]
