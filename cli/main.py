"""The command `capricorn-bench`: its groups, and the only place where an error becomes a line and an exit code."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module

import rich_click as click

import capricorn
from capricorn.errors import CapricornError
from capricorn.files import failure, path_and_cause

from .output import HELP, PROGRAM
from .streams import end_streams, hush_libraries, own_streams

INTERRUPTED = 130
COMMANDS: Mapping[str, tuple[str, str]] = {
    "run": (".run:run", "Train one model under one system, and record what happens"),
    "compare": (".compare:compare", "Compare systems on the same work, or finished runs"),
    "faults": (".faults:faults", "Inject failures into systems, and judge what they make of them"),
    "export": (".export:export", "Turn finished runs into tables, figures and traces"),
    "ablate": (".ablate:ablate", "Compare planning policies"),
    "list": (".list:list_names", "List models, systems, clusters, faults or settings"),
    "inspect": (".inspect:inspect", "Show what a run, a store or a checkpoint holds"),
    "check-system": (".check_system:check_system", "Try the rules that every checkpointing system must keep on one"),
    "doctor": (".doctor:doctor", "Check whether a scenario can run on this machine"),
    "clean": (".clean:clean", "Remove what dead runs left in memory"),
}
"""By name: where a command is, and what it does, in a few words."""


class Suite(click.RichGroup):
    """The commands in the order of `COMMANDS`, each imported only when it is called: their list is there at once."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:  # fmt: skip
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and load_command(command.name or ""), rest


def load_command(name: str) -> click.Command:
    """Imports the command of that name."""
    module, _, attribute = COMMANDS[name][0].partition(":")
    command: click.Command = getattr(import_module(module, __package__), attribute)
    return command


@click.group(cls=Suite, context_settings={"help_option_names": ["-h", "--help"], "rich_help_config": HELP})
@click.version_option(capricorn.__version__, prog_name=PROGRAM)
def app() -> None:
    """Train a mixture of experts, checkpoint it in memory at every iteration, and measure what that costs."""


for _name, (_, _help) in COMMANDS.items():
    app.add_command(click.RichCommand(name=_name, help=_help))


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits: 0 done, 1 failed, 2 the user's mistake, 130 interrupted."""
    own_streams()
    hush_libraries()
    try:
        code = _exit_code(arguments)
    finally:
        end_streams()
    sys.exit(code)


def _exit_code(arguments: Sequence[str] | None) -> int:
    try:
        code = app.main(arguments, prog_name=PROGRAM, standalone_mode=False)
        sys.stdout.flush()  # what is printed and cannot be written is not done
    except CapricornError as error:
        return _fail(str(error), error.exit_code)
    except BrokenPipeError:  # who read it has gone, and need not be told
        return 1
    except OSError as error:  # nobody has named what it was about
        return _fail(path_and_cause(error), failure("go on", error).exit_code)
    except click.UsageError as error:
        return _fail(_describe(error), 2)
    except click.Abort:
        _say("interrupted")
        return INTERRUPTED
    return code or 0


def _fail(message: str, code: int) -> int:
    """Says it in one line: an error, unlike a traceback, is to be read."""
    _say("error: " + " ".join(message.split()))
    return code


def _say(line: str) -> None:
    with contextlib.suppress(OSError, CapricornError):  # the exit code stays, where stderr is full
        click.echo(line, err=True)


def _describe(error: click.UsageError) -> str:
    """Returns the message of click in our form: what is wrong, the nearest name, where to read on."""
    nearest: list[str] | None = getattr(error, "possibilities", None)
    message = error.message if nearest else error.format_message()
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    more = f"; see {error.ctx.command_path} --help" if error.ctx else ""
    return message[:1].lower() + message[1:].rstrip(".") + hint + more
