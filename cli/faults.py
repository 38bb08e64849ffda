"""`capricorn-bench faults`: a campaign of injected failures, each with a verdict, and what failures cost."""

from __future__ import annotations

import re
import shlex
from itertools import product
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from capricorn.campaign.campaign_record import (
    AS_CONFIGURED,
    CampaignRecord,
    counts,
    place_of,
    read_campaign,
    succeeded,
    write_campaign,
)
from capricorn.compare.compare_record import alone_in
from capricorn.config.fault_spec import FaultSpec
from capricorn.errors import ConfigError
from capricorn.files import write_text

from .campaign_plan import planned
from .experiment import refuse_given
from .options import command, listed, output_options, systems_option, unresolved_options
from .output import PROGRAM, console, print_json, teller
from .run import make_folder
from .values import KIND_LIST, FiniteRange, WholeNumber

if TYPE_CHECKING:
    from capricorn.launch.launcher import Launch

DEFAULTS = {"model": "mixtral-tiny", "iterations": 12, "warmup": 0}
DEFAULT_SYSTEMS, DEFAULT_COUNT = "capricorn", 16
REPORT = "report.md"
OUTPUT = {"as_json", "quiet", "verbose"}
MIN_MTBF_S = 0.05
"""Several failures an iteration, and each as long to draw."""
_TIME_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}


def _duration(context: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
    """Returns the seconds that `30s`, `5min` or `1h` stand for.

    Raises:
        ConfigError: it is no such time, or none at all.
    """
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|min|h)\s*", text)
    seconds = float(match[1]) * _TIME_UNITS[match[2]] if match else 0.0
    if not MIN_MTBF_S <= seconds < inf:
        raise ConfigError(f"--mtbf {text!r} is no time; write it as in 30s, 5min or 1h")
    return seconds


