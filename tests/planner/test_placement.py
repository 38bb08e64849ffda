"""Which nodes keep whose replicas."""

from __future__ import annotations

from itertools import combinations
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capricorn.errors import ConfigError
from capricorn.planner.placement import groups_of, holders_of, owners_on, recovery_probability

SIZES = st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


def survives(lost: set[int], num_nodes: int, num_replicas: int) -> bool:
    """Whether every node's state is still somewhere, by definition."""
    return all({node, *holders_of(node, num_nodes, num_replicas)} - lost for node in range(num_nodes))


@given(SIZES)
def test_every_node_has_its_remote_replicas_on_distinct_other_nodes(sizes: tuple[int, int]) -> None:
    num_nodes, num_replicas = sizes
    for node in range(num_nodes):
        holders = holders_of(node, num_nodes, num_replicas)
        assert len(set(holders)) == len(holders) == num_replicas - 1
        assert node not in holders


@given(SIZES)
def test_every_node_hosts_as_many_replicas_as_it_has(sizes: tuple[int, int]) -> None:
    num_nodes, num_replicas = sizes
    for node in range(num_nodes):
        owners = owners_on(node, num_nodes, num_replicas)
        assert len(owners) == num_replicas - 1
        assert all(node in holders_of(owner, num_nodes, num_replicas) for owner in owners)


@given(SIZES)
def test_groups_tile_the_nodes_and_only_the_last_may_be_larger(sizes: tuple[int, int]) -> None:
    num_nodes, num_replicas = sizes
    groups = groups_of(num_nodes, num_replicas)
    assert [node for group in groups for node in group] == list(range(num_nodes))
    assert all(len(group) == num_replicas for group in groups[:-1])
    assert num_replicas <= len(groups[-1]) < 2 * num_replicas


@given(st.integers(2, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(2, n))))
def test_losing_fewer_nodes_than_replicas_loses_nothing(sizes: tuple[int, int]) -> None:
    num_nodes, num_replicas = sizes
    for lost in combinations(range(num_nodes), num_replicas - 1):
        assert survives(set(lost), num_nodes, num_replicas)


@pytest.mark.parametrize(("num_lost", "percent"), [(2, 93.3), (3, 80.0), (4, 61.5)])
def test_sixteen_nodes_with_two_replicas_survive_as_often_as_published(num_lost: int, percent: float) -> None:
    survived = sum(survives(set(lost), 16, 2) for lost in combinations(range(16), num_lost))
    assert 100 * survived / comb(16, num_lost) == pytest.approx(percent, abs=0.05)


def test_a_ring_of_leftovers_survives_as_often_as_published() -> None:
    num_nodes, num_replicas = 7, 2
    fatal = num_nodes - (num_replicas - 1) * (num_nodes // num_replicas - 1)
    lost = list(combinations(range(num_nodes), num_replicas))
    survived = sum(survives(set(nodes), num_nodes, num_replicas) for nodes in lost)
    assert survived == comb(num_nodes, num_replicas) - fatal


@pytest.mark.parametrize(("num_nodes", "num_replicas"), [(2, 3), (1, 2), (3, 0)])
def test_replicas_that_do_not_fit_are_refused(num_nodes: int, num_replicas: int) -> None:
    with pytest.raises(ConfigError, match="do not fit"):
        groups_of(num_nodes, num_replicas)


@given(st.integers(1, 10).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n), st.integers(0, n))))
def test_the_probability_of_recovery_is_what_counting_all_cases_gives(sizes: tuple[int, int, int]) -> None:
    num_nodes, num_replicas, num_lost = sizes
    cases = list(combinations(range(num_nodes), num_lost))
    survived = sum(survives(set(lost), num_nodes, num_replicas) for lost in cases)
    assert recovery_probability(num_nodes, num_replicas, num_lost) == pytest.approx(survived / len(cases), abs=1e-12)


@pytest.mark.parametrize(("num_lost", "percent"), [(2, 93.3), (3, 80.0), (4, 61.5)])
def test_the_probability_of_recovery_is_the_published_one(num_lost: int, percent: float) -> None:
    assert 100 * recovery_probability(16, 2, num_lost) == pytest.approx(percent, abs=0.05)


def test_more_nodes_than_there_are_cannot_be_lost() -> None:
    with pytest.raises(ConfigError, match="make no sense"):
        recovery_probability(4, 2, 5)
