"""Which ranks share the experts, which hold the same, and what each is told of their loads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capricorn.errors import ConfigError
from capricorn.topology import Topology, default_expert_parallel, divisors, expert_split


@st.composite
def shapes(draw: st.DrawFn) -> tuple[Topology, int]:
    """A topology and a number of experts that it can divide."""
    nodes, ranks = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    expert_parallel = draw(st.sampled_from(divisors(nodes * ranks)))
    return Topology(nodes, ranks, expert_parallel), draw(st.integers(expert_parallel, 2 * expert_parallel + 3))


@given(shapes())
def test_every_rank_is_in_one_group_of_each_kind_and_they_cross_in_one_rank(shape: tuple[Topology, int]) -> None:
    topology, _ = shape
    sharing, replicas = topology.expert_parallel_groups(), topology.expert_replica_groups()
    for groups in (sharing, replicas):
        assert sorted(rank for group in groups for rank in group) == list(range(topology.world_size))
    assert all(len(set(one) & set(other)) == 1 for one in sharing for other in replicas)
    assert len(replicas[0]) == topology.num_expert_replicas


@given(shapes())
def test_each_group_holds_every_expert_once_and_replicas_hold_the_same(shape: tuple[Topology, int]) -> None:
    topology, num_experts = shape
    places = topology.experts_of(num_experts)
    assert [place for mine in places for place in mine] == list(range(topology.num_expert_replicas * num_experts))
    for group in topology.expert_replica_groups():
        assert len({tuple(place % num_experts for place in places[rank]) for rank in group}) == 1


def test_by_default_all_ranks_share_the_experts_or_the_most_that_can() -> None:
    assert Topology(2, 2) == Topology(2, 2, 4)
    assert [default_expert_parallel(8, ranks) for ranks in (1, 4, 8, 16, 12, 13, 18)] == [1, 4, 8, 8, 6, 1, 6]


@pytest.mark.parametrize("size", [-1, 3, 8])
def test_a_group_that_does_not_divide_the_ranks_is_refused_with_those_that_do(size: int) -> None:
    with pytest.raises(ConfigError, match=f"--expert-parallel {size} does not divide the 4 ranks; use one of 1, 2, 4"):
        Topology(2, 2, size)


def test_more_ranks_than_experts_cannot_share_them() -> None:
    with pytest.raises(ConfigError, match="9 ranks cannot share 8 experts"):
        expert_split(8, 9)
