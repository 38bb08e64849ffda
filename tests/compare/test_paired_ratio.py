"""The paired ratio and its interval: what must hold for any durations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capricorn.compare.paired_ratio import Durations, paired_ratio, unpaired

Runs: TypeAlias = list[dict[int, float]]
"""Seconds by iteration, of each repeat."""

seconds = st.floats(1e-4, 1e3)
runs = st.lists(st.dictionaries(st.integers(1, 40), seconds, min_size=1, max_size=12), min_size=1, max_size=4)
checked = settings(max_examples=40, deadline=None)


def ratio(ours: Sequence[Durations | None], theirs: Sequence[Durations | None]) -> Any:
    return paired_ratio(ours, theirs)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Runs, Runs]:
    """Two systems that measured the same iterations."""
    ours = draw(runs)
    return ours, [{iteration: draw(seconds) for iteration in each} for each in ours]


@checked
@given(pairs())
def test_the_interval_holds_the_ratio_of_the_sums(pair: tuple[Runs, Runs]) -> None:
    ours, theirs = pair
    found = ratio(ours, theirs)
    expected = sum(sum(each.values()) for each in ours) / sum(sum(each.values()) for each in theirs)
    assert found.value == pytest.approx(expected)
    assert found.ci[0] <= found.value <= found.ci[1]


@checked
@given(pairs(), st.floats(1e-3, 1e3))
def test_the_unit_of_time_changes_nothing(pair: tuple[Runs, Runs], unit: float) -> None:
    scaled = [[{i: unit * value for i, value in each.items()} for each in repeats] for repeats in pair]
    assert np.allclose([*_flat(ratio(*scaled))], [*_flat(ratio(*pair))], rtol=1e-9)


@checked
@given(pairs())
def test_the_inverse_ratio_has_the_inverse_interval(pair: tuple[Runs, Runs]) -> None:
    ours, theirs = pair
    value, low, high = _flat(ratio(ours, theirs))
    assert np.allclose([1 / value, 1 / high, 1 / low], [*_flat(ratio(theirs, ours))], rtol=1e-9)


@checked
@given(runs)
def test_a_system_and_itself_differ_by_exactly_nothing(repeats: Runs) -> None:
    assert _flat(ratio(repeats, repeats)) == (1.0, 1.0, 1.0)


@checked
@given(runs, st.floats(0.01, 100))
def test_a_constant_factor_is_found_without_doubt(repeats: Runs, factor: float) -> None:
    slower = [{i: factor * value for i, value in each.items()} for each in repeats]
    assert np.allclose([*_flat(ratio(slower, repeats))], factor, rtol=1e-9)


@checked
@given(pairs(), st.data())
def test_a_missing_repeat_takes_its_pair_with_it_and_no_other(pair: tuple[Runs, Runs], data: st.DataObject) -> None:
    ours, theirs = pair
    missing = data.draw(st.integers(0, len(ours) - 1))
    with_gap: list[dict[int, float] | None] = [None if k == missing else each for k, each in enumerate(ours)]
    without = [k for k in range(len(ours)) if k != missing]
    expected = ratio([ours[k] for k in without], [theirs[k] for k in without])
    assert ratio(with_gap, theirs) == expected


def _flat(found: Any) -> tuple[float, float, float]:
    return found.value, *found.ci


def test_only_iterations_that_both_have_are_compared() -> None:
    found = ratio([{21: 2.0, 22: 3.0, 23: 9.0}], [{1: 100.0, 21: 1.0, 22: 1.5}])
    assert found.value == 2.0


def test_runs_in_no_ratio_are_those_without_a_partner_of_their_repeat() -> None:
    ours: list[Durations | None] = [{1: 2.0}, {1: 2.0}, None, {1: 2.0}, {1: 2.0}]
    theirs: list[Durations | None] = [{1: 1.0}, None, {1: 1.0}, {2: 1.0}]
    assert unpaired(ours, theirs) == [1, 3, 4]
    assert unpaired(theirs, ours) == [2, 3]
    assert unpaired(ours, ours) == []


def test_repeats_are_paired_by_number_also_if_one_system_has_fewer() -> None:
    found = ratio([{1: 2.0}, {1: 30.0}, {1: 7.0}], [{1: 1.0}, {1: 10.0}])
    assert found.value == 32.0 / 11.0


@pytest.mark.parametrize(
    ("ours", "theirs"), [([], []), ([None], [{1: 1.0}]), ([{1: 1.0}], [{2: 1.0}]), ([{1: 1.0}], [])]
)
def test_nothing_in_common_is_not_known(ours: list[Any], theirs: list[Any]) -> None:
    assert ratio(ours, theirs) is None


def test_a_stall_in_every_third_iteration_shows_although_no_median_would_show_it() -> None:
    base = dict.fromkeys(range(1, 31), 1.0)
    stalling = {i: 4.0 if i % 3 == 0 else 1.0 for i in base}
    found = ratio([stalling], [base])
    assert found.value == 2.0
    assert found.ci[0] > 1.4


def test_one_repeat_of_one_iteration_leaves_no_doubt_to_compute() -> None:
    assert _flat(ratio([{5: 3.0}], [{5: 2.0}])) == pytest.approx((1.5, 1.5, 1.5))


def test_what_differs_from_repeat_to_repeat_widens_the_interval() -> None:
    """Iterations of a run are not independent: many of them do not make up for few repeats."""
    random = np.random.default_rng(1)
    many = range(1, 401)
    base = [dict.fromkeys(many, 1.0) for _ in range(3)]
    runs = [{i: factor + 0.01 * random.standard_normal() for i in many} for factor in (1.0, 1.1, 1.2)]
    pooled = ratio([{1000 * k + i: s for k, run in enumerate(runs) for i, s in run.items()}], [
        {1000 * k + i: 1.0 for k in range(3) for i in many}
    ])  # fmt: skip
    by_repeat = ratio(runs, base)
    assert by_repeat.value == pytest.approx(pooled.value)
    assert by_repeat.ci[1] - by_repeat.ci[0] > 3 * (pooled.ci[1] - pooled.ci[0])


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    """Durations of known means, many times: of independent iterations 95 % of the intervals hold the ratio."""
    random = np.random.default_rng(0)
    held = 0
    for _ in range(200):
        ours = dict(enumerate(1.2 * random.lognormal(sigma=0.1, size=60)))
        theirs = dict(enumerate(random.lognormal(sigma=0.1, size=60)))
        low, high = ratio([ours], [theirs]).ci
        held += low <= 1.2 <= high
    assert 0.88 <= held / 200 <= 0.99
