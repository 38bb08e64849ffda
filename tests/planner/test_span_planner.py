"""From profiles to plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pytest

from capricorn.config.planner import PlannerConfig
from capricorn.hooks import NO_LAYER, OpKey
from capricorn.planner.estimate import FLOOR
from capricorn.planner.link_model import LinkModel
from capricorn.planner.plan import Limit, Plan
from capricorn.planner.profile import IterationProfile, spans_of
from capricorn.planner.span_planner import SpanPlanner
from tests.support.plans import overflow_bytes

FORWARD = tuple(OpKey(0, "forward", kind) for kind in ("attention", "gate", "dispatch", "expert", "combine"))
BACKWARD = tuple(OpKey(0, "backward", op.kind) for op in reversed(FORWARD))
OPS = (*FORWARD, OpKey(NO_LAYER, "forward", "head"), *BACKWARD, OpKey(NO_LAYER, "backward", "reduce"))
SPANS = spans_of(OPS)
EXPERT_SPANS = [index for index, span in enumerate(SPANS) if span.load_layer == 0]
LINK = LinkModel(0.0, 1e6)
SHARD_BYTES = 2_000_000
MOVES_S = 0.01
LOADS = [(1000, 500), (500, 1100), (900, 600), (700, 800), (1050, 450), (650, 850)]


def profile(
    lasts_s: Sequence[Mapping[str, float]], iteration: int = 1, tokens: Mapping[int, tuple[int, ...]] | None = None
) -> IterationProfile:
    """Of ranks whose computing takes so long by op, 0.1 s unless said; nobody waits for anybody."""
    begins: list[tuple[float, ...]] = []
    ends: list[tuple[float, ...]] = []
    for lasts in lasts_s:
        clock, begin, end = 0.0, [], []
        for op in OPS:
            begin.append(clock)
            moves = op.kind in ("dispatch", "combine", "reduce")
            clock += MOVES_S if moves else lasts.get(str(op), 0.1)
            end.append(clock)
        begins.append(tuple(begin))
        ends.append(tuple(end))
    return IterationProfile(iteration, OPS, tuple(begins), tuple(ends), tokens or {})


def make(spans: str = "layer", replan: str = "never", holders: Sequence[int] = (1,), **more: object) -> SpanPlanner:
    config = PlannerConfig(spans=spans, replan=replan, max_chunk_bytes=10_000, **more)  # type: ignore[arg-type]
    return SpanPlanner(config, rank=0, holders=holders, shard_bytes=SHARD_BYTES)


def train(
    planner: SpanPlanner, loads: Sequence[tuple[int, int]], *, routed: bool = True, stale_s: float = 0.0
) -> Iterator[tuple[int, Plan]]:
    """Iterations whose experts take 0.05 s and 1e-4 s a token on the most loaded rank; drift costs `stale_s` a unit."""
    for iteration, tokens in enumerate(loads, 1):
        wanted = planner.wants_profile(iteration)
        if routed:
            planner.on_routed(0, tokens)
        if wanted:
            lasts = expert_times(0.05 + 1e-4 * max(tokens))
            planner.observe(profile([lasts, lasts], iteration, {0: tokens} if routed else {}))
        plan = planner.plan(iteration, LINK)
        planner.note(iteration, stale_s * planner.drift, 0.005 if wanted else 0.0)
        yield iteration, plan


def expert_times(span_s: float) -> dict[str, float]:
    return {"expert.0.forward": span_s, "expert.0.backward": 2 * span_s}


def wanted(planner: SpanPlanner, num_iterations: int) -> list[int]:
    result = []
    for iteration in range(1, num_iterations + 1):
        if planner.wants_profile(iteration):
            result.append(iteration)
            planner.observe(profile([{}, {}], iteration))
        planner.plan(iteration, LINK)
        planner.note(iteration, 0.0, 0.005)
    return result


def test_before_a_profile_everything_is_overflow() -> None:
    planner = make()
    plan = planner.plan(1, LINK)
    assert (plan.limits, overflow_bytes(plan)) == ((), SHARD_BYTES)
    assert (planner.spans, planner.drift, planner.replanned) == ((), 0.0, False)


def test_a_profile_fills_the_spans_and_says_so_once() -> None:
    planner = make(profile_iterations=1)
    planner.observe(profile([{}, {}]))
    plan = planner.plan(1, LINK)
    assert planner.spans == SPANS
    assert len(plan.limits) == len(SPANS)
    assert plan.planned_bytes == sum(limit.num_bytes for limit in plan.limits) > 0
    assert planner.replanned
    planner.plan(2, LINK)
    assert not planner.replanned


def test_as_many_replicas_are_sent_as_there_are_holders() -> None:
    planner = make(holders=(1, 2))
    planner.observe(profile([{}] * 3))
    assert {chunk.replica for chunk in planner.plan(1, LINK).chunks} == {0, 1}
    assert make(holders=()).plan(1, LINK).chunks == ()


def test_a_span_carries_what_fits_once_sender_and_hosts_are_idle_and_ends_by_when_the_sender_began() -> None:
    planner = make()
    measured = profile([expert_times(0.3)] * 3)
    ends = [list(row) for row in measured.ends_s]
    for rank, late_s in ((1, 0.1), (2, 0.2)):  # rank 2 is no holder of ours
        ends[rank][OPS.index(SPANS[EXPERT_SPANS[0]].opens)] += late_s
    planner.observe(replace(measured, ends_s=tuple(map(tuple, ends))))
    limit = planner.plan(1, LINK).limits[EXPERT_SPANS[0]]
    assert limit.num_bytes == pytest.approx(0.2e6, abs=1)
    assert limit.end_s == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("replan", "burst", "expected"),
    [
        ("never", 4, [1, 2, 3, 4]),
        ("every-10", 2, [1, 2, 11, 12, 21, 22]),
        ("every-3", 4, list(range(1, 25))),
        ("every-iter", 4, list(range(1, 25))),
        ("oracle", 4, list(range(1, 25))),
        ("speculative", 3, [1, 2, 3]),
    ],
)
def test_profiles_are_wanted_as_the_policy_says(replan: str, burst: int, expected: list[int]) -> None:
    assert wanted(make(replan=replan, profile_iterations=burst), 24) == expected


def test_layer_spans_are_the_median_of_what_was_observed() -> None:
    planner = make(profile_iterations=5)
    for iteration, span_s in enumerate((0.2, 0.3, 0.22, 9.0, 0.21), 1):
        assert planner.wants_profile(iteration)
        planner.observe(profile([expert_times(span_s)] * 2, iteration))
    assert planner.plan(5, LINK).limits[EXPERT_SPANS[0]].end_s == pytest.approx(0.22)


def test_a_new_profile_of_three_iterations_outweighs_all_old_ones() -> None:
    planner = make(replan="every-20", profile_iterations=5)
    for iteration in range(1, 24):
        if planner.wants_profile(iteration):
            planner.observe(profile([expert_times(0.1 if iteration < 10 else 0.5)] * 2, iteration))
        plan = planner.plan(iteration, LINK)
        planner.note(iteration, 0.0, 0.005)
    assert plan.limits[EXPERT_SPANS[0]].end_s == pytest.approx(0.5)


def test_an_oracle_plans_by_the_last_profile_alone() -> None:
    for spans in ("layer", "load"):
        planner = make(spans, "oracle")
        for iteration, span_s in enumerate((0.1, 0.2, 0.15), 1):
            assert planner.wants_profile(iteration)
            planner.on_routed(0, (10, 20))
            planner.observe(profile([expert_times(span_s)] * 2, iteration, {0: (10, 20)}))
            assert planner.plan(iteration, LINK).limits[EXPERT_SPANS[0]].end_s == pytest.approx(span_s)


def test_global_spans_are_all_the_mean() -> None:
    planner = make("global", risk=0.25)
    measured = profile([{}, {}])
    planner.observe(measured)
    mean_s = sum(measured.span_s()[0]) / len(SPANS)
    plan = planner.plan(1, LINK)
    assert len(set(plan.limits)) == 1
    assert (1 - FLOOR) * mean_s < plan.limits[0].end_s < mean_s


def test_load_spans_follow_the_loads_of_the_running_iteration() -> None:
    planner = make("load", profile_iterations=6)
    for _ in train(planner, LOADS):
        pass
    planner.on_routed(0, (800, 700))
    forward, backward = (planner.limit(span) for span in EXPERT_SPANS)
    assert forward == Limit(pytest.approx(0.13, rel=0.005), pytest.approx(0.13e6, rel=0.005))
    assert backward.end_s == pytest.approx(0.26, rel=0.005)
    planner.on_routed(0, (300, 1200))
    assert planner.limit(EXPERT_SPANS[0]).end_s == pytest.approx(0.17, rel=0.01)


def test_with_the_loads_of_the_plan_its_limits_stand() -> None:
    planner = make("load", risk=0.3)
    for _, plan in train(planner, LOADS):
        assert tuple(map(planner.limit, range(len(SPANS)))) == plan.limits


def test_load_spans_of_other_ops_stand_whatever_the_loads() -> None:
    planner = make("load")
    *_, (_, plan) = train(planner, LOADS)
    planner.on_routed(0, (5000, 1))
    for span in set(range(len(SPANS))) - set(EXPERT_SPANS):
        assert planner.limit(span) == plan.limits[span]


def test_without_routers_load_spans_are_layer_spans() -> None:
    by_load, by_layer = make("load"), make("layer")
    assert list(train(by_load, LOADS, routed=False)) == list(train(by_layer, LOADS, routed=False))
    assert by_load.limit(EXPERT_SPANS[0]) == by_layer.limit(EXPERT_SPANS[0])


def test_equal_observations_give_equal_plans() -> None:
    assert list(train(make("load", "speculative"), LOADS)) == list(train(make("load", "speculative"), LOADS))


def test_ranks_want_profiles_of_the_same_iterations() -> None:
    loads = [(1000, 1000)] * 50 + [(1900, 100)] * 50
    planners = [
        SpanPlanner(PlannerConfig(spans="load"), rank=rank, holders=[1 - rank], shard_bytes=SHARD_BYTES + rank)
        for rank in range(2)
    ]
    starts = [
        [iteration for iteration, _ in train(planner, loads, stale_s=0.1) if planner.replanned] for planner in planners
    ]
    assert starts[0] == starts[1]
    assert len(starts[0]) > 1


def test_a_change_of_loads_starts_a_profile_and_stable_ones_none() -> None:
    planner = make("layer", "speculative")
    loads = [(1000, 1000 + iteration % 3) for iteration in range(60)] + [(1900, 100)] * 60
    replans = [iteration for iteration, _ in train(planner, loads, stale_s=0.1) if planner.replanned]
    assert replans[0] == 4
    assert 60 < replans[1] < 75
    assert len(replans) == 2


def test_what_a_profile_cost_counts_also_when_it_is_heard_of_later() -> None:
    planner = make("layer", "speculative")
    costs_s = dict.fromkeys(range(1, 11), 0.0) | {11: 5.0}  # as with a checkpoint every ten iterations
    profiled = []
    for iteration in range(1, 60):
        if planner.wants_profile(iteration):
            profiled.append(iteration)
            planner.observe(profile([{}, {}], iteration))
        planner.on_routed(0, (1000, 1000) if iteration < 20 else (1500, 500))
        planner.plan(iteration, LINK)
        planner.note(iteration, 0.0 if iteration < 20 else 0.01, costs_s.get(iteration, 0.0))
    assert profiled == [1, 2, 3, 4]


def test_drift_is_known_between_profiles() -> None:
    planner = make("layer", "never")
    drifts = [planner.drift for _ in train(planner, [(1000, 1000)] * 20 + [(1500, 500)] * 60)]
    assert drifts[:20] == [0.0] * 20
    assert drifts[-1] == pytest.approx(0.5, abs=0.05)


def test_before_the_link_is_known_all_is_overflow() -> None:
    planner = make()
    planner.observe(profile([expert_times(0.3)] * 3))
    plan = planner.plan(1, None)
    assert plan.limits == ()
    assert plan.planned_bytes == 0
    assert overflow_bytes(plan) > 0
