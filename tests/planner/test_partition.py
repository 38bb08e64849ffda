"""The cut of a checkpoint into the idle spans."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capricorn.planner.estimate import SpanEstimate
from capricorn.planner.link_model import LinkModel
from capricorn.planner.partition import SLACK, partition
from capricorn.planner.plan import Plan
from tests.support.plans import overflow_bytes, quantile_s

KIB = 1 << 10
SPANS = st.lists(st.builds(SpanEstimate, st.floats(0, 0.1), st.floats(0, 0.02)), max_size=30)
LINKS = st.builds(LinkModel, st.floats(0, 0.01), st.floats(1, 1e8))
SHARDS, REPLICAS, RISKS = st.integers(0, 1 << 22), st.integers(0, 3), st.floats(1e-9, 0.999)
INPUTS = st.tuples(SPANS, LINKS, SHARDS, REPLICAS, st.integers(16 * KIB, 1 << 20), RISKS)
Input = tuple[list[SpanEstimate], LinkModel, int, int, int, float]


def by_span(plan: Plan) -> Counter[int]:
    sizes: Counter[int] = Counter()
    for chunk in plan.chunks:
        sizes[chunk.span] += chunk.num_bytes
    return sizes


@given(INPUTS)
def test_chunks_tile_the_shard_once_for_each_replica(given_: Input) -> None:
    _, _, shard_bytes, num_replicas, _, _ = given_
    chunks = partition(*given_).chunks
    assert {chunk.replica for chunk in chunks} == (set(range(num_replicas)) if shard_bytes else set())
    assert [chunk.replica for chunk in chunks] == sorted(chunk.replica for chunk in chunks)
    for replica in {chunk.replica for chunk in chunks}:
        own = [chunk for chunk in chunks if chunk.replica == replica]
        ends = [0, *(chunk.offset + chunk.num_bytes for chunk in own)]
        assert [chunk.offset for chunk in own] == ends[:-1]
        assert ends[-1] == shard_bytes


@given(INPUTS)
def test_every_chunk_is_bounded(given_: Input) -> None:
    assert all(0 < chunk.num_bytes <= given_[4] for chunk in partition(*given_).chunks)


@given(INPUTS)
def test_no_span_is_planned_beyond_its_capacity_at_the_risk(given_: Input) -> None:
    spans, link, *_, max_risk = given_
    plan = partition(*given_)
    assert plan.risk <= max_risk
    assert len(plan.limits) == len(spans)
    sizes = by_span(plan)
    for index, (span, limit) in enumerate(zip(spans, plan.limits, strict=True)):
        assert limit.num_bytes in (0, link.capacity_bytes(quantile_s(span, plan.risk)))
        assert sizes[index] <= limit.num_bytes


@given(INPUTS)
def test_the_earliest_spans_are_filled_first(given_: Input) -> None:
    plan = partition(*given_)
    spans = [chunk.span for chunk in plan.chunks]
    assert spans == sorted(spans)
    sizes = by_span(plan)
    last = spans[-1] if spans else 0
    assert all(sizes[index] == limit.num_bytes for index, limit in enumerate(plan.limits[:last]))


@given(INPUTS, st.floats(1, 100))
def test_a_faster_link_plans_no_fewer_bytes(given_: Input, faster: float) -> None:
    spans, link, *rest = given_
    more = partition(spans, replace(link, bytes_per_s=faster * link.bytes_per_s), *rest)
    assert more.planned_bytes >= partition(*given_).planned_bytes


@given(INPUTS)
def test_equal_inputs_give_equal_plans(given_: Input) -> None:
    assert partition(*given_) == partition(list(given_[0]), *given_[1:])


@given(INPUTS)
def test_a_lower_risk_would_not_do(given_: Input) -> None:
    spans, link, shard_bytes, num_replicas, _, max_risk = given_
    plan = partition(*given_)
    if overflow_bytes(plan):
        assert plan.risk == max_risk
    elif plan.risk > 1e-5:
        lower = [link.capacity_bytes(quantile_s(span, plan.risk - 1e-6)) for span in spans]
        assert sum(lower) < SLACK * shard_bytes * num_replicas


@pytest.mark.parametrize("spans", [[], [SpanEstimate(0.0, 0.0)], [SpanEstimate(1e-4, 0.0)] * 3])
def test_spans_not_longer_than_the_latency_leave_all_to_the_overflow(spans: list[SpanEstimate]) -> None:
    plan = partition(spans, LinkModel(1e-4, 1e9), 10 * KIB, 2, 4 * KIB, 0.5)
    assert plan.planned_bytes == 0
    assert overflow_bytes(plan) == 20 * KIB
    assert {chunk.span for chunk in plan.chunks} == {len(spans)}


def test_a_shard_of_terabytes_is_planned() -> None:
    plan = partition([SpanEstimate(1e3, 1.0)] * 4, LinkModel(1e-4, 1e9), 10**13, 1, 1 << 35, 0.5)
    assert plan.planned_bytes + overflow_bytes(plan) == 10**13


def test_with_room_to_spare_the_least_certain_span_is_filled_least() -> None:
    spans = [SpanEstimate(0.1, 0.001), SpanEstimate(0.1, 0.02), SpanEstimate(0.1, 0.001)]
    plan = partition(spans, LinkModel(0.0, 1e6), 260_000, 1, 10_000, 0.5)
    sizes = by_span(plan)
    assert overflow_bytes(plan) == 0
    assert plan.risk < 0.1
    assert sizes[1] < sizes[0] <= 100_000


def test_chunks_must_leave_when_the_span_ends_on_this_rank() -> None:
    spans, ends = [SpanEstimate(0.1, 0.01)], [SpanEstimate(0.2, 0.02)]
    plan = partition(spans, LinkModel(0.0, 1e6), 10**6, 1, 10_000, 0.3, ends)
    assert plan.limits[0].end_s == quantile_s(ends[0], 0.3)
    assert plan.limits[0].num_bytes == LinkModel(0.0, 1e6).capacity_bytes(quantile_s(spans[0], 0.3))
