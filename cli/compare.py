"""`capricorn-bench compare`: systems against each other on the same work, run in turn, or runs that are finished."""

from __future__ import annotations

import dataclasses
import secrets
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from capricorn.compare.compare_record import (
    COMPARE,
    CompareRecord,
    PlannedComparison,
    alone_in,
    is_compare,
    missing_runs,
    read_compare,
    require_same_checkpoints,
    require_same_work,
    write_compare,
)
from capricorn.config.scenario import Scenario
from capricorn.errors import ConfigError
from capricorn.records.samples import read_run
from capricorn.sizing.memory import Needs, needs_of

from .experiment import Experiment, experiment_of, refuse_given
from .options import command, output_options, systems_option, unresolved_options
from .output import PROGRAM, console, print_json, teller
from .run import make_folder

if TYPE_CHECKING:
    from capricorn.compare.comparison import Comparison
    from capricorn.launch.launcher import Launch

DEFAULT_SYSTEMS = "none,capricorn,gemini,torchsnapshot"
DEFAULT_REPEATS = 3
OUTPUT = {"as_json", "quiet", "verbose"}


def _fraction(context: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
    """Reads `5%` and `0.05` as 0.05.

    Raises:
        ConfigError: it is neither.
    """
    if text is None:
        return None
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        fraction = float(number) / (100 if percent else 1)
    except ValueError:
        fraction = -1.0
    if not 0 <= fraction <= 1:
        raise ConfigError(f"--threshold {text!r} is no part of a whole; write 5% or 0.05")
    return fraction


@command(
    "compare --systems none,capricorn,gemini --iterations 50",
    "compare results/RUN-1 results/RUN-2 --threshold 5%",
    context_settings={"default_map": {"repeats": DEFAULT_REPEATS}},
)
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path), metavar="[RUN]...")
@systems_option(DEFAULT_SYSTEMS, "Compare these systems, each with settings of its own; see `list systems`")
@click.option(
    "--scenario",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE.toml",
    panel="What",
    help="Take all of these options from a file, also for several comparisons; the command line goes before it",
)
@click.option(
    "--resume",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    panel="What",
    help="Make the runs that are missing in this folder",
)
@click.option(
    "--threshold",
    callback=_fraction,
    metavar="PART",
    panel="What",
    help="Fail if a finished run takes longer than the first by more than this, as 5%, and the interval of their ratio "
    "does not hold 1",
)
@unresolved_options
@output_options
@click.option("--dry-run", is_flag=True, help="Print what would be run and what it needs, and start nothing")
def compare(
    runs: tuple[Path, ...], file: Path | None, resume: Path | None, threshold: float | None, as_json: bool, quiet: bool,
    verbose: bool, dry_run: bool, **asked: Any,
) -> int:  # fmt: skip
    """Compare systems on the same work: --repeats runs of each, there and back (A B B A ...), each with its own record.

    With RUN ... compares finished runs instead, which must have done the same work and made the same checkpoints;
    several of one system are its repeats.
    """
    context = click.get_current_context()
    assert context is not None
    if runs:
        refuse_given(context, {"runs", "threshold"} | OUTPUT, "says nothing about finished runs: leave it out")
        return _compare_finished(runs, threshold, as_json, quiet)
    if threshold is not None:
        raise ConfigError("--threshold is for finished runs: name them, as in compare BASE RUN --threshold 5%")
    if resume is not None:
        refuse_given(context, {"resume"} | OUTPUT, f"contradicts --resume: all settings are those of {resume}")
        record = read_compare(resume, goes_on=True)  # before anything is written there
        _require(_missing(resume, record), resume.resolve().parent)
        return _start(resume.resolve, record.comparisons, as_json=as_json, quiet=quiet, verbose=verbose)
    experiment = experiment_of(context, file)
    if dry_run:
        _show_plan(experiment, as_json)
    scenarios = (each.scenario_of(variant.label) for each in experiment.comparisons for variant in each.variants)
    _require(scenarios, experiment.out)
    if dry_run:
        return 0
    make = partial(_new_folder, experiment)
    return _start(make, experiment.comparisons, as_json=as_json, quiet=quiet, verbose=verbose)


# --- runs to be made ---------------------------------------------------------------------------------------------


