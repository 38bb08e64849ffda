"""What a planner decides: which bytes of the shard go out, in which order, and in which idle span. Pure."""

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
    """Which of the remote replicas it belongs to, from 0."""


class Limit(NamedTuple):
    """How far an idle span may be used."""

    end_s: Seconds
    """Since its begin: when what is sent in it must have left."""
    num_bytes: Bytes
    """What is to be sent in it at most; 0 leaves the span alone, as long as the checkpoint is not late."""


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
        """What fits the idle spans."""
        return sum(chunk.num_bytes for chunk in self.chunks if chunk.span < len(self.limits))

    @property
    def overflow_bytes(self) -> Bytes:
        """What does not."""
        return sum(chunk.num_bytes for chunk in self.chunks) - self.planned_bytes


class Planner(Protocol):
    """Decides how the checkpoint of an iteration is sent. Every rank decides alike from what all ranks know."""

    drift: float
    """Of the expert loads since the plan."""
    replanned: bool
    """Whether the last plan rests on a profile that no plan before it did."""

    def wants_profile(self, iteration: int) -> bool:
        """Whether the ops of that iteration are to be measured."""
        ...

    def on_routed(self, layer: int, tokens: Sequence[int]) -> None:
        """The router of a layer has chosen, in the iteration that runs: token assignments by rank."""
        ...

    def observe(self, profile: IterationProfile) -> None:
        """What was measured of an iteration for which a profile was wanted."""
        ...

    def note(self, iteration: int, lost_s: Seconds, cost_s: Seconds) -> None:
        """An iteration has ended: what collisions and overflow cost it, and what profiling and planning did."""
        ...

    def plan(self, iteration: int, link: LinkModel | None) -> Plan:
        """How to send the checkpoint of that iteration over such a link, None if unknown, while the next one trains."""
        ...

    def limit(self, span: int) -> Limit:
        """How far an idle span of the iteration that runs may be used, by the last plan and the loads known by now."""
        ...


class StreamPlanner:
    """Every chunk goes out as soon as it is staged, in the order of the shard; it takes no account of idle spans."""

    drift, replanned = 0.0, False
    profiled_iterations = 2
    """Measured, so that it is known what of the traffic collides."""

    def __init__(self, shard_bytes: Bytes, num_replicas: int, chunk_bytes: Bytes) -> None:
        """`num_replicas` counts the remote ones."""
        self._plan = Plan(tile(shard_bytes, num_replicas, chunk_bytes))
        self._left = self.profiled_iterations

    def wants_profile(self, iteration: int) -> bool:
        self._left -= 1
        return self._left >= 0

    def on_routed(self, layer: int, tokens: Sequence[int]) -> None:
        """Loads change nothing."""

    def observe(self, profile: IterationProfile) -> None:
        """Nothing is asked for."""

    def note(self, iteration: int, lost_s: Seconds, cost_s: Seconds) -> None:
        """There is nothing to adapt."""

    def plan(self, iteration: int, link: LinkModel | None) -> Plan:
        return self._plan

    def limit(self, span: int) -> Limit:
        raise AssertionError("a plan without spans has no limits")


def tile(shard_bytes: Bytes, num_replicas: int, chunk_bytes: Bytes) -> tuple[Chunk, ...]:
    """Chunks of a size that tile the shard once for each replica, all of them overflow of no spans."""
    offsets = range(0, shard_bytes, chunk_bytes)
    return tuple(
        Chunk(offset, min(chunk_bytes, shard_bytes - offset), replica=replica)
        for replica in range(num_replicas)
        for offset in offsets
    )
