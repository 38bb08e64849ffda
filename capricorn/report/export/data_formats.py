"""Exported comparisons as CSV and JSON, for machines: raw values in full precision. Writes no file."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from typing import Any

from capricorn.compare.comparison import Comparison, ComparisonRow
from capricorn.compare.paired_ratio import Interval
from capricorn.errors import ConfigError
from capricorn.records import strict_json
from capricorn.report.text import title


def _edge(interval: Interval | None, side: int) -> float | None:
    return None if interval is None else interval[side]


RAW_COLUMNS: dict[str, Callable[[Comparison, ComparisonRow], Any]] = {
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
    """Returns one flat row for each system, in full precision; None is not known, lists are joined."""
    return [{name: raw(comparison, row) for name, raw in RAW_COLUMNS.items()} for row in comparison.rows]


def as_csv(comparisons: Sequence[Comparison]) -> str:
    """Returns one row for each system of each comparison, in full precision; an empty field is not known.

    Raises:
        ConfigError: they are of several modes.
    """
    modes = sorted({comparison.mode for comparison in comparisons})
    if len(modes) > 1:
        raise ConfigError(
            f"CSV is one table, and {' and '.join(modes)} figures never share one: export them one by one, or as json"
        )
    text = io.StringIO()
    writer = csv.DictWriter(text, list(RAW_COLUMNS), lineterminator="\n")
    writer.writeheader()
    for comparison in comparisons:
        writer.writerows(raw_rows(comparison))
    return text.getvalue()


def as_json(comparisons: Sequence[Comparison]) -> str:
    """Returns one object: `{"comparisons": [...]}`, each as `Comparison` has it."""
    whole: dict[str, Any] = {"comparisons": [comparison.model_dump(mode="json") for comparison in comparisons]}
    return strict_json.as_json(whole, indent=2) + "\n"