def _require(scenarios: Iterable[Scenario], out: Path) -> None:
    """Raises ConfigError if this machine cannot run one of them, or not write what it leaves below `out`."""
    from capricorn.launch.preflight import require, require_folders

    for scenario in scenarios:
        require(scenario)
        require_folders(scenario, out)


def _missing(folder: Path, record: CompareRecord) -> Iterator[Scenario]:
    """Yields what is still to be run, once of each variant."""
    for planned in record.comparisons:
        for variant in dict.fromkeys(run.variant for run in missing_runs(folder, planned)):
            yield planned.scenario_of(variant)


def _new_folder(experiment: Experiment) -> Path:
    """Makes a folder for the comparisons, with the record of what is to be done."""
    make_folder(experiment.out)
    started = datetime.now(UTC)
    model = experiment.comparisons[0].scenario.model.name
    record = CompareRecord(
        compare_id=f"{started:%Y%m%d-%H%M%S}-compare-{model}-{secrets.token_hex(2)}",
        started_at=started.isoformat(timespec="seconds"),
        comparisons=tuple(experiment.comparisons),
    )
    folder = experiment.out / record.compare_id
    write_compare(folder, record)
    return folder


def _start(
    make: Callable[[], Path], comparisons: Sequence[PlannedComparison], *, as_json: bool, quiet: bool, verbose: bool
) -> int:
    """Carries the comparisons out in the folder that `make` returns, on all machines that take part."""
    from capricorn.machines.command import on_machines

    def act(start: Launch) -> int:
        return _carry_out(make(), start, as_json=as_json, quiet=quiet, verbose=verbose)

    scenarios = [planned.scenario_of(variant.label) for planned in comparisons for variant in planned.variants]
    repeats = [len(planned.runs) // len(planned.variants) for planned in comparisons]
    return on_machines("compare", scenarios, act, teller(quiet=quiet or as_json), repeats=repeats)


def _carry_out(folder: Path, start: Launch, *, as_json: bool, quiet: bool, verbose: bool) -> int:
    """Makes the runs that are missing in the folder, and shows what its comparisons then come to."""
    with alone_in(folder):
        record = read_compare(folder, goes_on=True)
        return _make_missing(folder, record, start, as_json=as_json, quiet=quiet, verbose=verbose)


def _make_missing(
    folder: Path, record: CompareRecord, start: Launch, *, as_json: bool, quiet: bool, verbose: bool
) -> int:
    from capricorn.compare.compare_runner import CompareRunner
    from capricorn.compare.finished_runs import compare_planned

    from .display import watching_each

    is_quiet = quiet or as_json

    def say(line: str) -> None:
        if not is_quiet:
            console().print(line, style="bold red", soft_wrap=True)

    runner = CompareRunner(folder, record, watching_each(quiet=is_quiet, verbose=verbose), say, start)
    try:
        runner.run()
    finally:
        # Also after Ctrl-C or a failure: what was measured is worth showing.
        record = read_compare(folder)
        compared = [compare_planned(folder, planned) for planned in record.comparisons]
        _show(compared, {"compare_id": record.compare_id}, as_json, quiet)
        if not as_json:
            _print_next(folder, record, quiet)
    return 0 if all(comparison.valid for comparison in compared) else 1


def _print_next(folder: Path, record: CompareRecord, quiet: bool) -> None:
    """Prints where it all lies, and how to go on if runs are missing; in one line, to be copied."""
    if any(missing_runs(folder, planned) for planned in record.comparisons):
        line = f"go on with: {PROGRAM} compare --resume {shlex.quote(str(folder))}"
    elif not quiet:
        line = str(folder)
    else:
        return
    console().print(line, soft_wrap=True, markup=False)


def _show_plan(experiment: Experiment, as_json: bool) -> None:
    plans = [(planned, _needs(planned)) for planned in experiment.comparisons]
    if as_json:
        facts = [_plan_json(planned, needs) for planned, needs in plans]
        print_json({"comparisons": facts})
        return
    from capricorn.report.terminal.plan_table import scale_table, variants_table

    for planned, needs in plans:
        scenario = planned.scenario
        what = f"{scenario.model.name}, {scenario.cluster.describe()}; {scenario.train.iterations} iterations"
        title = f"{planned.label}, {what}" if planned.label else what
        console().print(f"{title}: {len(planned.runs)} runs", style="bold", soft_wrap=True)
        if scenario.emulation is not None:
            console().print(scale_table(scenario))
        console().print(variants_table(needs))
        console().print("order: " + " ".join(run.variant for run in planned.runs), markup=False)


def _needs(planned: PlannedComparison) -> dict[str, Needs]:
    scenarios = {variant.label: planned.scenario_of(variant.label) for variant in planned.variants}
    return {label: needs_of(each, cuda=each.cluster.device == "cuda") for label, each in scenarios.items()}


def _plan_json(planned: PlannedComparison, needs: dict[str, Needs]) -> dict[str, Any]:
    return {
        "label": planned.label,
        "runs": [run.variant for run in planned.runs],
        "needs": {label: dataclasses.asdict(each) for label, each in needs.items()},
        "config": planned.scenario.model_dump(mode="json"),
    }


# --- runs that are finished --------------------------------------------------------------------------------------


def _compare_finished(paths: tuple[Path, ...], threshold: float | None, as_json: bool, quiet: bool) -> int:
    from capricorn.compare.finished_runs import load_comparisons, require_distinct

    whole = [path for path in paths if is_compare(path)]
    if whole and (threshold is not None or len(whole) < len(paths)):
        raise ConfigError(f"{whole[0]} holds a whole comparison ({COMPARE}); name the folders of its runs instead")
    if not whole:
        read = [(path, read_run(path)) for path in paths]
        require_distinct((path, record.run_id) for path, record in read)
        records = {str(path): record for path, record in read}
        require_same_work(records)
        require_same_checkpoints(records)
    compared = [comparison for comparison, _ in load_comparisons(paths)]
    if threshold is None:
        _show(compared, {}, as_json, quiet)
        return 0 if all(comparison.valid for comparison in compared) else 1
    return _check(paths, threshold, compared, as_json, quiet)


def _check(
    paths: tuple[Path, ...], threshold: float, compared: list[Comparison], as_json: bool, quiet: bool
) -> int:  # fmt: skip
    """Shows whether no later run is slower than the first by more than the threshold, where that is no chance."""
    from capricorn.compare.finished_runs import ratio_of

    base, *later = paths
    if not later:
        raise ConfigError(f"--threshold compares runs with {base}, the first one: name another")
    ratios = {path: ratio_of(path, base) for path in later}
    checks = [
        {
            "run": path.name,
            "base": base.name,
            "ratio": ratio.value,
            "ci": list(ratio.ci),
            "slower": ratio.value > 1 + threshold and not ratio.ci[0] <= 1 <= ratio.ci[1],
        }
        for path, ratio in ratios.items()
    ]
    _show(compared, {"threshold": threshold, "checks": checks}, as_json, quiet)
    if not as_json:
        for check in checks:
            _print_check(check, threshold)
    is_fine = all(comparison.valid for comparison in compared) and not any(check["slower"] for check in checks)
    return 0 if is_fine else 1


def _print_check(check: dict[str, Any], threshold: float) -> None:
    low, high = check["ci"]
    is_beyond = check["ratio"] > 1 + threshold
    doubt = f", {'and' if check['slower'] else 'but'} its interval {'does not hold' if check['slower'] else 'holds'} 1"
    what = f"{'' if is_beyond else 'not '}slower by more than {100 * threshold:g}%{doubt if is_beyond else ''}"
    line = f"{check['run']}: {check['ratio']:.3f} [{low:.3f}, {high:.3f}] of {check['base']}, {what}"
    console().print(line, style="bold red" if check["slower"] else "green", soft_wrap=True, markup=False)


# --- both --------------------------------------------------------------------------------------------------------


def _show(compared: list[Comparison], facts: dict[str, Any], as_json: bool, quiet: bool) -> None:
    if as_json:
        each = [comparison.model_dump(mode="json") for comparison in compared]
        print_json((each[0] if len(each) == 1 else _together(compared, each)) | facts)
        return
    from capricorn.report.terminal.comparison_table import comparison_table

    for number, comparison in enumerate(compared):
        if number:
            console().print()
        console().print(comparison_table(comparison, caption=not quiet))


def _together(compared: list[Comparison], each: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "valid": all(comparison.valid for comparison in compared),
        "comparisons": each,
        "runs": [run for comparison in compared for run in comparison.runs],
    }
