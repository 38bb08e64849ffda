"""The planner of Gemini: spans averaged over the first iterations, filled to a constant part of their length. Pure.

Source: Gemini, SOSP'23, sections 5.2 and 5.3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from capricorn.config.fields import ByteCount, check
from capricorn.planner.link_model import LinkModel
from capricorn.planner.plan import Chunk, Limit, Plan, tile
from capricorn.planner.profile import IterationProfile
from capricorn.systems.settings import SystemSettings
from capricorn.units import KIB, MIB, Bytes, Seconds

AUTO: Final = "auto"
SWEEP: Final = "sweep"
MIN_PART_BYTES: Final = KIB
EMULATED_BUFFER_BYTES: Final = 4 * 64 * KIB
"""On an emulated cluster: so that its chunks are as large as those of system capricorn there."""
FACTORS: Final = (0.3, 0.5, 0.7, 0.85, 1.0)
"""Safety factors that a sweep tries; the paper does not name the one it used."""
_ROUND: Final = (*FACTORS, *reversed(FACTORS))
"""The factors there and back, so that a machine that gets slower does so for all alike."""
UNPLANNED: Final = 2
"""First checkpoints of a sweep that are sent without a factor: by them the link is measured."""


class GeminiStagedSettings(SystemSettings):
    """How Gemini profiles and partitions. Source: Gemini, SOSP'23, sections 5.2 and 5.3."""

    EMULATED: ClassVar[Mapping[str, Any]] = MappingProxyType({"buffer_bytes": EMULATED_BUFFER_BYTES})

    mu: Literal["auto", "sweep"] | float = Field(
        default=AUTO,
        description="Fill this part of a span; auto tries several on the scenario first, sweep is that try",
    )
    tuned_in: str = Field(default="", description="Run in which mu was found")
    sweep_rounds: int = Field(default=2, gt=0, description="Times that a sweep tries each factor, there and back")
    profile_iterations: int = Field(
        default=20, gt=0, description="First iterations, which are profiled and not checkpointed"
    )
    buffer_bytes: ByteCount = Field(
        default=128 * MIB, ge=1024, description="Bytes of all sub-buffers together (R of the paper)"
    )
    num_buffers: int = Field(default=4, ge=2, description="Sub-buffers that a chunk passes through (p of the paper)")

    @model_validator(mode="after")
    def _check(self) -> Self:
        part_bytes = self.buffer_bytes // self.num_buffers
        check(
            part_bytes >= MIN_PART_BYTES,
            f"system.options.buffer_bytes = {self.buffer_bytes} leaves {part_bytes} bytes to each of "
            f"{self.num_buffers} sub-buffers; use {MIN_PART_BYTES * self.num_buffers} or more, or a smaller "
            "system.options.num_buffers",
        )
        is_named = isinstance(self.mu, str)
        check(is_named or 0 < float(self.mu) <= 1, f"system.options.mu = {self.mu}: a safety factor lies in (0, 1]")
        return self


class GeminiSettings(GeminiStagedSettings):
    """The same where peers are sent the live state, through the sub-buffers."""

    def buffer_bytes_of(self, shard_bytes: Bytes) -> Bytes:
        return min(self.buffer_bytes, self.num_buffers * shard_bytes)


def num_swept(config: GeminiStagedSettings) -> int:
    """Returns the number of plans that a sweep makes."""
    return config.sweep_rounds * len(_ROUND)


def swept_factor(number: int) -> float:
    """Returns the factor of a sweep's plan `number`, from 0."""
    return _ROUND[number % len(_ROUND)]


