"""A replay of each planning policy: its planner, over the same training and the same link."""

from __future__ import annotations

from capricorn.planner.planning import SpanPlanner
from capricorn.replay.model import TraceConfig, Training
from capricorn.replay.reference import blocking, gemini, lower_bound
from capricorn.replay.run import Outcome, replay
from capricorn.schedule import PlannerConfig
from capricorn.units import Bytes

RANK, HOST = 0, 1
"""Any two will do: all ranks have the same spans."""


def shard_bytes(planner: PlannerConfig, trace: TraceConfig) -> Bytes:
    """What a checkpoint sends; only its ratio to the size of a chunk matters."""
    return trace.num_chunks * planner.max_chunk_bytes


def replay_policy(planner: PlannerConfig, training: Training, trace: TraceConfig) -> Outcome:
    """What that policy comes to."""
    num_bytes = shard_bytes(planner, trace)
    return replay(
        SpanPlanner(planner, rank=RANK, hosts=(HOST,), shard_bytes=num_bytes),
        training,
        training.link(num_bytes, trace.rho),
        gate=planner.gate,
        profile_cost_frac=trace.profile_cost_frac,
        oracle=planner.replan == "oracle",
    )


def references(planner: PlannerConfig, training: Training, trace: TraceConfig) -> dict[str, float]:
    """The slowdowns that policies are to be compared with, by name."""
    num_bytes = shard_bytes(planner, trace)
    link = training.link(num_bytes, trace.rho)
    return {
        "blocking": blocking(training, link, num_bytes),
        "gemini": gemini(training, link, num_bytes),
        "lower bound": lower_bound(training, link, num_bytes),
    }
