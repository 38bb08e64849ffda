"""The gate: what passes when, by a clock that stands still, and who is woken."""

from __future__ import annotations

import threading
from collections.abc import Callable
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capricorn.planner.link_model import LinkModel
from capricorn.planner.plan import Limit
from capricorn.runtime.schedule.gate import LEAST_BYTES, Admission, Gate

HOLDER, OTHER = 1, 2
LINK = LinkModel(latency_s=0.5, bytes_per_s=1e5)
BEGIN_S = 1000.0
LIMIT = Limit(end_s=2.0, num_bytes=100)
UNUSED = Limit(end_s=2.0, num_bytes=0)
DEADLINE_S = 20.0


class Held(Exception):  # noqa: N818
    """Raised in place of a wait."""


class Unwilling(threading.Condition):
    def wait(self, timeout: float | None = None) -> bool:
        raise Held


class Watched(threading.Condition):
    """Tells that somebody has begun to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.is_waited_for = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.is_waited_for.set()
        return super().wait(timeout)


class Clock:
    now = BEGIN_S

    def __call__(self) -> float:
        return self.now


def make(*, is_reactive: bool = True, condition: threading.Condition | None = None) -> tuple[Gate, Clock]:
    clock, changed = Clock(), condition or Unwilling()
    with patch("capricorn.runtime.schedule.gate.threading.Condition", lambda: changed):
        gate = Gate(is_reactive=is_reactive, clock=clock)
    gate.link = LINK
    return gate, clock


def passing(gate: Gate, num_bytes: int, *, holder: int = HOLDER, in_flight: int = 0, is_overflow: bool = False) -> int:
    """How much of a chunk passes at once; that then has."""
    try:
        admission = gate.wait(holder, num_bytes, lambda: in_flight, is_overflow=is_overflow)
    except Held:
        return 0
    assert not admission.has_waited
    return admission.num_bytes


def is_urgent(gate: Gate) -> bool:
    """Whether what passes at once does because somebody waits for it."""
    return gate.wait(HOLDER, 1000, lambda: 0, is_overflow=False).is_urgent


def passes(gate: Gate, num_bytes: int = 50_000, *, holder: int = HOLDER, is_overflow: bool = False) -> bool:
    """Whether all of it passes, rather than nothing."""
    admission = passing(gate, num_bytes, holder=holder, is_overflow=is_overflow)
    assert admission in (0, num_bytes)
    return admission == num_bytes


@pytest.mark.parametrize("is_reactive", [True, False])
def test_while_nothing_is_known_of_the_iteration_everything_passes(is_reactive: bool) -> None:
    gate, _ = make(is_reactive=is_reactive)
    assert passes(gate, 10**9)
    assert passes(gate, 10**9, is_overflow=True)


def test_of_a_chunk_passes_what_will_have_left_before_the_expected_end() -> None:
    gate, clock = make()
    gate.open(1, BEGIN_S, LIMIT)
    clock.now = BEGIN_S + 1.0  # 50 kB take a second
    assert passing(gate, 49_999) == 49_999
    assert passing(gate, 50_000) == 50_000
    assert passing(gate, 200_000) == 50_000
    clock.now = BEGIN_S + 1.25
    assert passing(gate, 200_000) == 25_000
    clock.now = BEGIN_S + 1.5
    assert passing(gate, 1) == 0


def test_what_has_not_left_yet_goes_first() -> None:
    gate, clock = make()
    gate.open(1, BEGIN_S, LIMIT)
    clock.now = BEGIN_S + 1.0
    assert passing(gate, 30_000, in_flight=20_000) == 30_000
    assert passing(gate, 30_000, in_flight=30_000) == 20_000
    assert passing(gate, 30_000, in_flight=50_000) == 0
    assert passing(gate, 30_000, in_flight=10**9) == 0


def test_a_small_part_of_a_chunk_waits_for_more_room_and_a_small_rest_does_not() -> None:
    gate, clock = make()
    gate.open(1, BEGIN_S, LIMIT)
    clock.now = BEGIN_S + 1.0
    assert passing(gate, 10_000, in_flight=50_000 - LEAST_BYTES) == LEAST_BYTES
    assert passing(gate, 10_000, in_flight=50_000 - LEAST_BYTES + 1) == 0
    assert passing(gate, 10, in_flight=50_000 - 10) == 10
    assert passing(gate, 10, in_flight=50_000 - 9) == 0


@given(
    st.floats(0, 3), st.integers(1, 1 << 20), st.integers(0, 1 << 20), st.floats(0, 1), st.floats(1e3, 1e9),
)  # fmt: skip
def test_whatever_passes_leaves_in_time(
    past_s: float, num_bytes: int, in_flight: int, latency_s: float, rate: float
) -> None:
    gate, clock = make()
    gate.link = link = LinkModel(latency_s, rate)
    gate.open(1, BEGIN_S, LIMIT)
    clock.now = BEGIN_S + past_s
    admission = passing(gate, num_bytes, in_flight=in_flight)
    assert 0 <= admission <= num_bytes
    if admission:
        assert clock.now + link.transfer_s(admission + in_flight) <= BEGIN_S + LIMIT.end_s + 1e-6
    else:
        assert clock.now + link.transfer_s(min(num_bytes, LEAST_BYTES) + in_flight) > BEGIN_S + LIMIT.end_s - 2 / rate


def test_the_end_counts_from_the_begin_of_the_span_whenever_that_was() -> None:
    gate, clock = make()
    gate.open(1, BEGIN_S - 1.5, LIMIT)
    assert not passes(gate, 1)
    clock.now = BEGIN_S - 0.5
    assert passing(gate, 200_000) == 50_000


def test_before_the_link_is_known_chunks_pass_until_the_end() -> None:
    gate, clock = make()
    gate.link = None
    gate.open(1, BEGIN_S, LIMIT)
    clock.now = BEGIN_S + 1.99
    assert passes(gate, 10**9)
    clock.now = BEGIN_S + 2.01
    assert not passes(gate, 1)


def test_a_span_in_use_may_carry_more_than_was_planned_for_it() -> None:
    gate, _ = make()
    gate.open(1, BEGIN_S, Limit(end_s=2.0, num_bytes=1))
    assert all(passes(gate) for _ in range(10))


def test_a_span_that_is_not_in_use_carries_nothing() -> None:
    gate, _ = make()
    gate.open(1, BEGIN_S, UNUSED)
    assert not passes(gate, 1)
    gate.close()
    assert not passes(gate, 1)


@pytest.mark.parametrize("is_last", [True, False])
def test_in_the_wait_for_a_straggler_chunks_pass_until_the_expected_end(is_last: bool) -> None:
    gate, clock = make()
    gate.open(1, BEGIN_S, LIMIT)
    gate.close(is_last=is_last)
    clock.now = BEGIN_S + 1.0
    assert passing(gate, 200_000) == 50_000
    clock.now = BEGIN_S + 2.01
    assert not passes(gate, 1)


def test_a_chunk_passes_only_once_its_holder_has_come_to_the_same_span() -> None:
    gate, _ = make()
    gate.open(1, BEGIN_S, LIMIT)
    gate.hear(HOLDER, 1)
    assert passes(gate)
    gate.open(2, BEGIN_S, LIMIT)
    assert not passes(gate)
    gate.hear(OTHER, 2)
    assert not passes(gate)
    gate.hear(HOLDER, 2)
    assert passes(gate)
    gate.hear(HOLDER, 3)
    assert passes(gate)


def test_a_holder_that_is_behind_holds_up_only_what_is_for_it() -> None:
    gate, _ = make()
    gate.hear(HOLDER, 1)
    gate.hear(OTHER, 2)
    gate.open(2, BEGIN_S, LIMIT)
    assert not passes(gate, holder=HOLDER)
    assert passes(gate, holder=OTHER)


def test_a_holder_that_was_never_heard_holds_up_nothing() -> None:
    gate, _ = make()
    gate.hear(OTHER, 1)
    gate.open(7, BEGIN_S, LIMIT)
    assert passes(gate, holder=HOLDER)


def test_a_late_checkpoint_waits_for_the_holder_too() -> None:
    gate, _ = make()
    gate.hear(HOLDER, 1)
    gate.open(2, BEGIN_S, LIMIT)
    gate.begin_save(is_late=True)
    assert not passes(gate)


def test_only_what_passes_while_the_link_is_idle_has_it_for_itself() -> None:
    gate, _ = make()
    assert not gate.wait(HOLDER, 10, lambda: 0, is_overflow=False).is_idle
    gate.open(1, BEGIN_S, LIMIT)
    assert gate.wait(HOLDER, 10, lambda: 0, is_overflow=False).is_idle
    gate.set_urgent(True)
    assert not gate.wait(HOLDER, 10, lambda: 0, is_overflow=False).is_idle
    gate.set_urgent(False)
    gate.note_deadline_missed()
    assert not gate.wait(HOLDER, 10, lambda: 0, is_overflow=False).is_idle


def test_no_chunk_is_held_for_longer_than_the_gate_has_patience() -> None:
    gate = Gate(is_reactive=True, patience_s=0.05)
    gate.open(1, 0.0, UNUSED)
    admission = gate.wait(HOLDER, 1000, lambda: 0, is_overflow=False)
    assert admission.num_bytes == 1000
    assert admission.has_waited


def test_a_late_checkpoint_uses_computing_time_beyond_the_expected_end() -> None:
    gate, clock = make()
    gate.open(1, BEGIN_S, LIMIT)
    clock.now = BEGIN_S + 5.0
    gate.begin_save(is_late=True)
    assert passes(gate, 10**6)
    gate.close()
    assert not passes(gate, 1)
    gate.open(2, BEGIN_S, LIMIT)
    assert passes(gate, 10**6)


def test_a_late_checkpoint_uses_spans_that_are_not_in_use_also_in_the_wait_for_a_straggler() -> None:
    gate, clock = make()
    gate.begin_save(is_late=True)
    gate.open(1, BEGIN_S, UNUSED)
    assert passes(gate, 10**6)
    gate.close()
    clock.now = BEGIN_S + 1.0
    assert passing(gate, 200_000) == 50_000


def test_the_next_checkpoint_is_not_late_unless_that_is_said() -> None:
    gate, clock = make()
    gate.begin_save(is_late=True)
    gate.open(1, BEGIN_S, LIMIT)
    clock.now = BEGIN_S + 5.0
    gate.begin_save(is_late=False)
    assert not passes(gate, 1)


@pytest.mark.parametrize("is_reactive", [True, False])
def test_a_checkpoint_that_holds_up_the_next_one_passes_whatever_goes_on_and_is_counted(is_reactive: bool) -> None:
    gate, clock = make(is_reactive=is_reactive)
    gate.open(1, BEGIN_S, UNUSED)
    gate.close()
    clock.now = BEGIN_S + 5.0
    gate.hear(HOLDER, 0)
    assert not passes(gate, 1)
    gate.note_deadline_missed()
    assert is_urgent(gate)
    gate.open(2, BEGIN_S, UNUSED)
    assert is_urgent(gate)
    assert passes(gate, 12, is_overflow=True)
    gate.begin_save(is_late=False)
    assert not passes(gate, 1)


@pytest.mark.parametrize("is_reactive", [True, False])
def test_while_an_update_waits_everything_passes_and_is_counted(is_reactive: bool) -> None:
    gate, clock = make(is_reactive=is_reactive)
    gate.open(1, BEGIN_S, UNUSED)
    gate.close()
    clock.now = BEGIN_S + 5.0
    gate.hear(HOLDER, 0)
    gate.set_urgent(True)
    assert is_urgent(gate)
    assert passes(gate, 12, is_overflow=True)
    gate.set_urgent(False)
    assert not passes(gate, 1)


@pytest.mark.parametrize("is_reactive", [True, False])
def test_after_a_release_everything_passes_until_the_next_span_and_counts_as_not_urgent(is_reactive: bool) -> None:
    gate, clock = make(is_reactive=is_reactive)
    gate.open(1, BEGIN_S, UNUSED)
    gate.close()
    clock.now = BEGIN_S + 5.0
    gate.release()
    assert passes(gate, 10**6)
    assert not is_urgent(gate)
    assert passes(gate, 10**6, is_overflow=True)
    gate.open(2, BEGIN_S, UNUSED)
    assert not passes(gate, 1)


def test_a_gate_that_is_not_reactive_goes_by_the_plan_alone() -> None:
    gate, clock = make(is_reactive=False)
    gate.hear(HOLDER, 1)
    gate.open(5, BEGIN_S, LIMIT)
    clock.now = BEGIN_S + 100.0
    gate.close()
    assert passing(gate, 100, in_flight=1000) == 100
    assert not passes(gate, 1)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=8), st.lists(st.integers(1, 90), min_size=60, max_size=60))
def test_a_gate_that_is_not_reactive_lets_out_what_is_planned_for_each_span(
    planned: list[int], chunks: list[int]
) -> None:
    """It may be more by a part of one chunk, which is then missing from the next span."""
    gate, _ = make(is_reactive=False)
    gate.begin_save(is_late=False)
    left = iter(chunks)
    chunk, sent, most = next(left), 0, 0
    for number, num_bytes in enumerate(planned, 1):
        gate.open(number, BEGIN_S, Limit(2.0, num_bytes))
        most += num_bytes
        while passes(gate, chunk):
            assert sent < most
            sent += chunk
            chunk = next(left, 1)
        assert sent >= most
        gate.close(is_last=number == len(planned))


def test_the_overflow_passes_after_the_last_span_of_an_iteration_alone() -> None:
    gate, _ = make(is_reactive=False)
    for number, is_last in ((1, False), (2, True), (3, False), (4, True)):
        gate.open(number, BEGIN_S, LIMIT)
        assert not passes(gate, is_overflow=True)
        gate.close(is_last=is_last)
        assert passes(gate, is_overflow=True) == is_last


def test_a_new_checkpoint_does_not_inherit_the_room_of_the_last_one() -> None:
    gate, _ = make(is_reactive=False)
    gate.open(1, BEGIN_S, Limit(2.0, 1000))
    gate.begin_save(is_late=False)
    assert not passes(gate, 1)
    gate.open(2, BEGIN_S, Limit(2.0, 50))
    assert passes(gate, 50)
    assert not passes(gate, 1)


def test_a_new_checkpoint_does_not_pay_for_the_excess_of_the_last_one() -> None:
    gate, _ = make(is_reactive=False)
    gate.open(1, BEGIN_S, Limit(2.0, 1))
    assert passes(gate, 1000)
    gate.begin_save(is_late=False)
    gate.open(2, BEGIN_S, Limit(2.0, 50))
    assert passes(gate, 50)


def _close(gate: Gate) -> None:
    gate.open(1, BEGIN_S - 100.0, LIMIT)
    gate.close()


def _leave_the_holder_behind(gate: Gate) -> None:
    gate.hear(HOLDER, 1)
    gate.open(2, BEGIN_S, LIMIT)


def _pass_the_end(gate: Gate) -> None:
    gate.open(1, BEGIN_S - 100.0, LIMIT)


def _fill(gate: Gate) -> None:
    gate.open(1, BEGIN_S, UNUSED)


@pytest.mark.parametrize(
    ("is_reactive", "is_overflow", "hold", "wake"),
    [
        pytest.param(True, False, _close, lambda gate: gate.open(2, BEGIN_S, LIMIT), id="open"),
        pytest.param(True, False, _close, lambda gate: gate.set_urgent(True), id="urgent"),
        pytest.param(True, False, _close, Gate.release, id="release"),
        pytest.param(True, False, _leave_the_holder_behind, lambda gate: gate.hear(HOLDER, 2), id="hear"),
        pytest.param(True, False, _pass_the_end, Gate.note_deadline_missed, id="deadline missed"),
        pytest.param(False, False, _fill, lambda gate: gate.open(2, BEGIN_S, LIMIT), id="open, by plan"),
        pytest.param(False, False, _fill, lambda gate: gate.set_urgent(True), id="urgent, by plan"),
        pytest.param(False, False, _fill, Gate.release, id="release, by plan"),
        pytest.param(False, False, _fill, Gate.note_deadline_missed, id="deadline missed, by plan"),
        pytest.param(False, True, _fill, lambda gate: gate.close(is_last=True), id="close of the last, by plan"),
    ],
)
def test_a_thread_that_waits_is_woken_by(
    is_reactive: bool, is_overflow: bool, hold: Callable[[Gate], None], wake: Callable[[Gate], None]
) -> None:
    condition = Watched()
    gate, _ = make(is_reactive=is_reactive, condition=condition)
    hold(gate)
    admissions: list[Admission] = []
    thread = threading.Thread(
        target=lambda: admissions.append(gate.wait(HOLDER, 10, lambda: 0, is_overflow=is_overflow)), daemon=True
    )
    thread.start()
    assert condition.is_waited_for.wait(DEADLINE_S)
    wake(gate)
    thread.join(DEADLINE_S)
    assert [(each.num_bytes, each.has_waited) for each in admissions] == [(10, True)]
