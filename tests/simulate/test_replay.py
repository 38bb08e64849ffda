"""Planning policies replayed in virtual time: the model, what its executor does, and what the policies come to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capricorn.config.fields import validate
from capricorn.config.planner import RHO_RANGE, PlannerConfig
from capricorn.errors import ConfigError
from capricorn.loads.synthetic import synthetic_shares
from capricorn.planner.link_model import LinkModel
from capricorn.planner.plan import Chunk, Limit, Plan
from capricorn.planner.profile import IterationProfile, spans_of
from capricorn.simulate.policy import references, replay_policy, shard_bytes
from capricorn.simulate.replay import Checkpoint, ReplayOutcome, replay
from capricorn.simulate.training_model import SimulatedTraining, TraceConfig, ops_of_layers, train, train_on

TRACE = Path(__file__).parents[3] / "shared/data/moe_load_trace.npz"
RHOS = (0.5, 0.9, 1.5)


def policy(spans: str, replan: str = "speculative", gate: bool = True) -> PlannerConfig:
    return PlannerConfig.model_validate({"spans": spans, "replan": replan, "gate": gate})


@cache
def synthetic(phase: str = "stable", iterations: int = 100, **fields: float) -> tuple[SimulatedTraining, TraceConfig]:
    config = TraceConfig.model_validate({"num_chunks": 100, **fields})
    shares_IME = synthetic_shares(
        phase, num_layers=4, num_experts=16, top_k=2, first=1, num_iterations=iterations, seed=1
    )
    return train(shares_IME, config), config


Made: TypeAlias = tuple[SimulatedTraining, TraceConfig]


def at(rho: float, made: Made) -> Made:
    return made[0], made[1].model_copy(update={"rho": rho})


def run(planner: PlannerConfig, made: Made, rho: float = 0.9) -> ReplayOutcome:
    return replay_policy(planner, *at(rho, made))


# --- the model


def test_there_are_two_spans_a_layer_and_direction() -> None:
    spans = spans_of(ops_of_layers(12))
    assert len(spans) == 48
    assert [span.load_layer for span in spans[:4]] == [-1, 0, -1, 1]
    assert spans[-1].closes.kind == "update"


def test_the_mean_iteration_takes_a_second_of_which_the_spans_are_the_share_asked_for() -> None:
    training, config = synthetic()
    assert training.base_s.mean() == pytest.approx(1.0)
    assert training.idle_s.mean() == pytest.approx(config.idle_frac)
    assert training.spans_s.shape == (100, 16)


def test_a_profile_has_the_spans_and_loads_of_its_iteration_on_every_rank() -> None:
    training, config = synthetic()
    profile = training.profile(7, 8)
    assert profile.iteration == 8
    rows = profile.span_s()
    assert len(rows) == config.ranks
    assert np.allclose(rows, training.spans_s[7])
    assert np.array_equal([profile.tokens[layer] for layer in range(4)], training.tokens[7])
    assert profile.ends_s[0][-1] == pytest.approx(training.base_s[7])


def test_the_experts_of_a_span_take_as_long_as_the_most_loaded_rank_has_tokens() -> None:
    training, _ = synthetic(compute_noise=0.0)
    most_IM = training.tokens.max(2)
    for span, layer in ((1, 0), (3, 1)):
        assert np.ptp(training.spans_s[:, span] / most_IM[:, layer]) < 1e-9


def test_tokens_are_as_many_in_every_iteration_up_to_rounding() -> None:
    training, config = synthetic()
    assert np.abs(training.tokens.sum(2) - config.tokens).max() <= config.ranks


def test_the_same_seed_gives_the_same_training_and_another_one_another() -> None:
    one, again, other = (synthetic(seed=seed)[0] for seed in (3, 3.0, 4))
    assert np.array_equal(one.ops_s, again.ops_s)
    assert not np.array_equal(one.ops_s, other.ops_s)


def test_more_ranks_than_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match="17 ranks cannot share 16 experts"):
        synthetic(ranks=17)


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": 7}, {"rho": 1e-310}, {"rho": float("inf")}, {"rho": float("nan")}, {"iterations": 10**30},
        {"num_chunks": 10**30}, {"profile_cost_frac": float("inf")}, {"profile_cost_frac": 1e300},
        {"idle_frac": 1e-310}, {"load_noise": float("nan")}, {"tokens": 10**30},
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_mean_nothing_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        validate(TraceConfig, fields, "here")


def test_the_extremes_of_the_settings_give_finite_figures() -> None:
    most: dict[str, float] = {"load_noise": 0.99, "compute_noise": 0.99, "profile_cost_frac": 10.0, "num_chunks": 1}
    for rho in RHO_RANGE:
        for fields in ({"tokens": 8, "idle_frac": 0.001}, {"idle_frac": 0.999, "attention_frac": 1.0, "ranks": 16}):
            made = at(rho, synthetic("transient", 5, **most, **fields))
            outcome = replay_policy(policy("layer"), *made)
            figures = [outcome.slowdown, outcome.collision_s, *references(PlannerConfig(), *made).values()]
            assert np.isfinite(figures).all()


def test_a_trace_longer_than_memory_is_refused_before_it_is_laid_out(tmp_path: Path) -> None:
    np.savez(tmp_path / "long.npz", iterations=[1, 10**9], load_share=np.ones((2, 1, 8)))
    with pytest.raises(ConfigError, match=r"choose trace\.iterations of at most"):
        train_on(tmp_path / "long.npz", TraceConfig())
    assert len(train_on(tmp_path / "long.npz", TraceConfig(iterations=3)).base_s) == 3


def test_a_checkpoint_takes_rho_times_the_mean_idle_time() -> None:
    training, _ = synthetic()
    link = training.link(1 << 20, 0.9)
    assert (1 << 20) / link.bytes_per_s == pytest.approx(0.9 * training.idle_s.mean())


# --- the executor: 1 byte a second, chunks of 2 bytes, spans of 10 s and 5 s

LINK = LinkModel(0.0, 1.0)


def checkpoint(limits: Sequence[Limit], num_chunks: int, num_planned: int) -> Checkpoint:
    spans = [0 if index < num_planned else len(limits) for index in range(num_chunks)]
    return Checkpoint(Plan(tuple(Chunk(2 * i, 2, span) for i, span in enumerate(spans)), tuple(limits)), LINK)


def test_without_a_gate_what_does_not_fit_a_span_delays_what_follows() -> None:
    limits = [Limit(10.0, 10), Limit(5.0, 4)]
    sent = checkpoint(limits, num_chunks=8, num_planned=7)
    sent.send_blindly(limits[0], 7.0)
    sent.send_blindly(limits[1], 6.0)
    done = sent.outcome(0.5, True)
    assert (done.collision_s, done.overflow_s, done.profile_s) == (3.0, 2.0, 0.5)
    assert (done.planned_bytes, done.hidden_bytes) == (14, 7 + 4)


def test_with_a_gate_a_single_chunk_runs_over_the_end_of_a_span() -> None:
    limits = [Limit(10.0, 10)]
    sent = checkpoint(limits, num_chunks=8, num_planned=5)
    sent.send_gated(limits[0], 3.0)  # the chunk from 2 s to 4 s is under way
    assert sent.outcome(0.0, False).collision_s == 1.0
    assert sent.outcome(0.0, False).overflow_s == 12.0


def test_with_a_gate_nothing_is_sent_that_would_leave_after_the_limit() -> None:
    limits = [Limit(5.0, 4), Limit(20.0, 10)]
    sent = checkpoint(limits, num_chunks=8, num_planned=7)
    sent.send_gated(limits[0], 10.0)  # two chunks and a half
    assert sent.outcome(0.0, False).overflow_s == 11.0
    sent.send_gated(limits[1], 20.0)  # the rest of the first span and the overflow follow
    assert sent.outcome(0.0, False).overflow_s == 0.0


def test_before_a_plan_all_that_fits_a_span_goes_out_and_delays_nothing() -> None:
    sent = checkpoint([], num_chunks=8, num_planned=0)
    sent.send_freely(5.0)
    sent.send_freely(0.0)
    sent.send_freely(4.0)
    assert sent.outcome(0.0, False) == (0.0, 16 - 9, 0.0, 0, 0, False)
    sent.send_freely(50.0)
    assert sent.outcome(0.0, False)[:2] == (0.0, 0.0)


def test_an_empty_span_takes_nothing() -> None:
    limits = [Limit(0.0, 0)]
    for send in (Checkpoint.send_blindly, Checkpoint.send_gated):
        sent = checkpoint(limits, num_chunks=3, num_planned=0)
        send(sent, limits[0], 4.0)
        assert sent.outcome(0.0, False)[:2] == (0.0, 6.0)


@given(
    spans_s=st.lists(st.floats(0, 20), min_size=1, max_size=6),
    limits_s=st.lists(st.integers(0, 20), min_size=6, max_size=6),
    num_chunks=st.integers(1, 30),
    is_gated=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_no_checkpoint_costs_less_than_what_exceeds_the_idle_time(
    spans_s: list[float], limits_s: list[int], num_chunks: int, is_gated: bool
) -> None:
    limits = [Limit(float(limit_s), limit_s) for limit_s in limits_s[: len(spans_s)]]
    num_planned = min(num_chunks, sum(limit.num_bytes for limit in limits) // 2)
    sent = checkpoint(limits, num_chunks, num_planned)
    for limit, true_s in zip(limits, spans_s, strict=True):
        (sent.send_gated if is_gated else sent.send_blindly)(limit, true_s)
    done = sent.outcome(0.0, False)
    assert done.collision_s + done.overflow_s >= 2 * num_chunks - sum(spans_s) - 1e-9
    assert 0 <= done.hidden_bytes <= done.planned_bytes
    if is_gated:
        assert done.collision_s <= 2 * len(spans_s)  # a chunk each


class Listener:
    """A planner that plans nothing and writes down what it is told."""

    drift, replanned = 0.0, False

    def __init__(self) -> None:
        self.heard: list[str] = []

    def wants_profile(self, iteration: int) -> bool:
        self.heard.append(f"wants {iteration}")
        return iteration == 2

    def on_routed(self, layer: int, tokens: Sequence[int]) -> None:
        self.heard.append(f"routed {layer}")

    def observe(self, profile: IterationProfile) -> None:
        self.heard.append(f"observe {profile.iteration}")

    def note(self, iteration: int, lost_s: float, cost_s: float) -> None:
        self.heard.append(f"note {iteration} {lost_s:.3f} {cost_s:.3f}")

    def plan(self, iteration: int, link: LinkModel) -> Plan:
        self.heard.append(f"plan {iteration}")
        return Plan((Chunk(0, 1 << 20, 8),), tuple(Limit(0.0, 0) for _ in range(8)))

    def limit(self, span: int) -> Limit:
        self.heard.append(f"limit {span}")
        return Limit(0.0, 0)


def heard(oracle: bool) -> list[str]:
    shares_IME = np.full((2, 2, 4), 0.25)
    training = train(shares_IME, TraceConfig(ranks=2, load_noise=0.0, compute_noise=0.0))
    listener = Listener()
    link = training.link(1 << 20, 1.0)
    replay(listener, training, LinkModel(0.0, link.bytes_per_s), gate=True, profile_cost_frac=0.1, oracle=oracle)
    return listener.heard


def test_a_planner_hears_of_an_iteration_in_the_order_of_a_training() -> None:
    spans = [
        *("limit 0", "routed 0", "limit 1", "limit 2", "routed 1", "limit 3"),
        *(f"limit {n}" for n in range(4, 8)),
    ]
    assert heard(oracle=False) == [
        *("plan 0", "wants 1", *spans, "note 1 0.587 0.000"),
        *("plan 1", "wants 2", *spans, "observe 2", "note 2 0.587 0.100"),
    ]


def test_an_oracle_sees_each_iteration_before_its_plan_for_nothing() -> None:
    told = heard(oracle=True)
    assert told[:2] == ["observe 1", "plan 0"]
    assert told[-1] == "note 2 0.587 0.000"
    assert told.count("observe 2") == 1


# --- policies on made-up loads

ALL = [(spans, replan) for spans in ("global", "layer") for replan in ("never", "every-10", "every-iter", "oracle")]


@pytest.mark.parametrize("rho", RHOS)
def test_blocking_and_the_bound_are_what_arithmetic_says(rho: float) -> None:
    training, config = at(rho, synthetic())
    found = references(PlannerConfig(), training, config)
    assert found["blocking"] == pytest.approx(1 + rho * config.idle_frac)
    at_least = 1 + max(0, rho - 1) * config.idle_frac
    assert at_least - 1e-9 <= found["lower bound"] <= found["gemini"] <= found["blocking"] + 1e-9


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize(("spans", "replan"), [*ALL, ("layer", "speculative"), ("load", "speculative")])
def test_no_policy_passes_the_bound(spans: str, replan: str, gate: bool) -> None:
    made = synthetic("transient", 60)
    for rho in RHOS:
        outcome = run(policy(spans, replan, gate), made, rho)
        assert outcome.slowdown >= references(PlannerConfig(), *at(rho, made))["lower bound"]
        assert len(outcome.iterations) == 60
        assert outcome.accuracy_frac is not None
        assert 0 < outcome.accuracy_frac <= 1


def test_an_oracle_comes_close_to_the_bound() -> None:
    made = synthetic("transient", 100)
    for rho in RHOS:
        bound = references(PlannerConfig(), *at(rho, made))["lower bound"]
        assert run(policy("layer", "oracle"), made, rho).slowdown <= bound + 0.005
    assert run(policy("layer", "oracle"), made).profiled_frac == 0


@pytest.mark.parametrize("gate", [True, False])
def test_the_first_iteration_has_no_plan_and_loses_what_exceeds_its_idle_time(gate: bool) -> None:
    training, config = made = synthetic("stable", 100)
    first = run(policy("layer", "never", gate), made, 1.5).iterations[0]
    link = training.link(shard_bytes(PlannerConfig(), config), 1.5)
    beyond_s = 1.5 * training.idle_s.mean() - training.idle_s[0]
    assert (first.planned_bytes, first.collision_s) == (0, pytest.approx(0.0))
    assert first.overflow_s == pytest.approx(beyond_s, abs=20 * link.latency_s)


def test_periodic_policies_profile_as_often_as_they_say() -> None:
    made = synthetic("stable", 100)
    assert run(policy("layer", "every-iter"), made).profiled_frac == 1
    assert run(policy("layer", "never"), made).num_profiles(1, 100) == PlannerConfig().profile_iterations


def test_a_profile_is_charged() -> None:
    free, dear = (synthetic("stable", 60, profile_cost_frac=cost) for cost in (0.0, 0.1))
    every = policy("layer", "every-iter")
    assert run(every, dear).slowdown - run(every, free).slowdown == pytest.approx(0.1)


@pytest.mark.parametrize("rho", RHOS)
def test_loads_that_only_make_noise_cause_less_than_one_replan_in_200_iterations(rho: float) -> None:
    iterations = 1000
    one_IME = synthetic_shares("stable", num_layers=4, num_experts=16, top_k=2, first=1, num_iterations=1, seed=1)
    config = TraceConfig(num_chunks=100, rho=rho)
    training = train(np.repeat(one_IME, iterations, axis=0), config)
    outcome = replay_policy(policy("layer"), training, config)
    first = PlannerConfig().profile_iterations
    assert outcome.num_profiles(1, iterations) - first < PlannerConfig().profile_iterations * iterations / 200


def test_speculation_is_as_good_as_a_profile_in_every_iteration() -> None:
    made = synthetic("transient", 400)
    speculative, every = (run(policy("layer", replan), made) for replan in ("speculative", "every-iter"))
    assert speculative.slowdown <= every.slowdown + 0.005
    assert speculative.profiled_frac < 0.5


def test_known_loads_need_no_history() -> None:
    made = synthetic("transient", 300, compute_noise=0.0, num_chunks=320)
    oracle, load = (run(policy(*names), made) for names in (("layer", "oracle"), ("load", "speculative")))
    lost = [each.collision_s + each.overflow_s for each in load.iterations[50:]]
    known = [each.collision_s + each.overflow_s for each in oracle.iterations[50:]]
    assert np.mean(lost) - np.mean(known) < 0.002


# --- policies on a real trace


@cache
def real(spans: str, replan: str, rho: float = 0.9, compute_noise: float = 0.02, iterations: int = 0) -> ReplayOutcome:
    if not TRACE.exists():
        pytest.skip(f"needs the load trace {TRACE}")
    config = TraceConfig(rho=rho, compute_noise=compute_noise, iterations=iterations)
    return replay_policy(policy(spans, replan), train_on(TRACE, config), config)


def test_on_a_real_trace_profiles_become_rare_as_the_loads_settle() -> None:
    outcome = real("layer", "speculative")
    assert outcome.num_profiles(501, 5001) < 0.05 * 4501
    assert outcome.num_profiles(1, 100) > outcome.num_profiles(4000, 4100)


def test_on_a_real_trace_known_loads_come_close_to_the_oracle() -> None:
    load, oracle = (real(*names, iterations=1500) for names in (("load", "speculative"), ("layer", "oracle")))
    assert load.slowdown <= oracle.slowdown + 0.015


@pytest.mark.slow
@pytest.mark.parametrize("rho", RHOS)
def test_on_a_real_trace_speculation_is_as_good_as_a_profile_in_every_iteration(rho: float) -> None:
    assert real("layer", "speculative", rho).slowdown <= real("layer", "every-iter", rho).slowdown + 0.005


@pytest.mark.slow
@pytest.mark.parametrize("rho", RHOS)
def test_on_a_real_trace_known_loads_come_close_to_the_oracle_at_any_rho(rho: float) -> None:
    assert real("load", "speculative", rho).slowdown <= 1.015 * real("layer", "oracle", rho).slowdown


@pytest.mark.slow
@pytest.mark.parametrize("rho", RHOS)
def test_on_a_real_trace_without_noise_of_computing_known_loads_equal_the_oracle(rho: float) -> None:
    load, oracle = (real(*names, rho, 0.0) for names in (("load", "speculative"), ("layer", "oracle")))
    assert load.slowdown <= oracle.slowdown + 0.002


@pytest.mark.slow
@pytest.mark.parametrize("rho", [0.9, 1.5])
def test_on_a_real_trace_planning_by_layer_beats_a_tuned_first_profile(rho: float) -> None:
    outcome, config = real("layer", "every-10", rho), TraceConfig(rho=rho)
    found = references(PlannerConfig(), train_on(TRACE, config), config)
    assert found["lower bound"] <= outcome.slowdown < found["gemini"]


def test_a_checkpoint_has_as_many_full_chunks_as_asked_for() -> None:
    assert shard_bytes(PlannerConfig(max_chunk_bytes=1024), TraceConfig(num_chunks=7)) == 7 * 1024
