"""The columns of a comparison's table for people, in a terminal as in a document. Knows no format and no file."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from capricorn.report.text import NONE, format_memory, format_ratio, format_size, format_time

if TYPE_CHECKING:
    from capricorn.compare.comparison import Comparison, ComparisonRow


class Column(NamedTuple):
    """A column of a table for people."""

    head: str
    """Its head in a document, on one or two lines."""
    short: str
    """Its head in a terminal, where a legend stands below."""
    cell: Callable[[ComparisonRow], str]
    is_figure: bool = True
    """Whether it holds figures, which are aligned to the right."""


SYSTEM = Column("system", "", lambda row: row.label, is_figure=False)
TIMES = (
    Column("iteration\n(p50)", "iteration", lambda row: format_time(row.iteration_s_p50)),
    Column("stall\n(p50)", "stall", lambda row: format_time(row.stall_s_p50)),
    Column("slowdown\n[95 %]", "slowdown", lambda row: format_ratio(row.slowdown, row.slowdown_ci)),
    Column(
        "speedup of\nCapricorn [95 %]",
        "speedup of Capricorn",
        lambda row: format_ratio(row.speedup_of_capricorn, row.speedup_ci),
    ),
)
COSTS = (
    Column(
        "effective /\nrequested",
        "effective",
        lambda row: f"{row.effective}/{row.requested}" if row.requested else NONE,
    ),
    Column("sent /\niteration", "sent per iteration", lambda row: format_size(row.sent_bytes_per_iteration)),
    Column(
        "memory\n(RSS + store)",
        "memory + store",
        lambda row: format_memory(row.peak_rss_bytes, row.store_bytes),
    ),
    Column("restores\nfrom", "restores from", lambda row: ", ".join(row.tiers) or NONE, is_figure=False),
)
COLUMNS = (SYSTEM, *TIMES, *COSTS)
NOTES = Column("notes", "", lambda row: "; ".join(row.notes) or NONE, is_figure=False)


def columns_of(comparison: Comparison) -> tuple[Column, ...]:
    """Returns all columns, with the notes only if there are some."""
    return (*COLUMNS, NOTES) if any(row.notes for row in comparison.rows) else COLUMNS
