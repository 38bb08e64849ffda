"""What goes out, in which order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from capricorn.planner.link_model import LinkModel
from capricorn.planner.plan import Chunk, Limit, Plan, StreamPlanner
from tests.support.plans import overflow_bytes


@given(st.integers(0, 1 << 20), st.integers(0, 3), st.integers(1 << 10, 1 << 16))
def test_chunks_tile_the_shard_once_for_each_replica(shard_bytes: int, num_replicas: int, chunk_bytes: int) -> None:
    chunks = StreamPlanner(shard_bytes, num_replicas, chunk_bytes).plan(1, LinkModel(0.0, 1e6)).chunks
    assert [chunk.replica for chunk in chunks] == sorted(chunk.replica for chunk in chunks)
    for replica in range(num_replicas):
        own = [chunk for chunk in chunks if chunk.replica == replica]
        ends = [0, *(chunk.offset + chunk.num_bytes for chunk in own)]
        assert [chunk.offset for chunk in own] == ends[:-1]
        assert ends[-1] == shard_bytes
    assert all(0 < chunk.num_bytes <= chunk_bytes and chunk.replica < num_replicas for chunk in chunks)


def test_a_stream_is_all_overflow() -> None:
    planner = StreamPlanner(1000, 2, 300)
    plan = planner.plan(1, LinkModel(0.0, 1e6))
    assert (plan.planned_bytes, overflow_bytes(plan)) == (0, 2000)


def test_under_a_stream_two_iterations_are_measured_to_know_what_collides() -> None:
    planner = StreamPlanner(1000, 1, 300)
    assert [planner.wants_profile(iteration) for iteration in range(5, 9)] == [True, True, False, False]


def test_what_is_planned_and_what_overflows_make_up_the_whole() -> None:
    plan = Plan((Chunk(0, 10, 0), Chunk(10, 5, 1), Chunk(15, 7, 2)), (Limit(1.0, 10), Limit(1.0, 5)))
    assert (plan.planned_bytes, overflow_bytes(plan)) == (15, 7)
