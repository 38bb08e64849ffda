"""`capricorn-bench run`: one system on one model, measured."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from capricorn.config.scenario import Scenario
from capricorn.errors import ConfigError, note_once
from capricorn.records.samples import RECOVERIES, RUN, RecoverySample, RunRecord, read_run, read_samples
from capricorn.sizing.memory import needs_of
from capricorn.systems.effect import why_no_effect
from capricorn.systems.settings import settings_of

from .options import (
    command,
    output_options,
    refuse_shared_tier,
    refuse_without_effect,
    scenario_options,
    system_option,
)
from .output import console, print_json, teller

if TYPE_CHECKING:
    from capricorn.launch.launcher import Launch


@command(
    "run --system capricorn --iterations 50",
    "run --model mixtral-8x7b --cluster dgx-a100 --nodes 4",
)
@system_option
@scenario_options
@output_options
@click.option("--dry-run", is_flag=True, help="Print needs, checks and resolved settings, and start nothing")
def run(scenario: Scenario, repeats: int, out: Path, as_json: bool, quiet: bool, verbose: bool, dry_run: bool) -> int:
    """Train one model under one system and record what happens in results/<run-id>/."""
    from capricorn.launch.preflight import require, require_folders

    refuse_without_effect(scenario)
    if dry_run:
        _show_plan(scenario, out, as_json)
    require(scenario)
    require_folders(scenario, out)
    if repeats > 1:
        refuse_shared_tier(scenario)
    if dry_run:
        return 0
    if scenario.emulation is not None and not (quiet or as_json):
        _show_needs(scenario)
    make_folder(out)

    from capricorn.machines.command import on_machines

    def act(start: Launch) -> int:
        folders: list[Path] = []
        try:
            _measure(start, scenario, out, repeats, folders, quiet=quiet or as_json, verbose=verbose)
        finally:
            # Also after Ctrl-C or a failure: what was measured is written by then, and is worth showing.
            records = {folder: read_run(folder) for folder in folders if (folder / RUN).exists()}
            _show(records, repeats, as_json, quiet)
        return 0 if all(record.verdict == "ok" for record in records.values()) else 1

    return on_machines("run", [scenario], act, teller(quiet=quiet or as_json), repeats=repeats)


def _measure(
    start: Launch, scenario: Scenario, out: Path, repeats: int, folders: list[Path], *, quiet: bool, verbose: bool
) -> None:
    """Runs the scenario `repeats` times; the folder of each run is added to `folders` as it starts."""
    from capricorn.launch.tuning import needs_tuning, tune

    from .display import watching

    if needs_tuning(scenario):
        if not quiet:
            console().print(f"mu of {scenario.system.name} first", style="bold")
        with watching([], quiet=quiet, verbose=verbose) as listener:
            scenario, found_in = tune(scenario, out, listener, start)
        if not quiet:
            factor = settings_of(scenario).mu
            console().print(f"mu {factor}, found in {found_in or 'no run: nothing depends on it'}")
    for _ in range(repeats):
        with watching(folders, quiet=quiet, verbose=verbose) as listener:
            start(scenario, out, listener)


def make_folder(out: Path) -> None:
    """Makes the folder of runs, or raises ConfigError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot make the folder: {error.strerror}") from None
    if not os.access(out, os.W_OK | os.X_OK):
        is_read_only = os.statvfs(out).f_flag & os.ST_RDONLY
        raise ConfigError(
            f"--out {out}: {'it is on a read-only file system' if is_read_only else 'no permission to write'}"
        )


def _show(records: dict[Path, RunRecord], repeats: int, as_json: bool, quiet: bool) -> None:
    if not records:
        return
    if as_json:
        runs = [record.model_dump(mode="json") for record in records.values()]
        print_json({"runs": runs} if repeats > 1 else runs[0])
    elif quiet:
        from capricorn.report.terminal.run_table import notes_of

        for folder, record in records.items():
            click.echo(f"{folder}: {record.verdict}")
            for note in notes_of(record):
                note_once(f"{folder}: {note}")
    else:
        _print_tables(records, repeats)


def _print_tables(records: dict[Path, RunRecord], repeats: int) -> None:
    from capricorn.report.terminal.run_table import repeats_table, run_table

    out = console()
    if repeats > 1:
        out.print(repeats_table(list(records.values())))
    else:
        for folder, record in records.items():
            out.print(run_table(record, list(read_samples(folder / RECOVERIES, RecoverySample))))
    for folder in records:
        out.print(f"{folder}", soft_wrap=True)


def _show_needs(scenario: Scenario) -> None:
    from capricorn.report.terminal.plan_table import plan_table

    console().print(plan_table(scenario, needs_of(scenario, cuda=False)))


def _told(scenario: Scenario) -> Iterator[tuple[str, str]]:
    """Yields the settings that change something in this run, by section; a scale model is shown as a table."""
    config = scenario.model_dump(mode="json", exclude={"emulation", "faults"})
    config["system.options"] = config["system"].pop("options")
    for section, fields in config.items():
        told = [
            f"{key}={value}"
            for key, value in fields.items()
            if value not in (None, "") and not why_no_effect(f"{section}.{key}", scenario)
        ]
        if told:
            yield section, " ".join(told)
    if scenario.faults:
        yield "faults", " ".join(map(str, scenario.faults))


def _show_plan(scenario: Scenario, out: Path, as_json: bool) -> None:
    from capricorn.launch.preflight import checks
    from capricorn.report.terminal.plan_table import checks_table, plan_table

    needs, found = needs_of(scenario, cuda=scenario.cluster.device == "cuda"), checks(scenario, out)
    if as_json:
        facts = [dataclasses.asdict(check) for check in found]
        print_json({"needs": dataclasses.asdict(needs), "checks": facts, "config": scenario.model_dump(mode="json")})
        return
    screen = console()
    screen.print(plan_table(scenario, needs))
    screen.print(checks_table(found))
    for section, settings in _told(scenario):
        screen.print(f"{section}: {settings}", soft_wrap=True, markup=False)
