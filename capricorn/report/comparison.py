"""What a comparison of systems came to: a row for each, computed from the samples of its runs and from nothing else."""

from __future__ import annotations

from typing import TypeAlias

from capricorn.records import Mode
from capricorn.units import Bytes, Seconds
from capricorn.values import Frozen

Interval: TypeAlias = tuple[float, float]


class ComparisonRow(Frozen):
    """One system with its settings; None is not known."""

    label: str
    """As it was asked for: the system, with the settings that are its own."""
    system: str
    iteration_s_p50: Seconds | None
    stall_s_p50: Seconds | None
    slowdown: float | None
    """Time of its iterations / time of the same iterations without checkpoints."""
    slowdown_ci: Interval | None
    speedup_of_capricorn: float | None
    """Time of its iterations / time of the same iterations under capricorn."""
    speedup_ci: Interval | None
    requested: int
    effective: int
    peak_rss_bytes: Bytes | None
    store_bytes: Bytes | None
    sent_bytes_per_iteration: float | None
    tiers: tuple[str, ...] = ()
    """It restores from these."""
    notes: tuple[str, ...] = ()
    """What was chosen for it: a tuned factor, where it writes, whether it fsyncs, what is corrected."""
    runs: tuple[str, ...] = ()


class Comparison(Frozen):
    """Systems that did the same work in one mode."""

    label: str
    """What tells it from others of the same record; may be empty."""
    mode: Mode
    what: str
    """Model, cluster, iterations and repeats in a line."""
    valid: bool
    faults: tuple[str, ...]
    """Why it is not valid, or what is to be known of it."""
    rows: tuple[ComparisonRow, ...]
    runs: tuple[str, ...]
