"""What a planner decides: which bytes of the shard go out, and in which order. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from capricorn.units import Bytes


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes [offset, offset + num_bytes) of a shard, sent in one go."""

    offset: Bytes
    num_bytes: Bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """The chunks of one checkpoint in sending order; they tile the shard once."""

    chunks: tuple[Chunk, ...]


class Planner(Protocol):
    """Decides how the checkpoint of an iteration is sent."""

    def plan(self, iteration: int) -> Plan: ...


class StreamPlanner:
    """Every block goes out as soon as it is staged, in the order of the shard.

    Not harmful where the network has a low class, which does the scheduling; it takes no account of idle spans.
    """

    def __init__(self, shard_bytes: Bytes, chunk_bytes: Bytes) -> None:
        offsets = range(0, shard_bytes, chunk_bytes)
        self._plan = Plan(tuple(Chunk(offset, min(chunk_bytes, shard_bytes - offset)) for offset in offsets))

    def plan(self, iteration: int) -> Plan:
        return self._plan
