"""A link as a latency and a rate, learned from transfers."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capricorn.planner.link_model import LinkEstimator, LinkModel

LATENCIES_S, RATES = st.floats(0, 1e-2), st.floats(1e5, 1e11)
# Sizes that differ by half at least, each any number of times.
SIZES = st.lists(st.integers(10, 30).map(lambda n: int(1.5**n)), min_size=2, max_size=60).filter(
    lambda sizes: len(set(sizes[-32:])) > 1
)


def learn(transfers: Sequence[tuple[int, float]]) -> LinkModel:
    estimator = LinkEstimator()
    for num_bytes, duration_s in transfers:
        estimator.note(num_bytes, duration_s)
    model = estimator.model()
    assert model is not None
    return model


@given(LATENCIES_S, RATES, st.integers(0, 1 << 40))
def test_what_fits_a_span_is_sent_within_it(latency_s: float, rate: float, num_bytes: int) -> None:
    link = LinkModel(latency_s, rate)
    span_s = link.transfer_s(num_bytes)
    assert link.capacity_bytes(span_s) == pytest.approx(num_bytes, abs=1 + 1e-9 * num_bytes + 1e-12 * rate)
    assert link.capacity_bytes(latency_s / 2) == 0


def test_nothing_is_known_before_a_transfer() -> None:
    estimator = LinkEstimator()
    assert estimator.model() is None
    estimator.note(0, 1.0)
    estimator.note(10, 0.0)
    assert estimator.model() is None


@given(st.floats(1e-5, 1e-2), st.floats(1e6, 1e10), SIZES)
def test_transfers_of_two_sizes_without_noise_tell_the_link_exactly(
    latency_s: float, rate: float, sizes: list[int]
) -> None:
    truth = LinkModel(latency_s, rate)
    link = learn([(size, truth.transfer_s(size)) for size in sizes])
    for size in sizes[-32:]:
        assert link.transfer_s(size) == pytest.approx(truth.transfer_s(size), rel=1e-9)
    largest = max(sizes[-32:])
    if largest / rate > 1e-4 * latency_s:  # else its share of the time is lost in the rounding
        assert link.bytes_per_s == pytest.approx(rate, rel=1e-6)
        assert link.latency_s == pytest.approx(latency_s, rel=1e-6)


def test_transfers_of_one_size_tell_the_rate_alone() -> None:
    link = learn([(1000, 0.01)] * 3)
    assert (link.latency_s, link.bytes_per_s) == (0.0, pytest.approx(1e5))


@given(st.integers(0, 1 << 32), st.floats(0, 0.3))
def test_slowed_transfers_do_not_wreck_the_estimate(seed: int, slowed_frac: float) -> None:
    rng, truth = random.Random(seed), LinkModel(2e-4, 25e6)
    transfers = []
    for count in range(32):
        size = rng.choice([1 << 14, 1 << 16, 1 << 18])
        slower = rng.uniform(2, 5) if count < 32 * slowed_frac else rng.gauss(1, 0.02)
        transfers.append((size, truth.transfer_s(size) * slower))
    rng.shuffle(transfers)
    link = learn(transfers)
    assert link.transfer_s(1 << 18) == pytest.approx(truth.transfer_s(1 << 18), rel=0.15)


@given(st.lists(st.tuples(st.integers(0, 1 << 40), st.floats(0, 1e3)), max_size=70))
def test_any_transfers_give_a_latency_and_a_positive_rate(transfers: list[tuple[int, float]]) -> None:
    estimator = LinkEstimator()
    for num_bytes, duration_s in transfers:
        estimator.note(num_bytes, duration_s)
    link = estimator.model()
    assert link is None or (link.latency_s >= 0 and link.bytes_per_s > 0)


def test_a_link_that_has_changed_is_soon_known() -> None:
    before, after = LinkModel(1e-4, 1e8), LinkModel(1e-4, 2e7)
    sizes = [1 << 16, 1 << 18] * 16
    link = learn([(n, before.transfer_s(n)) for n in sizes] + [(n, after.transfer_s(n)) for n in sizes])
    assert link.bytes_per_s == pytest.approx(after.bytes_per_s)
