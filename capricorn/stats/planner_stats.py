"""Figures of planning: its share of a run's checkpoint traffic and what it took, computed from samples alone."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, TypeAlias

from capricorn.records.samples import IterationSample
from capricorn.stats.numbers import quantile, ratio, total
from capricorn.stats.run_samples import grouped
from capricorn.units import Seconds

Planning: TypeAlias = dict[str, Any]

_FATES = ("hidden", "colliding", "overflow")


def planning(samples: Sequence[IterationSample]) -> Planning:
    """Returns the figures of a run whose measured iterations have these samples, one of each iteration and rank.

    Seconds are those of the rank where they are most, bytes are of all ranks. Counts are 0 and what is unknown is None
    where nothing was planned.
    """
    iterations = grouped(samples, "iteration")
    has_planned = any(sample.planned_bytes > 0 for sample in samples)
    p50 = {
        key: quantile((max(getattr(sample, key) for sample in each) for each in iterations), 50)
        for key in ("collision_s", "overflow_s", "drift", "risk")
    }
    return {
        **_cost(iterations),
        **_traffic(samples, len(iterations)),
        **{f"{key}_p50": p50[key] for key in ("collision_s", "overflow_s")},
        **{f"{key}_p50": p50[key] if has_planned else None for key in ("drift", "risk")},
        **_bound(samples, iterations, has_planned),
    }


def _cost(iterations: Sequence[Sequence[IterationSample]]) -> Planning:
    """Returns what profiling and planning took; of the whole time, since few iterations are profiled."""
    costs_s = [max(sample.profile_s + sample.plan_s for sample in each) for each in iterations]
    durations_s = [max(sample.duration_s for sample in each) for each in iterations]
    return {
        "profiled_frac": ratio(sum(any(sample.profiled for sample in each) for each in iterations), len(iterations)),
        "replanned": sum(any(sample.replanned for sample in each) for each in iterations),
        "planning_s_p50": quantile(costs_s, 50),
        "planning_frac": ratio(total(costs_s), total(durations_s)),
    }


def _traffic(samples: Sequence[IterationSample], num_iterations: int) -> Planning:
    """Returns the bytes of an iteration, and of what was sent the parts that were hidden, collided, or waited for."""
    bytes_of = {fate: sum(getattr(sample, f"{fate}_bytes") for sample in samples) for fate in ("planned", *_FATES)}
    sent_bytes = sum(bytes_of[fate] for fate in _FATES)
    # What was hidden beyond one plan makes up for nothing in another.
    as_planned = sum(min(sample.planned_bytes, sample.hidden_bytes) for sample in samples)
    return {
        **{f"{fate}_bytes_per_iteration": ratio(bytes_of[fate], num_iterations) for fate in bytes_of},
        **{f"{fate}_frac": ratio(bytes_of[fate], sent_bytes) for fate in _FATES},
        "partition_accuracy_frac": ratio(as_planned, bytes_of["planned"]),
    }


def _bound(
    samples: Sequence[IterationSample], iterations: Sequence[Sequence[IterationSample]], has_planned: bool
) -> Planning:
    """Returns what no schedule can hide: on the rank where it is most, sending less the idle spans, an iteration.

    Unknown without plans: the rate of the link is then measured beside other traffic.
    """
    beyond_s = [beyond for each in grouped(samples, "rank") if (beyond := _beyond_s(each)) is not None]
    least_idle_s = [min(known) for each in iterations if (known := _known(each, "idle_s"))]
    return {
        "idle_s": quantile(least_idle_s, 50),
        "planned_link_bytes_per_s": quantile(_known(samples, "link_bytes_per_s"), 50),
        "lower_bound_s": max(0.0, *beyond_s) if beyond_s and has_planned else None,
    }


def _beyond_s(samples: Sequence[IterationSample]) -> Seconds | None:
    """Returns by how much sending on one rank takes longer than its idle spans; None if either was never measured."""
    idle_s, rates = _known(samples, "idle_s"), _known(samples, "link_bytes_per_s")
    if not idle_s or not rates:
        return None
    sent_bytes = sum(sample.sent_bytes for sample in samples) / len(samples)
    return sent_bytes / median(rates) - median(idle_s)


def _known(samples: Sequence[IterationSample], key: str) -> list[float]:
    """Returns the values that were measured, of a field in which 0 is never."""
    return [value for sample in samples if (value := getattr(sample, key)) > 0]
