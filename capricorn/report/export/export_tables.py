"""Comparisons as the tables that are exported: raw values for machines, cells and captions for people. Knows no format,
no file and no figure.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from capricorn.compare.comparison import Comparison, ComparisonRow, Interval
from capricorn.report.text import (
    format_effective,
    format_memory,
    format_notes,
    format_ratio,
    format_size,
    format_tiers,
    format_time,
)

Raw: TypeAlias = Callable[[Comparison, ComparisonRow], Any]


def slugs(comparisons: Sequence[Comparison]) -> list[str]:
    """A name for each that tells it from the others in file names and links."""
    names = [re.sub(r"[^a-z0-9]+", "-", f"{title(each)} {each.mode}".lower()).strip("-") for each in comparisons]
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return unique


# --- for machines ------------------------------------------------------------------------------------------------


def _edge(interval: Interval | None, side: int) -> float | None:
    return None if interval is None else interval[side]


RAW_COLUMNS: dict[str, Raw] = {
    "comparison": lambda comparison, row: title(comparison),
    "mode": lambda comparison, row: comparison.mode,
    "what": lambda comparison, row: comparison.what,
    "valid": lambda comparison, row: comparison.valid,
    "label": lambda comparison, row: row.label,
    "system": lambda comparison, row: row.system,
    "iteration_s_p50": lambda comparison, row: row.iteration_s_p50,
    "stall_s_p50": lambda comparison, row: row.stall_s_p50,
    "slowdown": lambda comparison, row: row.slowdown,
    "slowdown_ci_low": lambda comparison, row: _edge(row.slowdown_ci, 0),
    "slowdown_ci_high": lambda comparison, row: _edge(row.slowdown_ci, 1),
    "speedup_of_capricorn": lambda comparison, row: row.speedup_of_capricorn,
    "speedup_ci_low": lambda comparison, row: _edge(row.speedup_ci, 0),
    "speedup_ci_high": lambda comparison, row: _edge(row.speedup_ci, 1),
    "requested": lambda comparison, row: row.requested,
    "effective": lambda comparison, row: row.effective,
    "sent_bytes_per_iteration": lambda comparison, row: row.sent_bytes_per_iteration,
    "peak_rss_bytes": lambda comparison, row: row.peak_rss_bytes,
    "store_bytes": lambda comparison, row: row.store_bytes,
    "tiers": lambda comparison, row: " ".join(row.tiers),
    "notes": lambda comparison, row: "; ".join((*row.notes, *comparison.notes)),
    "faults": lambda comparison, row: "; ".join(comparison.faults),
    "runs": lambda comparison, row: " ".join(row.runs),
}


def raw_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """One flat row for each system, in full precision; None is not known, lists are joined."""
    return [{name: raw(comparison, row) for name, raw in RAW_COLUMNS.items()} for row in comparison.rows]


# --- for people --------------------------------------------------------------------------------------------------


class Column(NamedTuple):
    """A column of a table for people."""

    head: str
    """Of one or two lines."""
    cell: Callable[[ComparisonRow], str]
    is_figure: bool = True
    """Whether it holds figures, which are aligned to the right."""


COLUMNS: tuple[Column, ...] = (
    Column("system", lambda row: row.label, is_figure=False),
    Column("iteration\n(p50)", lambda row: format_time(row.iteration_s_p50)),
    Column("stall\n(p50)", lambda row: format_time(row.stall_s_p50)),
    Column("slowdown\n[95 %]", lambda row: format_ratio(row.slowdown, row.slowdown_ci)),
    Column("speedup of\nCapricorn [95 %]", lambda row: format_ratio(row.speedup_of_capricorn, row.speedup_ci)),
    Column("effective /\nrequested", format_effective),
    Column("sent /\niteration", lambda row: format_size(row.sent_bytes_per_iteration)),
    Column("memory\n(RSS + store)", lambda row: format_memory(row.peak_rss_bytes, row.store_bytes)),
    Column("restores\nfrom", format_tiers, is_figure=False),
)
NOTES = Column("notes", format_notes, is_figure=False)


def columns_of(comparison: Comparison) -> tuple[Column, ...]:
    """All columns, with the notes only if there are some."""
    return (*COLUMNS, NOTES) if any(row.notes for row in comparison.rows) else COLUMNS


def title(comparison: Comparison) -> str:
    """What a table or a section is called: by its label, or else by the model, which comes first in what ran."""
    return comparison.label or comparison.what.partition(",")[0] or "runs"


def caption(comparison: Comparison) -> str:
    """The mode, which no table may leave open, and what ran."""
    return f"Mode: {comparison.mode}. {comparison.what.rstrip('.')}."


def remarks(comparison: Comparison) -> list[str]:
    """Why its figures may not be compared, and what is to be known of them; a line each."""
    lines = []
    if not comparison.valid:
        lines.append(f"Not valid: {'; '.join(comparison.faults) or 'its runs did not do the same work'}.")
    elif comparison.faults:
        lines.append(f"Faults: {'; '.join(comparison.faults)}.")
    if comparison.notes:
        lines.append(f"Note: {'; '.join(comparison.notes)}.")
    return lines
