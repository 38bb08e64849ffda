"""Placement: which nodes keep the replicas of which node's state. Pure.

Source: Gemini, SOSP'23, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import comb

from capricorn.errors import ConfigError


def groups_of(num_nodes: int, num_replicas: int) -> list[range]:
    """Returns groups of consecutive nodes that keep each other's replicas; leftover nodes join the last group.

    Raises:
        ConfigError: there are fewer nodes than replicas.
    """
    if num_replicas < 1 or num_replicas > num_nodes:
        raise ConfigError(
            f"{num_replicas} replicas do not fit {num_nodes} nodes; a node keeps one copy, so use 1 to {num_nodes}"
        )
    num_groups = num_nodes // num_replicas
    starts = [group * num_replicas for group in range(num_groups)] + [num_nodes]
    return [range(start, stop) for start, stop in pairwise(starts)]


def holders_of(node: int, num_nodes: int, num_replicas: int) -> list[int]:
    """Returns the nodes that keep the `num_replicas` - 1 remote replicas of `node`, in the order it sends to them.

    A group of exactly `num_replicas` nodes sends to all its others; a larger one is a ring in which each node sends to
    its next `num_replicas` - 1.
    """
    group = next(g for g in groups_of(num_nodes, num_replicas) if node in g)
    place = node - group.start
    return [group.start + (place + step) % len(group) for step in range(1, num_replicas)]


def owners_on(node: int, num_nodes: int, num_replicas: int) -> list[int]:
    """Returns the nodes whose remote replicas `node` keeps."""
    return [other for other in range(num_nodes) if node in holders_of(other, num_nodes, num_replicas)]


def recovery_probability(num_nodes: int, num_replicas: int, num_lost: int) -> float:
    """Returns with what probability a copy of every shard is left when so many nodes, any of them, are lost at once.

    Source: Gemini, SOSP'23, section 4.2. Departs: exact for every number lost, rings included, by counting.

    Raises:
        ConfigError: there are not so many nodes, or fewer nodes than replicas.
    """
    if not 0 <= num_lost <= num_nodes:
        raise ConfigError(f"{num_lost} lost nodes of {num_nodes} make no sense; use 0 to {num_nodes}")
    ways = [1]
    for group in groups_of(num_nodes, num_replicas):
        ways = _product(ways, [_survivable(len(group), num_replicas, lost) for lost in range(len(group) + 1)])
    return ways[num_lost] / comb(num_nodes, num_lost)


def _survivable(size: int, num_replicas: int, lost: int) -> int:
    """Returns how many sets of so many nodes a ring can lose with a copy of each shard left.

    A shard is gone with `num_replicas` nodes in a row. So between the nodes that are left there may be up to
    `num_replicas` - 1 lost ones; each such row of gaps stands for `size` rings with one of the `left` nodes marked.
    """
    left = size - lost
    if not left:
        return 0
    gaps = [1]
    for _ in range(left):
        gaps = _product(gaps, [1] * num_replicas)[: lost + 1]
    return size * gaps[lost] // left if lost < len(gaps) else 0


def _product(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """Returns the product of two polynomials, by their coefficients."""
    total = [0] * (len(one) + len(other) - 1)
    for i, a in enumerate(one):
        for j, b in enumerate(other):
            total[i + j] += a * b
    return total
