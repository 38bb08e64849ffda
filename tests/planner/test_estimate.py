"""How long spans last: from observations, and from loads."""

from __future__ import annotations

import random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capricorn.planner.estimate import FLOOR, LoadFit, SpanEstimate, estimate
from tests.support.plans import quantile_s

DURATIONS = st.lists(st.floats(0, 10), min_size=1, max_size=20)


@given(DURATIONS)
def test_risk_one_half_is_the_median_of_the_observations(observations: list[float]) -> None:
    assert quantile_s(estimate(observations), 0.5) == median(observations)


@given(DURATIONS, st.floats(1e-6, 0.999), st.floats(1e-6, 0.999))
def test_quantiles_are_monotone_and_never_negative(observations: list[float], a: float, b: float) -> None:
    span = estimate(observations)
    assert 0 <= quantile_s(span, min(a, b)) <= quantile_s(span, max(a, b))


@given(st.floats(1e-6, 10), st.integers(1, 9))
def test_observations_that_agree_are_not_taken_as_certain(span_s: float, count: int) -> None:
    assert estimate([span_s] * count).spread_s == FLOOR * median([span_s])


def test_one_disturbed_observation_of_four_changes_little() -> None:
    span = estimate([1.0, 1.01, 9.0, 0.99])
    assert span.median_s == pytest.approx(1.0, rel=0.01)
    assert span.spread_s < 0.05


@given(st.floats(0, 1), st.floats(1e-6, 1e-3), st.floats(100, 1e5), st.integers(5, 64), st.floats(0.01, 0.5))
def test_an_exact_line_is_recovered(a: float, b: float, tokens: float, count: int, varied_frac: float) -> None:
    fit = LoadFit()
    loads = [tokens * (1 + varied_frac * (-1) ** index) for index in range(count)]
    for load in loads:
        fit.note(load, a + b * load)
    line = fit.line()
    assert line is not None
    for load in loads:
        assert line.at(load).median_s == pytest.approx(a + b * load, rel=2e-3)


@given(st.floats(0, 1), st.floats(1e-6, 1e-3), st.floats(100, 1e5))
def test_a_long_exact_line_holds_far_from_the_loads_seen(a: float, b: float, tokens: float) -> None:
    fit = LoadFit()
    for index in range(64):
        load = tokens * (1 + 0.02 * (-1) ** index)
        fit.note(load, a + b * load)
    line = fit.line()
    assert line is not None
    assert line.at(1.3 * tokens).median_s == pytest.approx(a + 1.3 * b * tokens, rel=2e-3)


@given(st.integers(0, 1 << 32), st.integers(2, 64))
def test_a_noisy_line_has_no_wild_slope(seed: int, count: int) -> None:
    rng, fit = random.Random(seed), LoadFit()
    for _ in range(count):
        load = 1000 * rng.gauss(1, 0.05)
        fit.note(load, (0.3 + 0.7 * load / 1000) * rng.gauss(1, 0.02))
    line = fit.line()
    assert line is not None
    assert 0 <= line.slope <= 1.5e-3 * 1.1
    assert count < 8 or line.at(1100).median_s == pytest.approx(1.07, rel=0.12)


@given(st.floats(1, 1e5), st.floats(1e-4, 10), st.floats(0.2, 5))
def test_one_observation_is_taken_as_proportional(tokens: float, span_s: float, ratio: float) -> None:
    fit = LoadFit()
    fit.note(tokens, span_s)
    line = fit.line()
    assert line is not None
    assert line.at(ratio * tokens).median_s == pytest.approx(ratio * span_s)


def test_a_load_never_seen_is_less_certain() -> None:
    fit = LoadFit()
    for load in (990, 1000, 1010, 1005):
        fit.note(load, 1e-3 * load)
    line = fit.line()
    assert line is not None
    assert line.at(3000).spread_s > 3 * line.at(1000).spread_s


def test_a_disturbed_iteration_does_not_bend_the_line() -> None:
    fit = LoadFit()
    for load in (900, 1000, 1100, 950, 1050):
        fit.note(load, 1e-3 * load * (4 if load == 950 else 1))
    line = fit.line()
    assert line is not None
    assert line.at(1000).median_s == pytest.approx(1.0, rel=0.02)


def test_no_tokens_and_no_time_are_a_span_of_nothing() -> None:
    fit = LoadFit()
    assert fit.line() is None
    fit.note(0, 0.0)
    line = fit.line()
    assert line is not None
    assert line.at(100) == SpanEstimate(0.0, 0.0)
