"""Where the commands print: one console on stdout, and JSON."""

from __future__ import annotations

import json
from typing import Any

import rich_click as click
from rich.console import Console

PROGRAM = "capricorn-bench"


def console() -> Console:
    """A console on the present stdout; plain and 80 wide when that is a pipe."""
    return Console(highlight=False)


def print_json(value: Any) -> None:
    """Prints the value as the one JSON object of a command."""
    click.echo(json.dumps(value, indent=2))
