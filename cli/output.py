"""How the commands print: one console on stdout, JSON, and the help."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import rich_click as click
from rich.console import Console

from capricorn.records.strict_json import as_json

PROGRAM = "capricorn-bench"
HELP = {
    "style_options_panel_box": "BLANK",
    "style_options_panel_padding": 0,
    "style_options_panel_title_style": "bold",
    "style_commands_panel_box": "BLANK",
    "style_commands_panel_padding": 0,
    "style_commands_panel_title_style": "bold",
    "options_table_column_types": ["opt_all_metavar", "help"],
    "append_metavars_help_string": "{}",
}
"""How the help looks: without boxes, in two columns."""


def console() -> Console:
    """Returns a console on the present stdout; plain and 80 wide when that is a pipe."""
    out = Console(highlight=False)
    if not out.width:  # with COLUMNS=0 it would print nothing
        out.width = 80
    return out


def print_json(value: Any) -> None:
    """Prints the value as the one JSON object of a command."""
    click.echo(as_json(value, indent=2))


def teller(*, quiet: bool) -> Callable[[str], None]:
    """Returns what prints a line on stdout; nothing where only a verdict is asked for."""

    def say(line: str) -> None:
        if not quiet:
            console().print(line, soft_wrap=True, markup=False)

    return say
