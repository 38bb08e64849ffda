"""When a new profile is due."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capricorn.errors import ConfigError
from capricorn.planner.drift import DriftMeter
from capricorn.planner.replan import ReplanPolicy, Speculative, StalenessCost, make_policy

COST_S = 0.005
NUM_RANKS, NUM_EXPERTS, NUM_LAYERS, NUM_MEASURED = 4, 8, 4, 4
Shares = list[list[float]]


def due(policy: ReplanPolicy, num_iterations: int) -> list[int]:
    """The iterations in which profiles of one iteration start."""
    starts = []
    for iteration in range(1, num_iterations + 1):
        if policy.is_due(iteration):
            starts.append(iteration)
            policy.replanned(iteration, COST_S)
        policy.note(0.1, 0.0)
    return starts


def draw_shares(rng: random.Random) -> Shares:
    return [[exp(rng.gauss(0, 0.5)) for _ in range(NUM_EXPERTS)] for _ in range(NUM_LAYERS)]


def route(rng: random.Random, shares: Sequence[float], noise: float) -> list[int]:
    """Token assignments by rank."""
    weights = [share * exp(rng.gauss(0, noise)) for share in shares]
    each = NUM_EXPERTS // NUM_RANKS
    return [int(8192 * sum(weights[r * each : (r + 1) * each]) / sum(weights)) for r in range(NUM_RANKS)]


def profiles(
    rng: random.Random, shares: Callable[[int], Shares], num_iterations: int, noise: float = 0.05
) -> list[int]:
    """The iterations in which the speculative policy starts a profile, where drift costs time."""
    policy, meter, starts, left = Speculative(), DriftMeter(), [], 0
    for iteration in range(1, num_iterations + 1):
        if not left and policy.is_due(iteration):
            starts.append(iteration)
            left = NUM_MEASURED
            meter.restart()
        for layer, share in enumerate(shares(iteration)):
            meter.note(layer, route(rng, share, noise))
        if left:
            left -= 1
            if not left:
                policy.replanned(starts[-1], COST_S)
                meter.mark()
        else:
            policy.note(meter.drift(), 0.002 + 0.1 * meter.drift() + abs(rng.gauss(0, 0.004)))
    return starts


def test_never_is_only_the_first_time() -> None:
    assert due(make_policy("never"), 100) == [1]


@pytest.mark.parametrize(("text", "interval"), [("every-7", 7), ("every-iter", 1), ("oracle", 1)])
def test_periodic_policies_keep_their_interval(text: str, interval: int) -> None:
    assert due(make_policy(text), 30) == list(range(1, 31, interval))


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown planner"):
        make_policy("sometimes")


def test_a_drift_is_first_believed_to_cost_a_profile_in_some_ten_iterations() -> None:
    assert due(make_policy("speculative"), 20) in ([1, 11], [1, 12])


def test_a_drift_that_costs_nothing_is_found_out() -> None:
    cost = StalenessCost()
    for count in range(300):
        cost.note(0.2 * (count % 2), 0.01)
    assert cost.slope_s(COST_S) < 0.05 * COST_S


@given(st.floats(0, 1), st.floats(0, 1))
def test_the_cost_of_staleness_is_learned_beside_what_is_lost_anyway(anyway_s: float, slope_s: float) -> None:
    cost = StalenessCost()
    for count in range(200):
        drift = 0.5 * (count % 10) / 10
        cost.note(drift, anyway_s + slope_s * drift)
    assert cost.slope_s(0.0) == pytest.approx(slope_s, rel=0.02, abs=1e-9)


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), max_size=60), st.floats(0, 1))
def test_the_cost_of_staleness_is_never_negative(noted: list[tuple[float, float]], prior_s: float) -> None:
    cost = StalenessCost()
    for drift, lost_s in noted:
        cost.note(drift, lost_s)
    assert cost.slope_s(prior_s) >= 0
    assert StalenessCost().slope_s(prior_s) == prior_s


def test_a_profile_for_which_nothing_is_lost_is_not_due_even_if_free() -> None:
    policy = Speculative()
    policy.replanned(1, 0.0)
    policy.note(0.0, 1.0)
    assert not policy.is_due(2)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("noise", [0.05, 0.08])
def test_noise_of_stationary_loads_starts_less_than_one_profile_in_200_iterations(seed: int, noise: float) -> None:
    rng = random.Random(seed)
    shares = draw_shares(rng)
    assert profiles(rng, lambda _: shares, 201, noise) == [1]


@pytest.mark.parametrize("seed", range(10))
def test_balanced_noisy_loads_start_none_either(seed: int) -> None:
    shares = [[1.0] * NUM_EXPERTS] * NUM_LAYERS
    assert profiles(random.Random(seed), lambda _: shares, 201) == [1]


@pytest.mark.parametrize("seed", range(10))
def test_an_abrupt_change_of_loads_soon_starts_one(seed: int) -> None:
    rng = random.Random(seed)
    before, after = draw_shares(rng), draw_shares(rng)
    starts = profiles(rng, lambda iteration: before if iteration < 100 else after, 200)
    assert starts[0] == 1
    assert 100 <= starts[1] < 125
    assert len(starts) <= 3


def test_loads_that_drift_slowly_start_some() -> None:
    def shares(iteration: int) -> Shares:
        return [[1.0 + iteration / 100, *[1.0] * (NUM_EXPERTS - 1)]] * NUM_LAYERS

    assert 3 <= len(profiles(random.Random(0), shares, 400)) <= 20


def test_drift_is_the_change_of_the_most_loaded_rank() -> None:
    meter = DriftMeter()
    assert meter.drift() == 0
    for _ in range(4):
        meter.note(0, [100, 50])
    meter.mark()
    assert meter.drift() == 0
    for _ in range(300):
        meter.note(0, [100, 125])
    assert meter.drift() == pytest.approx(0.25, abs=0.01)
    meter.restart()
    meter.note(0, [100, 125])
    meter.mark()
    assert meter.drift() == 0


def test_a_layer_without_tokens_does_not_drift() -> None:
    meter = DriftMeter()
    for _ in range(2):
        meter.note(0, [0, 0])
    meter.mark()
    meter.note(0, [1, 2])
    assert meter.drift() == 0
