"""`capricorn-bench check-system`: the rules that every checkpointing system must keep, tried on one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING

import rich_click as click
from rich.text import Text

from capricorn.config.fields import MAX_TIMEOUT_S, MIN_TIMEOUT_S
from capricorn.conformance.subject import SystemUnderTest, under_test
from capricorn.errors import ConfigError
from capricorn.launch.interrupts import Interrupts
from capricorn.runtime.comm.addresses import why_no_loopback
from capricorn.systems.settings import OPTIONS

from .options import json_option
from .output import console, print_json
from .values import KINDS_OF_VALUE, FiniteRange

if TYPE_CHECKING:
    from capricorn.conformance.rules import Rule, RuleResult

COLOURS = {"PASS": "green", "FAIL": "bold red", "not applicable": "dim"}
TIMEOUT_S = 5.0


@click.command(name="check-system")
@click.argument("name", type=KINDS_OF_VALUE["SYSTEM"])
@click.option("--rules", default="", metavar="A,B", help="Try only these rules (default: all of them)")
@click.option(
    "--without", default="", metavar="A,B", help="Leave out tensors of the toy job that it cannot keep, as float8"
)
@click.option(
    "--timeout",
    "timeout_s",
    type=FiniteRange(MIN_TIMEOUT_S, MAX_TIMEOUT_S),
    default=TIMEOUT_S,
    show_default=True,
    metavar="SECONDS",
    help="Wait at most so long for a peer: system.timeout_s of the toy job",
)
@click.option("--set", "assignments", multiple=True, metavar="system.options.KEY=VALUE",
              help="Change a setting of the system; repeatable")  # fmt: skip
@json_option
@click.option("-q", "--quiet", is_flag=True, help="Print the rules that do not hold, and nothing else")
def check_system(
    name: str, rules: str, without: str, timeout_s: float, assignments: tuple[str, ...], as_json: bool, quiet: bool
) -> int:
    """Try the rules that every checkpointing system must keep on the system NAME.

    NAME is one of `list systems`, PACKAGE.MODULE:CLASS or FILE.py:CLASS. It is put into a toy job of two ranks on two
    nodes on this machine, which is killed, started again, and looked at.
    """
    from capricorn.conformance.rules import choose

    subject = under_test(name, timeout_s=timeout_s)
    options = subject.options | dict(map(_option, assignments))
    subject = subject.model_copy(update={"options": options, "without": (*subject.without, *_split(without))})
    chosen = choose(_split(rules))
    if reason := why_no_loopback():
        raise ConfigError(f"the ranks meet over the loopback of this machine: {reason}; bring it up: ip link set lo up")
    with Interrupts() as interrupts:
        results = list(_shown(subject, chosen, interrupts, is_silent=as_json, quiet=quiet))
    num_failed = sum(result.verdict == "FAIL" for result in results)
    if as_json:
        print_json({"system": name, "ok": not num_failed, "rows": [dataclasses.asdict(result) for result in results]})
    elif not quiet:
        failed = f"{num_failed} of {len(results)} rules do not hold"
        console().print(failed if num_failed else f"{name} keeps the rules")
    return 1 if num_failed else 0


def _option(assignment: str) -> tuple[str, str]:
    key, equals, value = assignment.partition("=")
    if not equals or not key.startswith(f"{OPTIONS}."):
        raise ConfigError(f"--set {assignment}: here it is for settings of the system, as {OPTIONS}.KEY=VALUE")
    return key.removeprefix(f"{OPTIONS}."), value


def _split(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def _shown(
    subject: SystemUnderTest, rules: list[Rule], interrupts: Interrupts, *, is_silent: bool, quiet: bool
) -> Iterator[RuleResult]:
    """Tries the rules and prints a row as soon as there is one; on a terminal also which rule is being tried."""
    from capricorn.conformance.rules import examine

    out = console()
    tried = iter([*(f"{subject}: {rule.name}" for rule in rules), str(subject)])
    status = out.status(next(tried))
    with nullcontext() if is_silent or quiet else status:
        for result in examine(subject, rules, interrupts.check):
            status.update(next(tried))
            if not is_silent and (result.verdict == "FAIL" or not quiet):
                verdict = f"{result.verdict:<14}", COLOURS[result.verdict]
                out.print(Text.assemble(verdict, f" {result.rule:<12}  {result.detail}"), soft_wrap=True)
            yield result
