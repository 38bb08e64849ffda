"""What people see of a comparison, in 80 columns, 60 columns or a pipe. Computes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import ascii_lowercase
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from capricorn.report.text import (
    LEGEND,
    format_effective,
    format_memory,
    format_size,
    format_tiers,
    format_time,
    ratio_parts,
)
from capricorn.sizing.memory import Needs
from capricorn.units import format_bytes

if TYPE_CHECKING:
    from capricorn.compare.comparison import Comparison, ComparisonRow, Interval

TIMES = ("", "iteration", "stall", "slowdown", "speedup of Capricorn")
COSTS = ("", "effective", "sent per iteration", "memory + store", "restores from")


def comparison_table(comparison: Comparison, *, caption: bool = True) -> RenderableType:
    """How long a system's iterations take, what they cost, and what is wrong with the comparison."""
    names = _names([row.label for row in comparison.rows])
    times, costs = _table(*TIMES), _table(*COSTS)
    for row in comparison.rows:
        times.add_row(names[row.label], *_times(row))
        costs.add_row(names[row.label], *_costs(row))
    remarks = [f"{names[row.label]}: {'; '.join(row.notes)}" for row in comparison.rows if row.notes]
    title = f"{comparison.mode}: {comparison.what}"
    heading = f"{comparison.label}, {title}" if comparison.label else title
    below = [*remarks, *comparison.notes, LEGEND] if caption else []
    return Group(
        Text(heading, style="bold"),
        times,
        Text(),
        costs,
        *(Text(line, style="dim") for line in below),
        *(Text(fault, style="bold red") for fault in comparison.faults),
    )


def variants_table(needs: Mapping[str, Needs]) -> RenderableType:
    """What each variant takes of this machine."""
    table = _table("", "state of a rank", "processes", "store (tmpfs)", "host memory")
    for label, each in needs.items():
        sizes = (each.shard_bytes, each.process_bytes, each.store_bytes, each.host_bytes)
        table.add_row(label, *map(format_bytes, sizes))
    return table


def _names(labels: Sequence[str]) -> dict[str, str]:
    """By label what is short enough for a table: those with settings of their own are lettered, and noted below it."""
    letters = iter(ascii_lowercase)
    systems = {label: label.partition(":")[0] for label in labels}
    return {label: system if label == system else f"{system} {next(letters, '*')}" for label, system in systems.items()}


def _times(row: ComparisonRow) -> tuple[str, ...]:
    return (
        format_time(row.iteration_s_p50),
        format_time(row.stall_s_p50),
        _stacked(row.slowdown, row.slowdown_ci),
        _stacked(row.speedup_of_capricorn, row.speedup_ci),
    )


def _costs(row: ComparisonRow) -> tuple[str, ...]:
    memory = format_memory(row.peak_rss_bytes, row.store_bytes)
    return format_effective(row), format_size(row.sent_bytes_per_iteration), memory, format_tiers(row)


def _stacked(value: float | None, interval: Interval | None) -> str:
    """A ratio as narrow as it can be: what is most worth knowing above."""
    return "\n".join(reversed(ratio_parts(value, interval)))


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for number, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=number == 0)
    return table
