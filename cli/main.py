"""The command `capricorn-bench`: its groups, and the only place where an error becomes a line and an exit code."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

import rich_click as click

import capricorn
from capricorn.errors import CapricornError

from .ablate import ablate
from .check_system import check_system
from .clean import clean
from .compare import compare
from .doctor import doctor
from .export import export
from .faults import faults
from .inspect import inspect
from .list import list_names
from .output import PROGRAM
from .run import run

INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(capricorn.__version__, prog_name=PROGRAM)
def app() -> None:
    """Train a mixture of experts, checkpoint it in memory at every iteration, and measure what that costs."""


for _command in (run, compare, faults, export, ablate, list_names, inspect, check_system, doctor, clean):
    app.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits: 0 done, 1 failed, 2 the user's mistake, 130 interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A character that the terminal or a path's encoding lacks is no reason to end a run.
            stream.reconfigure(errors="replace")
    sys.exit(_exit_code(arguments))


def _exit_code(arguments: Sequence[str] | None) -> int:
    try:
        code = app.main(arguments, prog_name=PROGRAM, standalone_mode=False)
    except CapricornError as error:
        return _fail(str(error), error.exit_code)
    except click.UsageError as error:
        return _fail(_describe(error), 2)
    except click.Abort:
        click.echo("interrupted", err=True)
        return INTERRUPTED
    return code or 0


def _fail(message: str, code: int) -> int:
    """Says it in one line: an error, unlike a traceback, is to be read."""
    click.echo("error: " + " ".join(message.split()), err=True)
    return code


def _describe(error: click.UsageError) -> str:
    """The message of click in our form: what is wrong, the nearest name, where to read on."""
    nearest: list[str] | None = getattr(error, "possibilities", None)
    message = error.message if nearest else error.format_message()
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    more = f"; see {error.ctx.command_path} --help" if error.ctx else ""
    return message[:1].lower() + message[1:].rstrip(".") + hint + more
