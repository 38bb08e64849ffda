"""The decisions of a planner: which bytes of the shard go out, in which order, and in which idle span. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from capricorn.planner.link_model import LinkModel
from capricorn.planner.profile import IterationProfile
from capricorn.units import Bytes, Seconds


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes [offset, offset + num_bytes) of a shard, sent to one holder in one go."""

    offset: Bytes
    num_bytes: Bytes
    span: int = 0
    """The idle span it is planned into; as many as there are spans is the overflow."""
    replica: int = 0
    """The remote replica it belongs to, from 0."""


class Limit(NamedTuple):
    """How far an idle span may be used."""

    end_s: Seconds
    """Time since its begin by which everything sent in it must have left."""
    num_bytes: Bytes
    """Most bytes to be sent in it; 0 leaves the span alone, as long as the checkpoint is not late."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The chunks of one checkpoint in sending order, replica after replica; they tile the shard once in each."""

    chunks: tuple[Chunk, ...]
    limits: tuple[Limit, ...] = ()
    """By idle span."""
    risk: float = 0.0
    """The quantile of their durations to which the spans are filled."""

    @property
    def planned_bytes(self) -> Bytes:
        """Bytes that fit the idle spans."""
        return sum(chunk.num_bytes for chunk in self.chunks if chunk.span < len(self.limits))


class Planner(Protocol):
    """Decides how the checkpoint of an iteration is sent. Every rank decides alike from what all ranks know."""

    drift: float
    """Drift of the expert loads since the plan."""
    replanned: bool
    """Whether the last plan rests on a profile that no plan before it did."""

    def wants_profile(self, iteration: int) -> bool:
        """Tells whether the ops of that iteration are to be measured."""
        ...

    def on_routed(self, layer: int, tokens: Sequence[int]) -> None:
        """Hears the choice of a layer's router, in the iteration that runs: token assignments by rank."""
        ...

    def observe(self, profile: IterationProfile) -> None:
        """Takes in the profile of an iteration for which one was wanted."""
        ...

    def note(self, iteration: int, lost_s: Seconds, cost_s: Seconds) -> None:
        """Hears, after an iteration, what collisions and overflow cost it, and what profiling and planning did."""
        ...

    def plan(self, iteration: int, link: LinkModel | None) -> Plan:
        """Returns how to send the checkpoint of an iteration during the next one; `link` is None if it is unknown."""
        ...

    def limit(self, span: int) -> Limit:
        """Returns how far a span of the running iteration may be used, by the last plan and the loads known by now."""
        ...


class StreamPlanner:
    """Sends every chunk as soon as it is staged, in the order of the shard; it takes no account of idle spans."""

    drift, replanned = 0.0, False
    profiled_iterations = 2
    """Iterations that are measured, to know which part of the traffic collides."""

    def __init__(self, shard_bytes: Bytes, num_replicas: int, chunk_bytes: Bytes) -> None:
        """`num_replicas` counts the remote ones."""
        self._plan = Plan(tile(shard_bytes, num_replicas, chunk_bytes))
        self._left = self.profiled_iterations

    def wants_profile(self, iteration: int) -> bool:
        self._left -= 1
        return self._left >= 0

    def on_routed(self, layer: int, tokens: Sequence[int]) -> None:
        """Does nothing: loads change nothing."""

    def observe(self, profile: IterationProfile) -> None:
        """Does nothing: the plan does not depend on profiles."""

    def note(self, iteration: int, lost_s: Seconds, cost_s: Seconds) -> None:
        """Does nothing: there is nothing to adapt."""

    def plan(self, iteration: int, link: LinkModel | None) -> Plan:
        return self._plan

    def limit(self, span: int) -> Limit:
        raise AssertionError("a plan without spans has no limits")


def tile(shard_bytes: Bytes, num_replicas: int, chunk_bytes: Bytes) -> tuple[Chunk, ...]:
    """Returns chunks of one size that tile the shard once for each replica, all of them overflow."""
    offsets = range(0, shard_bytes, chunk_bytes)
    return tuple(
        Chunk(offset, min(chunk_bytes, shard_bytes - offset), replica=replica)
        for replica in range(num_replicas)
        for offset in offsets
    )
