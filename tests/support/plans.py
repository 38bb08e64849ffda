"""What the tests of planners ask of a plan and of an estimate."""

from __future__ import annotations

from capricorn.planner.estimate import SpanEstimate, deviations_at
from capricorn.planner.plan import Plan
from capricorn.units import Bytes, Seconds


def overflow_bytes(plan: Plan) -> Bytes:
    """Returns the bytes that do not fit the idle spans."""
    return sum(chunk.num_bytes for chunk in plan.chunks) - plan.planned_bytes


def quantile_s(span: SpanEstimate, risk: float) -> Seconds:
    """Returns the duration that the span falls short of with probability `risk`."""
    return span.at_s(deviations_at(risk))
