"""Ranks, nodes and what each rank holds of the experts. Pure arithmetic; knows no process group."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from capricorn.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Topology:
    """`num_nodes` failure domains with `ranks_per_node` ranks each; rank = node * ranks_per_node + local rank.

    Every rank is in the one data-parallel group of the dense parameters. Experts are divided among the ranks of an
    expert-parallel group: `expert_parallel` ranks that follow each other. Ranks at the same place of these groups hold
    the same experts and are replicas of each other, which reduce their gradients.
    """

    num_nodes: int
    ranks_per_node: int
    expert_parallel: int = 0
    """Ranks of an expert-parallel group; 0 makes it all ranks."""

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.ranks_per_node < 1:
            raise ConfigError(
                f"nodes and ranks per node must be at least 1, got {self.num_nodes} x {self.ranks_per_node}"
            )
        if not self.expert_parallel:
            object.__setattr__(self, "expert_parallel", self.world_size)
        if self.expert_parallel < 1 or self.world_size % self.expert_parallel:
            raise ConfigError(
                f"--expert-parallel {self.expert_parallel} does not divide the {self.world_size} ranks; "
                f"use one of {', '.join(map(str, divisors(self.world_size)))}"
            )

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def num_expert_replicas(self) -> int:
        """Returns how many ranks hold the same experts."""
        return self.world_size // self.expert_parallel

    def expert_parallel_groups(self) -> list[range]:
        """Returns the ranks of each group that all experts are divided among."""
        return [range(first, first + self.expert_parallel) for first in range(0, self.world_size, self.expert_parallel)]

    def expert_replica_groups(self) -> list[range]:
        """Returns the ranks of each group that holds the same experts, by place in the expert-parallel group."""
        return [range(place, self.world_size, self.expert_parallel) for place in range(self.expert_parallel)]

    def experts_of(self, num_experts: int) -> list[range]:
        """Returns by rank which of the loads of its experts are among those of all expert-parallel groups, in a row.

        Raises:
            ConfigError: a group has more ranks than there are experts.
        """
        split = expert_split(num_experts, self.expert_parallel)
        starts = range(0, self.num_expert_replicas * num_experts, num_experts)
        return [range(start + ids.start, start + ids.stop) for start in starts for ids in split]

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def local_rank_of(self, rank: int) -> int:
        return rank % self.ranks_per_node

    def ranks_of(self, node: int) -> range:
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)


def divisors(number: int) -> list[int]:
    """Returns what divides the number, in order."""
    return [each for each in range(1, number + 1) if number % each == 0]


def default_expert_parallel(num_experts: int, world_size: int) -> int:
    """Returns how many ranks share the experts: all, or else the most that divide all and hold at least one each."""
    return max(each for each in divisors(world_size) if each <= max(1, num_experts))


def expert_split(num_experts: int, num_ranks: int) -> list[range]:
    """Returns the global expert ids of each rank: contiguous, sizes differing by at most one, larger ones first.

    Raises:
        ConfigError: there are more ranks than experts, so some rank would hold none.
    """
    if num_ranks > num_experts:
        raise ConfigError(
            f"{num_ranks} ranks cannot share {num_experts} experts: each rank must hold at least one; "
            f"use at most {num_experts} ranks or a model with more experts"
        )
    each, extra = divmod(num_experts, num_ranks)
    starts = [rank * each + min(rank, extra) for rank in range(num_ranks + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]
