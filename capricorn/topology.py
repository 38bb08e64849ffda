"""Ranks, nodes and what each rank holds of the experts. Pure arithmetic; knows no process group."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from capricorn.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Topology:
    """`num_nodes` failure domains with `ranks_per_node` ranks each; rank = node * ranks_per_node + local rank.

    Every rank is in the one data-parallel group of the dense parameters and the one expert-parallel group.
    """

    num_nodes: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.ranks_per_node < 1:
            raise ConfigError(
                f"nodes and ranks per node must be at least 1, got {self.num_nodes} x {self.ranks_per_node}"
            )

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.ranks_per_node

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def local_rank_of(self, rank: int) -> int:
        return rank % self.ranks_per_node

    def ranks_of(self, node: int) -> range:
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)


def expert_split(num_experts: int, world_size: int) -> list[range]:
    """Returns the global expert ids of each rank: contiguous, sizes differing by at most one, larger ones first.

    Raises:
        ConfigError: there are more ranks than experts, so some rank would hold none.
    """
    if world_size > num_experts:
        raise ConfigError(
            f"{world_size} ranks cannot share {num_experts} experts: each rank must hold at least one; "
            f"use at most {num_experts} ranks or a model with more experts"
        )
    each, extra = divmod(num_experts, world_size)
    starts = [rank * each + min(rank, extra) for rank in range(world_size + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]
