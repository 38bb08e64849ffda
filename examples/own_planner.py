"""Replicates as capricorn does, with a planner of its own: spans profiled every few iterations, filled to a part.

capricorn-bench run --model mixtral-tiny --system examples/own_planner.py:Refill --set system.options.fill=0.6
"""

from collections.abc import Sequence

from pydantic import BaseModel, Field

from capricorn import IterationProfile, Limit, LinkModel, Plan, Planner, ReplicatingSystem, StreamPlanner
from capricorn.planner.gemini_planner import partition


class RefillOptions(BaseModel):
    """Checked by `--set system.options.KEY=VALUE`."""

    fill: float = Field(default=0.8, gt=0, le=1, description="part of each idle span that is filled")
    interval: int = Field(default=10, gt=0, description="iterations between two profiles")


class RefillPlanner(StreamPlanner):
    """Sends all as soon as it is staged, until there is a profile."""

    def __init__(self, options: RefillOptions, rank: int, shard_bytes: int, num_replicas: int) -> None:
        super().__init__(shard_bytes, num_replicas, 64 * 1024)
        self._options, self._rank, self._size, self._spans_s = options, rank, (shard_bytes, num_replicas), ()

    def wants_profile(self, iteration: int) -> bool:
        return iteration % self._options.interval == 1

    def observe(self, profile: IterationProfile) -> None:
        self._spans_s = profile.own_span_s(self._rank)

    def plan(self, iteration: int, link: LinkModel | None) -> Plan:
        if link is not None and self._spans_s:
            buffers = {"buffer_bytes": 2**20, "num_buffers": 4}
            self._plan = partition(self._spans_s, link, *self._size, **buffers, mu=self._options.fill)
        return self._plan

    def limit(self, span: int) -> Limit:
        return self._plan.limits[span]


class Refill(ReplicatingSystem):
    """Idle spans profiled every few iterations, filled to a constant part."""

    settings = RefillOptions

    def make_planner(self, holders: Sequence[int], shard_bytes: int) -> Planner:
        return RefillPlanner(self.settings_in(self.job), self.job.rank, shard_bytes, len(holders))
