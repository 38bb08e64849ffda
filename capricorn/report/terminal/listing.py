"""Known names and stored copies, as tables for a terminal. Computes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from capricorn.report.terminal.grid import plain_table
from capricorn.report.text import NONE, format_params
from capricorn.units import format_bytes

if TYPE_CHECKING:
    from capricorn.systems.interface import Copy


def names_table(kind: str, details: Mapping[str, Mapping[str, Any]]) -> Table:
    """Shows the known names of one kind, with what there is to say of each."""
    facts: Mapping[str, Any] = next(iter(details.values()), {})
    table = plain_table(kind, *(fact.removesuffix("_bytes") for fact in facts), gap=2, keeps_names=True)
    for name, values in details.items():
        table.add_row(name, *(_fact(fact, value) for fact, value in values.items()))
    return table


def copies_table(copies: Sequence[tuple[str, Copy, bool | None]]) -> Table:
    """Shows the copies in a store: where each lies, and whether its checksums match (None: not complete to check)."""
    table = plain_table("owner", "iteration", "where", "state", "verified", "size", gap=2)
    for where, copy, verified in copies:
        mark = {None: Text(NONE), True: Text("yes", style="green"), False: Text("NO", style="bold red")}[verified]
        table.add_row(str(copy.owner), str(copy.iteration), where, copy.state, mark, format_bytes(copy.num_bytes))
    return table


def _fact(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return format_bytes(value)
    return format_params(value) if name in ("params", "active") else str(value)