def partition(
    spans_s: Sequence[Seconds],
    link: LinkModel,
    shard_bytes: Bytes,
    num_remote: int,
    *,
    buffer_bytes: Bytes,
    num_buffers: int,
    mu: float,
) -> Plan:
    """Returns the chunks that fill the spans, in order, to `mu` of their length; copies follow each other.

    Chunks that do not fit go into the last span, which is taken to have no end, and delay the update.

    Args:
        spans_s: length of each idle span, in the order of the iteration.
        link: to the holders.
        shard_bytes: of one copy.
        num_remote: number of copies.
        buffer_bytes: size of all sub-buffers together.
        num_buffers: number of sub-buffers; a chunk fits one of them.
        mu: safety factor in (0, 1].

    Source: Gemini, SOSP'23, Algorithm 2. Departs: leaves a span too short for any byte, where the printed loop does not
    end; a span gets shorter by what was just put in it, not by what is left to send; ends after m - 1 remote copies,
    where the printed test would emit m.
    """
    part_bytes = max(1, buffer_bytes // num_buffers)
    chunks: list[Chunk] = []
    copy, left_bytes = (0, shard_bytes) if shard_bytes else (num_remote, 0)
    lengths_s = [*spans_s[:-1], math.inf]
    for index, length_s in enumerate(lengths_s):
        span_s = mu * length_s
        while span_s > 0 and copy < num_remote:
            fits = span_s >= link.transfer_s(part_bytes)
            size = min(left_bytes, part_bytes if fits else link.capacity_bytes(span_s))
            if size <= 0:
                break
            chunks.append(Chunk(shard_bytes - left_bytes, size, index, copy))
            left_bytes -= size
            span_s -= link.transfer_s(size)
            if not left_bytes:
                copy, left_bytes = copy + 1, shard_bytes
    return Plan(tuple(chunks), _limits(chunks, spans_s))


def _limits(chunks: Sequence[Chunk], spans_s: Sequence[Seconds]) -> tuple[Limit, ...]:
    planned = [0] * max(1, len(spans_s))
    for chunk in chunks:
        planned[chunk.span] += chunk.num_bytes
    return tuple(Limit(span_s, num_bytes) for span_s, num_bytes in zip(spans_s, planned, strict=False))


class GeminiPlanner:
    """Profiles the first iterations, and takes the spans to stay as they were; implements `Planner`.

    Chunks follow the rate of the link, which is measured on line.

    Source: Gemini, SOSP'23, section 5.2. Departs: started anew after a failure, it profiles again while checkpoints are
    sent as soon as they can be, since the paper does not say that a profile survives.
    """

    drift, replanned = 0.0, False

    def __init__(self, config: GeminiStagedSettings, *, rank: int, num_remote: int, shard_bytes: Bytes) -> None:
        """Makes a planner without a profile.

        Args:
            config: how it profiles and partitions.
            rank: whose spans are filled.
            num_remote: number of remote replicas.
            shard_bytes: of one replica.
        """
        self._config, self._rank, self._num_remote, self._shard_bytes = config, rank, num_remote, shard_bytes
        self._left = config.profile_iterations
        self._observed: list[tuple[Seconds, ...]] = []
        self._spans_s: list[Seconds] | None = None
        """The spans, once the profile is complete."""
        self._num_planned = 0
        self._plan = Plan(())

    def wants_profile(self, iteration: int) -> bool:
        self._left -= 1
        return self._left >= 0

    def on_routed(self, layer: int, tokens: Sequence[int]) -> None:
        """Does nothing: spans are taken to be equal in all iterations, whatever the loads."""

    def observe(self, profile: IterationProfile) -> None:
        self._observed.append(profile.own_span_s(self._rank))
        if len(self._observed) == self._config.profile_iterations:
            self._spans_s = [fmean(lengths_s) for lengths_s in zip(*self._observed, strict=True)]

    def note(self, iteration: int, lost_s: Seconds, cost_s: Seconds) -> None:
        """Does nothing: there is nothing to adapt."""

    def plan(self, iteration: int, link: LinkModel | None) -> Plan:
        config, mu = self._config, self._mu()
        self.replanned = False
        if link is None or mu is None or self._spans_s is None:
            self._plan = Plan(tile(self._shard_bytes, self._num_remote, config.buffer_bytes // config.num_buffers))
            return self._plan
        self.replanned = not self._plan.limits
        self._plan = partition(
            self._spans_s,
            link,
            self._shard_bytes,
            self._num_remote,
            buffer_bytes=config.buffer_bytes,
            num_buffers=config.num_buffers,
            mu=mu,
        )
        return self._plan

    def limit(self, span: int) -> Limit:
        return self._plan.limits[span]

    def _mu(self) -> float | None:
        """Returns the factor of the next plan; None for the first plans of a sweep, which measure the link."""
        number, self._num_planned = self._num_planned - UNPLANNED, self._num_planned + 1
        if self._config.mu == SWEEP:
            return swept_factor(number) if number >= 0 else None
        return float(self._config.mu)
