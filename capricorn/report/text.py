"""Words of the report: figures, scenarios and comparisons as people read them, wherever they are shown. Computes
nothing and knows no table.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from capricorn.config.scenario import Scenario
from capricorn.units import Bytes, Seconds, format_bytes, format_seconds

if TYPE_CHECKING:
    from capricorn.compare.comparison import Comparison
    from capricorn.compare.paired_ratio import Interval

NONE = "-"
"""Stands for what is not known."""
NO_DIFFERENCE = "no difference"
DIFFERS_NOT = f", {NO_DIFFERENCE}"
"""The end of a ratio whose interval holds 1."""
LEGEND = (
    "Iteration and stall: medians of the slowest rank. Slowdown: time of the iterations that both measured over that "
    "without checkpoints; speedup of Capricorn: the same over that of Capricorn. Intervals hold the ratio with 95 % "
    f"confidence; where one holds 1 there is {NO_DIFFERENCE}. Memory is of all ranks together."
)


# --- figures -----------------------------------------------------------------------------------------------------


def format_figure(value: float | None, spec: str) -> str:
    """Writes a number as the format specification says."""
    return NONE if value is None else format(value, spec)


def format_time(value_s: Seconds | None) -> str:
    """Writes seconds in the unit that suits them."""
    return NONE if value_s is None else format_seconds(value_s)


def format_size(num_bytes: float | None) -> str:
    """Writes bytes in the unit that suits them."""
    return NONE if num_bytes is None else format_bytes(num_bytes)


def format_memory(rss_bytes: Bytes | None, store_bytes: Bytes | None) -> str:
    """Writes the resident memory of the processes and what the stores hold beside it."""
    return " + ".join(format_bytes(part) for part in (rss_bytes, store_bytes) if part is not None) or NONE


def format_percent(frac: float | None) -> str:
    """Writes a share that may be near nothing or near all of it: `99.93%`, `0.07%`."""
    return NONE if frac is None else f"{round(100 * frac, 2):g}%"


def format_percents(fracs: Iterable[float | None]) -> str:
    """Writes shares from the least to the most: `12%`, `12-57.5%`."""
    known = [100 * frac for frac in fracs if frac is not None]
    if not known:
        return NONE
    low, high = (f"{value:.3g}" for value in (min(known), max(known)))
    return f"{low}%" if low == high else f"{low}-{high}%"


def format_params(number: int) -> str:
    """Writes a number of parameters in three figures: `46.7 B`."""
    unit, size = next((u, s) for u, s in (("B", 1e9), ("M", 1e6), ("K", 1e3), ("", 1)) if number >= s)
    return f"{number / size:.3g} {unit}"


def format_ratio(value: float | None, interval: Interval | None) -> str:
    """Writes a ratio with its interval, and where that holds 1 that there is no difference: `1.099 [1.079, 1.136]`."""
    if value is None:
        return NONE
    if interval is None:
        return _short(value)
    low, high = interval
    if low == high == 1:  # of the same runs
        return "1"
    return f"{_short(value)} [{_short(low)}, {_short(high)}]{DIFFERS_NOT if low <= 1 <= high else ''}"


def _short(ratio: float) -> str:
    return f"{ratio:.3f}" if ratio < 10 else f"{ratio:.3g}"


# --- scenarios and comparisons -----------------------------------------------------------------------------------


def describe(scenario: Scenario) -> str:
    """Writes what runs where, in one line."""
    system = scenario.system
    every = {0: "off", 1: "every iteration"}.get(system.every, f"every {system.every} iterations")
    ckpt = "" if system.name == "none" else f" {every}"
    return f"{scenario.model.name} under {system.name}{ckpt}, {scenario.cluster.describe()}"


def title(comparison: Comparison) -> str:
    """Returns what a table or a section is called: by its label, or else by the model, which comes first."""
    return comparison.label or comparison.what.partition(",")[0] or "runs"


def slugs(comparisons: Sequence[Comparison]) -> list[str]:
    """Returns a name for each that tells it from the others in file names and links."""
    names = [re.sub(r"[^a-z0-9]+", "-", f"{title(each)} {each.mode}".lower()).strip("-") for each in comparisons]
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return unique


def caption(comparison: Comparison) -> str:
    """Writes the mode, which no table may leave open, and what ran."""
    return f"Mode: {comparison.mode}. {comparison.what.rstrip('.')}."


def remarks(comparison: Comparison) -> list[str]:
    """Writes why its figures may not be compared, and what is to be known of them; a line each."""
    lines = []
    if not comparison.valid:
        lines.append(f"Not valid: {'; '.join(comparison.faults) or 'its runs did not do the same work'}.")
    elif comparison.faults:
        lines.append(f"Faults: {'; '.join(comparison.faults)}.")
    if comparison.notes:
        lines.append(f"Note: {'; '.join(comparison.notes)}.")
    return lines
