"""A comparison for a terminal of 60 columns or more, or a pipe. Computes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import ascii_lowercase
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from capricorn.report.columns import COSTS, SYSTEM, TIMES, Column
from capricorn.report.terminal.grid import plain_table
from capricorn.report.text import DIFFERS_NOT, LEGEND, NO_DIFFERENCE

if TYPE_CHECKING:
    from capricorn.compare.comparison import Comparison, ComparisonRow


def comparison_table(comparison: Comparison, *, caption: bool = True) -> RenderableType:
    """Shows how long the iterations take, what they cost, and what is wrong with the comparison."""
    names = _names([row.label for row in comparison.rows])
    times, costs = (_table(columns, comparison.rows, names) for columns in (TIMES, COSTS))
    remarks = [f"{names[row.label]}: {'; '.join(row.notes)}" for row in comparison.rows if row.notes]
    title = f"{comparison.mode}: {comparison.what}"
    heading = f"{comparison.label}, {title}" if comparison.label else title
    below = [*remarks, *comparison.notes, LEGEND] if caption else remarks
    return Group(
        Text(heading, style="bold"),
        times,
        Text(),
        costs,
        *(Text(line, style="dim") for line in below),
        *(Text(fault, style="bold red") for fault in comparison.faults),
    )


def _table(columns: Sequence[Column], rows: Sequence[ComparisonRow], names: Mapping[str, str]) -> Table:
    table = plain_table(SYSTEM.short, *(column.short for column in columns), keeps_names=True)
    for row in rows:
        table.add_row(names[row.label], *(_stacked(column.cell(row)) for column in columns))
    return table


def _names(labels: Sequence[str]) -> dict[str, str]:
    """Returns by label a name short enough for a table: those with settings of their own are lettered."""
    letters = iter(ascii_lowercase)
    systems = {label: label.partition(":")[0] for label in labels}
    return {label: system if label == system else f"{system} {next(letters, '*')}" for label, system in systems.items()}


def _stacked(cell: str) -> str:
    """Returns a ratio as narrow as it can be: what is most worth knowing above."""
    return f"{NO_DIFFERENCE}\n{cell.removesuffix(DIFFERS_NOT)}" if cell.endswith(DIFFERS_NOT) else cell
