"""`capricorn-bench ablate`: planning policies against each other, trained or replayed over a trace of expert loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import rich_click as click
from click.core import ParameterSource
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from capricorn.config.planner import PlannerConfig
from capricorn.config.scenario import Scenario
from capricorn.errors import ConfigError
from capricorn.records.samples import RUN, RunRecord, read_run

from .options import Command, command, output_options, refuse_without_effect, scenario_options
from .output import console, print_json, teller
from .policies import POLICY_OPTIONS, RHOS, Choice, configure, describe, refuse_chosen, refuse_unplanned
from .run import make_folder

if TYPE_CHECKING:
    from capricorn.launch.launcher import Launch
    from capricorn.report.terminal.ablation_table import Ablation, Row
    from capricorn.simulate.training_model import TraceConfig

OFFLINE = {"trace", "spans", "replans", "gates", "rhos", "assignments", "as_json", "quiet"}
"""Parameters that a replay takes."""


def _policy_options(command: Command) -> Command:
    """Gives a command `trace` and a `choice` of policies; with a trace it is replayed, and the command not called."""

    @wraps(command)
    def either(trace: Path | None, spans: Any, replans: Any, gates: Any, rhos: Any, **options: Any) -> int:
        choice = Choice(spans, replans, gates, rhos)
        refuse_chosen(options["assignments"])
        if trace is None:
            return command(choice=choice, **options)
        _refuse_given()
        return _replay(trace, choice, **{name: options[name] for name in ("assignments", "as_json", "quiet")})

    either_with: Command = either
    for option in reversed(POLICY_OPTIONS):
        either_with = option(either_with)
    return either_with


def _refuse_given() -> None:
    """Raises ConfigError for an option that says nothing about a replay."""
    context = click.get_current_context()
    assert context is not None
    for parameter in context.command.params:
        name = parameter.name or ""
        if name not in OFFLINE and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise ConfigError(f"{parameter.opts[0]} says nothing about a replay: leave it out, or --trace")


@command(
    "ablate --spans layer,load --gate on --iterations 50",
    "ablate --trace loads.npz --replan never,speculative",
)
@click.option("--trace", type=click.Path(path_type=Path), metavar="FILE.npz", panel="What",
              help="Replay these expert loads in virtual time, and train nothing")  # fmt: skip
@_policy_options
@scenario_options
@output_options
def ablate(
    scenario: Scenario, choice: Choice, repeats: int, out: Path, as_json: bool, quiet: bool, verbose: bool
) -> int:
    """Compare planning policies: which idle spans, when to replan, with the gate or without.

    Trains under each of them and without checkpoints, or with --trace replays a trace in virtual time.
    """
    from capricorn.launch.preflight import require, require_folders

    policies = choice.live(scenario.planner)
    refuse_unplanned(scenario)
    refuse_without_effect(*(_under(scenario, policy) for policy in policies))
    require(scenario)
    require_folders(scenario, out)
    make_folder(out)

    from capricorn.machines.command import on_machines

    def act(start: Launch) -> int:
        folders: dict[PlannerConfig | None, list[Path]] = {policy: [] for policy in (None, *policies)}
        try:
            _measure(start, scenario, out, repeats, folders, quiet=quiet or as_json, verbose=verbose)
        finally:
            # Also after Ctrl-C or a failure: what was measured is worth showing.
            records = {
                policy: [read_run(f) if (f / RUN).exists() else None for f in each] for policy, each in folders.items()
            }
            _show_live(records, as_json, quiet)
        return 0 if all(record.verdict == "ok" for each in records.values() for record in each if record) else 1

    scenarios = [_under(scenario, policy) for policy in policies]
    return on_machines("ablate", scenarios, act, teller(quiet=quiet or as_json), repeats=repeats)


# --- trained -----------------------------------------------------------------------------------------------------


def _measure(
    start: Launch, scenario: Scenario, out: Path, repeats: int, folders: dict[PlannerConfig | None, list[Path]], *,
    quiet: bool, verbose: bool,
) -> None:  # fmt: skip
    """Runs each policy `repeats` times, there and back, so that a machine that gets slower does so for all alike.

    The folders of each are by repeat.
    """
    from .display import watching

    there = list(folders)
    for repeat in range(repeats):
        for policy in there if repeat % 2 == 0 else reversed(there):
            if not quiet:
                console().print(describe(policy) if policy else "no checkpoints", style="bold")
            with watching(folders[policy], quiet=quiet, verbose=verbose) as listener:
                start(_under(scenario, policy), out, listener)


def _under(scenario: Scenario, policy: PlannerConfig | None) -> Scenario:
    """Returns the scenario under that policy; without one, under no checkpointing at all."""
    if policy is None:
        return scenario.model_copy(update={"system": scenario.system.model_copy(update={"name": "none"})})
    return scenario.model_copy(update={"planner": policy})


def _show_live(records: dict[PlannerConfig | None, list[RunRecord | None]], as_json: bool, quiet: bool) -> None:
    from capricorn.report.terminal.ablation_table import Ablation, compared

    base = records[None]
    rows = tuple(compared(policy, each, base) for policy, each in records.items() if policy is not None and any(each))
    runs = [record for each in records.values() for record in each if record]
    if not runs:
        return
    faults = tuple(f"{record.run_id}: {record.verdict}" for record in runs if record.verdict != "ok")
    caption = f"Against no checkpointing, {sum(map(bool, base))} times each, {runs[0].mode}."
    names = tuple(record.run_id for record in runs)
    _show(Ablation(mode=runs[0].mode, rows=rows, caption=caption, faults=faults, runs=names), as_json, quiet)


# --- replayed ----------------------------------------------------------------------------------------------------


def _replay(trace: Path, choice: Choice, *, assignments: tuple[str, ...], as_json: bool, quiet: bool) -> int:
    from capricorn.report.terminal.ablation_table import Ablation, simulated
    from capricorn.simulate.policy import references, replay_policy
    from capricorn.simulate.training_model import TraceConfig, train_on

    sections = configure({"trace": TraceConfig, "planner": PlannerConfig}, assignments)
    config, planner = cast("TraceConfig", sections["trace"]), cast(PlannerConfig, sections["planner"])
    policies, rhos = choice.offline(planner), choice.rhos or RHOS
    training = train_on(trace, config)
    configs = {rho: config.model_copy(update={"rho": rho}) for rho in rhos}
    rows: list[Row] = []
    try:
        with _progress(len(policies) * len(rhos), quiet=quiet or as_json) as advance:
            for policy, (rho, at_rho) in product(policies, configs.items()):
                advance(f"{describe(policy)}, rho {rho:g}")
                rows.append(simulated(policy, rho, replay_policy(policy, training, at_rho)))
    finally:
        # Also after Ctrl-C: what was replayed is worth showing.
        bounds = {rho: references(planner, training, at_rho) for rho, at_rho in configs.items()}
        caption = _caption(trace, config, len(training.base_s))
        _show(Ablation(mode="simulated", rows=tuple(rows), caption=caption, references=bounds), as_json, quiet)
    return 0


def _caption(trace: Path, config: TraceConfig, num_iterations: int) -> str:
    return (
        f"Simulated: {num_iterations} iterations of {trace.name} from {config.first} on, {config.ranks} ranks; "
        f"noise of loads {config.load_noise:.1%}, of computing {config.compute_noise:.1%}; {config.num_chunks} chunks."
    )


@contextmanager
def _progress(total: int, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Shows on a terminal what is going on; to be called with it before each of `total` things."""
    out = console()
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=out, transient=True, disable=quiet or not out.is_terminal) as progress:
        task = progress.add_task("", total=total, completed=-1)
        yield lambda what: progress.update(task, advance=1, description=what)


# --- both --------------------------------------------------------------------------------------------------------


def _show(ablation: Ablation, as_json: bool, quiet: bool) -> None:
    if as_json:
        print_json(ablation.as_json())
        return
    from capricorn.report.terminal.ablation_table import ablation_table

    console().print(ablation_table(ablation, caption=not quiet))
