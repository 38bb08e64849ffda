"""What part of the checkpoint traffic ran into communication."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capricorn.hooks import NO_LAYER, OpKey
from capricorn.runtime.schedule.collisions import Collisions
from capricorn.systems.interface import ChunkEvent

DISPATCH = OpKey(0, "forward", "dispatch")
COMBINE = OpKey(0, "forward", "combine")
REDUCE = OpKey(NO_LAYER, "backward", "reduce")


def sent(begin_s: float, end_s: float, num_bytes: int = 1000) -> ChunkEvent:
    return ChunkEvent("send", 1, begin_s, end_s, num_bytes)


def after(busy: Sequence[tuple[float, float]], **moving_s: float) -> Collisions:
    """Of a rank that was in communications at these times, all of them dispatches."""
    collisions = Collisions()
    collisions.moving_s = {OpKey(0, "forward", kind): seconds for kind, seconds in moving_s.items()}  # type: ignore[arg-type]
    for begin_s, end_s in busy:
        collisions.begin(begin_s)
        collisions.end(DISPATCH, end_s)
    return collisions


@pytest.mark.parametrize(
    ("transfers", "expected"),
    [
        ([(0, 10)], 0),
        ([(20, 30)], 0),
        ([(10, 20)], 1000),
        ([(12, 14)], 1000),
        ([(5, 15)], 500),
        ([(18, 28)], 200),
        ([(0, 40)], 250 + 125),
        ([(15, 35)], 250 + 250),
        ([(22, 28)], 0),
        ([(0, 20), (18, 22), (31, 41)], 500 + 500 + 400),
        ([(12, 12)], 0),
        ([], 0),
    ],
)
def test_of_a_transfer_that_part_collides_that_lies_in_a_communication(
    transfers: list[tuple[float, float]], expected: int
) -> None:
    assert after([(10, 20), (30, 35)]).take([sent(*transfer) for transfer in transfers]) == expected


def test_transfers_to_several_hosts_collide_each_by_its_own_times() -> None:
    """In the order they ended, the shorter one of two comes first though it began later."""
    long, short = sent(0, 10), sent(5, 6)
    assert after([(0, 1)]).take([short, long]) == 100
    assert after([(0, 1)]).take([long, short]) == 100


def test_waiting_for_a_straggler_collides_with_nothing() -> None:
    collisions = after([(10, 20)], dispatch=4.0)
    assert collisions.take([sent(10, 16)]) == 0
    collisions = after([(10, 20)], dispatch=4.0)
    assert collisions.take([sent(10, 20)]) == 400


def test_each_communication_has_its_own_measure_and_one_without_counts_whole() -> None:
    collisions = Collisions()
    collisions.moving_s = {DISPATCH: 1.0, COMBINE: 2.0}
    for op, begin_s in ((DISPATCH, 0.0), (COMBINE, 10.0), (REDUCE, 20.0)):
        collisions.begin(begin_s)
        collisions.end(op, begin_s + 10.0)
    assert collisions.take([sent(0, 10), sent(10, 20), sent(20, 30)]) == 100 + 200 + 1000


def test_a_communication_that_took_less_than_measured_counts_from_its_begin() -> None:
    assert after([(10, 20)], dispatch=100.0).take([sent(0, 20)]) == 500


def test_a_transfer_that_is_told_of_an_iteration_later_still_collides() -> None:
    collisions = after([(10, 20)])
    assert collisions.take([]) == 0
    assert collisions.take([sent(10, 20)]) == 1000
    assert collisions.take([sent(10, 20)]) == 0


TIMES = st.integers(0, 1000)
BUSY = (
    st.lists(TIMES, max_size=12, unique=True)
    .map(sorted)
    .map(lambda times: list(zip(times[::2], times[1::2], strict=False)))
)
TRANSFERS = st.lists(
    st.tuples(TIMES, st.integers(0, 300), st.integers(0, 1 << 30)).map(lambda t: sent(t[0], t[0] + t[1], t[2])),
    max_size=8,
).map(lambda events: sorted(events, key=lambda event: event.begin_s))


def overlap(event: ChunkEvent, busy: Sequence[tuple[float, float]]) -> float:
    """Seconds of a transfer in communications; all times are whole."""
    return sum(max(0.0, min(end, event.end_s) - max(begin, event.begin_s)) for begin, end in busy)


@given(BUSY, TRANSFERS)
def test_what_collides_is_between_nothing_and_all_and_no_more_than_overlaps(
    busy: list[tuple[float, float]], transfers: list[ChunkEvent]
) -> None:
    shares = [overlap(event, busy) / max(event.end_s - event.begin_s, 1) for event in transfers]
    colliding = after(busy).take(transfers)
    assert 0 <= colliding <= sum(event.num_bytes for event in transfers)
    expected = sum(share * event.num_bytes for share, event in zip(shares, transfers, strict=True))
    assert colliding == pytest.approx(expected, abs=1)


@given(BUSY, st.lists(st.tuples(TIMES, st.integers(0, 1 << 30)), max_size=8))
def test_between_communications_nothing_collides_and_within_one_everything(
    busy: list[tuple[float, float]], chunks: list[tuple[int, int]]
) -> None:
    within = [sent(begin, end, num_bytes) for (begin, end), (_, num_bytes) in zip(busy, chunks, strict=False)]
    assert after(busy).take(within) == sum(event.num_bytes for event in within)
    edges = [0.0, *(time for pair in busy for time in pair), 2000.0]
    between = [sent(*gap, 10**6) for gap in zip(edges[::2], edges[1::2], strict=True)]
    assert after(busy).take(between) == 0
