"""The slowdowns that policies are compared with in a replay: the bound that none can pass, blocking, and Gemini.

Shapes: I iterations, S idle spans, G factors.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from capricorn.planner.link_model import LinkModel
from capricorn.simulate.training_model import Floats, SimulatedTraining
from capricorn.units import Bytes

PROFILED: Final = 20
"""Iterations that Gemini profiles. Source: Gemini, SOSP'23, online profiling."""
FACTORS: Final = tuple(np.linspace(0.05, 1.0, 20))
"""Values of the safety factor mu that are tried, since the paper does not give it."""


def blocking(training: SimulatedTraining, link: LinkModel, shard_bytes: Bytes) -> float:
    """Returns the slowdown if every iteration waits for its checkpoint."""
    return _slowdown(training, np.full(len(training.base_s), shard_bytes / link.bytes_per_s))


def lower_bound(training: SimulatedTraining, link: LinkModel, shard_bytes: Bytes) -> float:
    """Returns the slowdown if each iteration's idle time is used to the last byte."""
    return _slowdown(training, np.maximum(0, shard_bytes / link.bytes_per_s - training.idle_s))


def gemini(training: SimulatedTraining, link: LinkModel, shard_bytes: Bytes) -> float:
    """Returns the slowdown of Gemini's partition, with the factor that suits this training best.

    Source: Gemini, SOSP'23, Algorithm 2: each span is filled, in order, to mu times its mean over the first iterations.
    Departs: its chunks follow each other without a latency between them.
    """
    mean_S = training.spans_s[:PROFILED].mean(0)
    return min(_slowdown(training, _lost(training, link, shard_bytes, mu * mean_S)) for mu in FACTORS)


def _lost(training: SimulatedTraining, link: LinkModel, shard_bytes: Bytes, expected_S: Floats) -> Floats:
    """Returns by how much each iteration [I] gets longer if its spans are filled to lengths that may not be theirs."""
    room_S = np.maximum(0, expected_S - link.latency_s) * link.bytes_per_s
    sent_S = np.diff(np.minimum(np.cumsum(room_S), shard_bytes), prepend=0.0)
    busy_S = np.where(sent_S > 0, link.latency_s + sent_S / link.bytes_per_s, 0.0)
    rest = shard_bytes - sent_S.sum()
    overflow_s = link.transfer_s(rest) if rest > 0 else 0.0
    lost_I: Floats = np.maximum(0, busy_S - training.spans_s).sum(1) + overflow_s
    return lost_I


def _slowdown(training: SimulatedTraining, lost_I: Floats) -> float:
    return float(1 + lost_I.sum() / training.base_s.sum())