def _shapes(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> list[str]:
    """Returns the shapes of a list, as `2x1` each.

    Raises:
        ConfigError: one is spelled otherwise.
    """
    shapes = listed(context, parameter, texts)
    for shape in shapes:
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", shape):
            raise ConfigError(f"--shapes {shape!r} is no shape; write nodes x ranks of each, as in 2x1,3x1")
    return list(dict.fromkeys(shapes))


@command(
    "faults --systems capricorn,gemini --count 32",
    "faults --fault kill@rank=1,iteration=5",
    "faults --count 1000 --shapes 2x1,2x2,3x1",
    context_settings={"default_map": DEFAULTS},
)
@systems_option(DEFAULT_SYSTEMS, "Inject into these systems, each with settings of its own; see `list systems`")
@click.option(
    "--kinds",
    multiple=True,
    callback=listed,
    type=KIND_LIST,
    metavar="K,K",
    panel="Failures",
    help="Draw failures of these kinds of `list faults`, or FILE.py:NAME (default: all built in that apply)",
)
@click.option(
    "--count",
    type=WholeNumber(1),
    default=DEFAULT_COUNT,
    show_default=True,
    metavar="N",
    panel="Failures",
    help="Draw this many failures from --seed, where no --fault is given",
)
@click.option(
    "--shapes",
    multiple=True,
    callback=_shapes,
    metavar="NxR,NxR",
    panel="Failures",
    help="Let them come in turn to N nodes of R ranks each, as 2x1,2x2,3x1 (default: as --nodes says)",
)
@click.option(
    "--mtbf",
    callback=_duration,
    metavar="TIME",
    panel="Failures",
    help="Instead let failures come at random times with this mean between them, as 30s, and say what they cost",
)
@click.option(
    "--node-loss-frac",
    type=FiniteRange(0, 1),
    default=0.1,
    show_default=True,
    metavar="PART",
    panel="Failures",
    help="Let this part of them take the memory of a node along",
)
@click.option("--keep-runs", is_flag=True, help="Keep the folders of runs that passed, too")
@click.option(
    "--resume",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    panel="What",
    help="Make the runs that are missing in this folder",
)
@click.option("--repro", is_flag=True, help="Print the command that repeats each case, and start nothing")
@click.option(
    "--case",
    "number",
    type=WholeNumber(0),
    metavar="N",
    panel="Failures",
    help="Run only the failure of that number, from 0",
)
@unresolved_options
@output_options
def faults(
    resume: Path | None, repro: bool, number: int | None, out: Path, as_json: bool, quiet: bool, verbose: bool, **_: Any
) -> int:  # fmt: skip
    """Inject failures into systems: does training go on exactly as if nothing had happened, and what is lost?

    Each --fault is a case of its own; without any, --count of them are drawn. A case is one run of one system, judged
    by a run without failures. Exits with 1 unless Capricorn passes wherever a copy survives.
    """
    context = click.get_current_context()
    assert context is not None
    if resume is not None:
        allowed = {"resume", "repro", "number"} | OUTPUT
        refuse_given(context, allowed, f"contradicts --resume: all settings are those of {resume}")
        record = read_campaign(resume)
    else:
        record = planned(context)
    if number is not None:
        _check_number(record, number)
    if repro:
        return _print_repros(record, number, as_json)

    from capricorn.machines.command import on_machines

    def act(start: Launch) -> int:
        folder = _new_folder(out, record) if resume is None else resume.resolve()
        elsewhere = start if record.scenarios[AS_CONFIGURED].launch.nnodes else None
        return _carry_out(folder, number, elsewhere, as_json=as_json, quiet=quiet, verbose=verbose)

    _require(record, out if resume is None else resume.resolve().parent)
    scenarios = [record.undisturbed_scenario(AS_CONFIGURED, variant.label) for variant in record.variants]
    cases = [f"{case.system} {case.fault}" for case in record.cases]
    return on_machines("faults", scenarios, act, teller(quiet=quiet or as_json), cases=cases, case=number)


def _check_number(record: CampaignRecord, number: int) -> None:
    numbers = sorted({case.number for case in record.cases})
    if number not in numbers:
        known = f"they go from 0 to {numbers[-1]}" if numbers else "the campaign has no cases"
        raise ConfigError(f"--case {number}: there is none; {known}")


def _print_repros(record: CampaignRecord, number: int | None, as_json: bool) -> int:
    lines = [case.repro for case in record.cases if number in (None, case.number)]
    if as_json:
        print_json({"repros": lines})
        return 0
    for line in dict.fromkeys(lines):  # one that is repeated has the same
        click.echo(line)
    return 0


# --- carrying it out ---------------------------------------------------------------------------------------------


def _new_folder(out: Path, record: CampaignRecord) -> Path:
    make_folder(out)
    folder = (out / record.campaign_id).resolve()
    write_campaign(folder, record)
    return folder


def _carry_out(
    folder: Path, number: int | None, start: Launch | None, *, as_json: bool, quiet: bool, verbose: bool
) -> int:
    """Makes the runs that are missing in the folder, and shows what the campaign then comes to."""
    from capricorn.campaign.small_file_systems import remove_leftovers

    remove_leftovers()
    with alone_in(folder):
        record = read_campaign(folder)
        runner = _runner(folder, record, number, start, quiet=quiet or as_json, verbose=verbose)
        try:
            runner.run()
        finally:
            # Also after Ctrl-C or a failure: what was found out is worth showing.
            _show(folder, runner.record, as_json=as_json, quiet=quiet)
    return 0 if succeeded(runner.record) else 1


def _require(record: CampaignRecord, out: Path) -> None:
    """Raises ConfigError if this machine cannot run one of the systems, or not write what it leaves below `out`."""
    from capricorn.launch.preflight import require, require_folders

    places = [testbed for testbed in record.scenarios if place_of(testbed) == AS_CONFIGURED]
    for testbed, variant in product(places, record.variants):
        scenario = record.undisturbed_scenario(testbed, variant.label)
        require(scenario)
        require_folders(scenario, out)


def _runner(
    folder: Path, record: CampaignRecord, number: int | None, start: Launch | None, *, quiet: bool, verbose: bool
) -> Any:
    from capricorn.campaign.campaign_runner import CampaignRunner
    from capricorn.campaign.economics_runner import EconomicsRunner

    from .display import watching_each

    is_live = console().is_terminal and not verbose

    def say(line: str, is_news: bool) -> None:
        # On a terminal, where the display told it, only what is remarkable.
        if not quiet and (is_news or not is_live):
            console().print(line, style="yellow" if is_news else "", soft_wrap=True, markup=False)

    # A pipe gets a line for each case, and those of its iterations only if asked for.
    watch = watching_each(quiet=quiet or not (is_live or verbose), verbose=verbose)
    if record.economics is not None:
        return EconomicsRunner(folder, record, watch, say, start=start)
    return CampaignRunner(folder, record, watch, say, number, start=start)


def _show(folder: Path, record: CampaignRecord, *, as_json: bool, quiet: bool) -> None:
    """Writes the report and prints what it says."""
    from capricorn.report.terminal.campaign_table import campaign_markdown, campaign_tables, case_lines
    from capricorn.report.terminal.economics_table import economics_markdown, economics_table

    economics = record.economics
    text = campaign_markdown(record) if economics is None else economics_markdown(economics)
    write_text(folder / REPORT, text)
    if as_json:
        print_json(campaign_json(record))
        return
    is_explained = not quiet
    table = campaign_tables(record, caption=is_explained) if economics is None else (
        economics_table(economics, caption=is_explained)
    )  # fmt: skip
    console().print(table)
    for line in case_lines(record):
        console().print(line, soft_wrap=True)
    more = f"go on with: {PROGRAM} faults --resume {shlex.quote(str(folder))}"
    console().print(str(folder) if record.is_whole else more, soft_wrap=True, markup=False)


def campaign_json(record: CampaignRecord) -> dict[str, Any]:
    """Returns what --json prints."""
    economics = record.economics
    return {
        "campaign_id": record.campaign_id,
        "counts": counts(record.cases),
        "cases": [_case_json(case.model_dump(mode="json")) for case in record.cases],
        "not_run": [each.model_dump(mode="json") for each in record.not_run],
        "undisturbed": [
            {"system": run.system, "testbed": run.testbed, "difference": run.difference} for run in record.undisturbed
        ],
        "economics": None if economics is None else economics.model_dump(mode="json"),
    }


def _case_json(case: dict[str, Any]) -> dict[str, Any]:
    judgement = case.pop("judgement") or {"verdict": None, "lost_iterations": None, "recovery_s": None}
    return case | {"fault": str(FaultSpec.model_validate(case["fault"]))} | judgement
