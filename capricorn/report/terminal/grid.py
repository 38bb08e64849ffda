"""The bare tables that all terminal tables are made from: no lines, columns that fold."""

from __future__ import annotations

from rich.table import Table


def plain_table(*columns: str, gap: int = 1, keeps_names: bool = False) -> Table:
    """Returns a table with these heads; with `keeps_names` all columns but the first, which names the rows, fold."""
    table = Table(box=None, padding=(0, gap, 0, 0), header_style="dim")
    for number, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=keeps_names and number == 0)
    return table


def pairs() -> Table:
    """Returns a table of labels and what they stand for."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table
