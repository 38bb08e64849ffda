"""What planning made of a run's checkpoint traffic and what it took, computed from samples and from nothing else."""

from __future__ import annotations

from typing import Any, TypeAlias

import pandas as pd

from capricorn.stats.numbers import number, quantile, ratio

Planning: TypeAlias = dict[str, Any]

_FATES = ("hidden", "colliding", "overflow")


def planning(samples: pd.DataFrame) -> Planning:
    """The figures of a run whose measured iterations have these samples, one row for each on each rank.

    Seconds are those of the rank where they are most, bytes are of all ranks. Counts are 0 and what is unknown is None
    where nothing was planned.
    """
    slowest = samples.groupby("iteration")[["collision_s", "overflow_s", "drift", "risk"]].max()
    return {
        **_cost(samples),
        **_traffic(samples),
        **{f"{key}_p50": quantile(slowest[key], 50) for key in ("collision_s", "overflow_s")},
        **{f"{key}_p50": quantile(slowest[key], 50) if _has_planned(samples) else None for key in ("drift", "risk")},
        **_bound(samples),
    }


def _has_planned(samples: pd.DataFrame) -> bool:
    return bool(samples["planned_bytes"].sum() > 0)


def _cost(samples: pd.DataFrame) -> Planning:
    """Of profiling and planning; of the whole time, since few iterations are profiled."""
    each = samples.assign(cost_s=samples["profile_s"] + samples["plan_s"]).groupby("iteration")
    cost_s = each["cost_s"].max()
    return {
        "profiled_frac": ratio(each["profiled"].any().sum(), len(each)),
        "replanned": int(each["replanned"].any().sum()),
        "planning_s_p50": quantile(cost_s, 50),
        "planning_frac": ratio(cost_s.sum(), each["duration_s"].max().sum()),
    }


def _traffic(samples: pd.DataFrame) -> Planning:
    """Bytes an iteration, and of what was sent the parts that were hidden, collided, or were waited for."""
    total = {fate: samples[f"{fate}_bytes"].sum() for fate in ("planned", *_FATES)}
    sent_bytes = sum(total[fate] for fate in _FATES)
    # What was hidden beyond one plan makes up for nothing in another.
    as_planned = samples[["planned_bytes", "hidden_bytes"]].min(axis=1).sum()
    return {
        **{f"{fate}_bytes_per_iteration": ratio(total[fate], samples["iteration"].nunique()) for fate in total},
        **{f"{fate}_frac": ratio(total[fate], sent_bytes) for fate in _FATES},
        "partition_accuracy_frac": ratio(as_planned, total["planned"]),
    }


def _bound(samples: pd.DataFrame) -> Planning:
    """What no schedule can hide: on the rank where it is most, sending less the idle spans, in seconds an iteration.

    Unknown without plans: the rate of the link is then measured beside other traffic.
    """
    known = samples[["idle_s", "link_bytes_per_s"]].astype(float)
    known = known.where(known > 0)
    rank = known.groupby(samples["rank"]).median()
    sent_bytes = samples.groupby("rank")["sent_bytes"].mean()
    beyond_s = number((sent_bytes / rank["link_bytes_per_s"] - rank["idle_s"]).max())
    return {
        "idle_s": quantile(known["idle_s"].groupby(samples["iteration"]).min(), 50),
        "planned_link_bytes_per_s": quantile(known["link_bytes_per_s"], 50),
        "lower_bound_s": max(0.0, beyond_s) if beyond_s is not None and _has_planned(samples) else None,
    }
