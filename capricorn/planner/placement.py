"""Which nodes keep the replicas of which node's state. Pure.

Source: Gemini, SOSP'23, Algorithm 1.
"""

from __future__ import annotations

from itertools import pairwise

from capricorn.errors import ConfigError


def groups_of(num_nodes: int, num_replicas: int) -> list[range]:
    """Groups of consecutive nodes that keep each other's replicas; leftover nodes join the last group.

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


def hosts_of(node: int, num_nodes: int, num_replicas: int) -> list[int]:
    """Nodes that keep the remote replicas of `node`, in the order it sends to them; `num_replicas` - 1 of them.

    A group of exactly `num_replicas` nodes sends to all its others; a larger one is a ring in which each node sends to
    its next `num_replicas` - 1.
    """
    group = next(g for g in groups_of(num_nodes, num_replicas) if node in g)
    place = node - group.start
    return [group.start + (place + step) % len(group) for step in range(1, num_replicas)]


def owners_on(node: int, num_nodes: int, num_replicas: int) -> list[int]:
    """Nodes whose remote replicas `node` keeps."""
    return [other for other in range(num_nodes) if node in hosts_of(other, num_nodes, num_replicas)]
