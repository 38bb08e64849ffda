"""A replay of each planning policy: its planner, over the same training and the same link."""

from __future__ import annotations

from capricorn.config.planner import PlannerConfig
from capricorn.planner.span_planner import SpanPlanner
from capricorn.simulate.reference import blocking, gemini, lower_bound
from capricorn.simulate.replay import ReplayOutcome, replay
from capricorn.simulate.training_model import SimulatedTraining, TraceConfig
from capricorn.units import Bytes

RANK, HOLDER = 0, 1
"""Any two will do: all ranks have the same spans."""


def shard_bytes(planner: PlannerConfig, trace: TraceConfig) -> Bytes:
    """Returns what a checkpoint sends; only its ratio to the size of a chunk matters."""
    return trace.num_chunks * planner.max_chunk_bytes


def replay_policy(planner: PlannerConfig, training: SimulatedTraining, trace: TraceConfig) -> ReplayOutcome:
    """Returns what the policy comes to."""
    num_bytes = shard_bytes(planner, trace)
    return replay(
        SpanPlanner(planner, rank=RANK, holders=(HOLDER,), shard_bytes=num_bytes),
        training,
        training.link(num_bytes, trace.rho),
        gate=planner.gate,
        profile_cost_frac=trace.profile_cost_frac,
        oracle=planner.replan == "oracle",
    )


def references(planner: PlannerConfig, training: SimulatedTraining, trace: TraceConfig) -> dict[str, float]:
    """Returns the slowdowns that policies are to be compared with, by name."""
    num_bytes = shard_bytes(planner, trace)
    link = training.link(num_bytes, trace.rho)
    return {
        "blocking": blocking(training, link, num_bytes),
        "gemini": gemini(training, link, num_bytes),
        "lower bound": lower_bound(training, link, num_bytes),
    }
