"""The result of a comparison: a row for each system, computed from the samples of its runs and from nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from capricorn.compare.compare_record import (
    BASE,
    CHECKPOINTS,
    differing,
    require_same_checkpoints,
    require_same_work,
)
from capricorn.compare.measured_run import MeasuredRun, loss_faults
from capricorn.compare.paired_ratio import Durations, Interval, Ratio, paired_ratio, unpaired
from capricorn.config.fields import FrozenModel
from capricorn.config.scenario import Scenario
from capricorn.errors import ConfigError
from capricorn.records.samples import Mode
from capricorn.stats.numbers import quantile, ratio
from capricorn.systems.registry import recorded
from capricorn.systems.settings import flat_settings
from capricorn.units import Bytes, Seconds

OURS = "capricorn"
SHARES = {BASE: "slowdown", OURS: "speedup of Capricorn"}
"""Names of the ratios, by the system that the others are compared with."""

Runs: TypeAlias = Mapping[str, Sequence[MeasuredRun | None]]
"""Runs by label of a variant and by repeat; None where one is missing."""


class ComparisonRow(FrozenModel):
    """One system with its settings; None is not known."""

    label: str
    """The variant as it was asked for: the system, with the settings that are its own."""
    system: str
    iteration_s_p50: Seconds | None
    stall_s_p50: Seconds | None
    slowdown: float | None
    """Time of its iterations / time of the same iterations without checkpoints."""
    slowdown_ci: Interval | None
    speedup_of_capricorn: float | None
    """Time of its iterations / time of the same iterations under capricorn."""
    speedup_ci: Interval | None
    requested: int
    effective: int
    peak_rss_bytes: Bytes | None
    store_bytes: Bytes | None
    sent_bytes_per_iteration: float | None
    tiers: tuple[str, ...] = ()
    """The tiers that it restores from."""
    notes: tuple[str, ...] = ()
    """Remarks: a tuned factor, where it writes, whether it fsyncs; and its runs that are in no ratio."""
    runs: tuple[str, ...] = ()


class Comparison(FrozenModel):
    """Systems that did the same work in one mode."""

    label: str
    """A name that tells it from others of the same record; may be empty."""
    mode: Mode
    what: str
    """Model, cluster, iterations and repeats in a line."""
    valid: bool
    faults: tuple[str, ...]
    """The reasons why it is not valid."""
    rows: tuple[ComparisonRow, ...]
    runs: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """Remarks that do not speak against it."""


def compare_runs(label: str, runs: Mapping[str, Sequence[Path | None]]) -> Comparison:
    """Returns the comparison of finished runs: by label of a variant its folders by repeat, None where one is missing.

    Raises:
        ConfigError: there is no run, one is damaged, or they did not do the same work in the same mode, or did not make
            the same checkpoints.
    """
    read = {
        variant: [MeasuredRun.read(each) if each else None for each in several] for variant, several in runs.items()
    }
    records = {run.record.run_id: run.record for several in read.values() for run in several if run}
    if not records:
        raise ConfigError("there is no finished run to compare")
    require_same_checkpoints(records)
    return compare_within(label, read, next(iter(records.values())).config)


def compare_within(label: str, runs: Runs, scenario: Scenario) -> Comparison:
    """Returns the comparison of runs of that scenario under several systems; there may be none yet.

    Raises:
        ConfigError: they did not do the same work in the same mode.
    """
    measured = [run for each in runs.values() for run in each if run]
    require_same_work({run.record.run_id: run.record for run in measured})
    others = {system: _runs_of(system, runs) for system in SHARES}
    rows = tuple(_row(variant, each, others, scenario) for variant, each in runs.items())
    losses = loss_faults(sorted(measured, key=lambda run: run.record.system != BASE))
    on_cpu = scenario.cluster.device == "cpu"
    faults = [f"{run.record.run_id}: {run.verdict}" for run in measured if run.verdict != "ok"]
    faults += losses if on_cpu else []
    return Comparison(
        label=label,
        mode=measured[0].record.mode if measured else "emulated" if scenario.emulation else "live",
        what=_describe(scenario, measured, max(map(len, runs.values()))),
        valid=not faults,
        faults=tuple(faults),
        rows=rows,
        runs=tuple(run.record.run_id for run in measured),
        # The order of sums is not fixed on other devices.
        notes=(
            *_unknown(runs),
            *_unrepeated(runs),
            *_machines(measured),
            *_remarks(measured),
            *([] if on_cpu else losses),
        ),
    )


# --- rows --------------------------------------------------------------------------------------------------------


def _runs_of(system: str, runs: Runs) -> Sequence[MeasuredRun | None]:
    """Returns the runs of the first variant of a system; the one without settings goes before."""
    labels = sorted((label for label in runs if _system_of(label) == system), key=lambda label: label != system)
    return runs[labels[0]] if labels else []


def _system_of(label: str) -> str:
    return label.partition(":")[0]


def _row(label: str, runs: Sequence[MeasuredRun | None], others: Runs, scenario: Scenario) -> ComparisonRow:
    there = [run for run in runs if run]
    steady = [iteration for run in there for iteration in run.steady]
    slowdown, speedup = (_ratio(runs, others[system]) for system in SHARES)
    summaries = [run.summary for run in there]
    return ComparisonRow(
        label=label,
        system=_system_of(label),
        iteration_s_p50=quantile((each.duration_s for each in steady), 50),
        stall_s_p50=quantile((each.stall_s for each in steady), 50),
        slowdown=slowdown and slowdown.value,
        slowdown_ci=slowdown and slowdown.ci,
        speedup_of_capricorn=speedup and speedup.value,
        speedup_ci=speedup and speedup.ci,
        requested=sum(summary["requested"] for summary in summaries),
        effective=sum(summary["effective"] for summary in summaries),
        peak_rss_bytes=_most("peak_rss_bytes", summaries),
        store_bytes=_most("store_bytes", summaries),
        sent_bytes_per_iteration=ratio(sum(each.sent_bytes for each in steady), len(steady)),
        tiers=_tiers(there),
        notes=(*_settings(label, there, scenario), *_partnerless(runs, others)),
        runs=tuple(run.record.run_id for run in there),
    )


def _ratio(runs: Sequence[MeasuredRun | None], base: Sequence[MeasuredRun | None]) -> Ratio | None:
    return paired_ratio(_durations(runs), _durations(base))


def _durations(runs: Sequence[MeasuredRun | None]) -> list[Durations | None]:
    return [run.durations_s if run else None for run in runs]


def _most(key: str, summaries: Sequence[Mapping[str, Any]]) -> Bytes | None:
    return max((value for summary in summaries if (value := summary.get(key)) is not None), default=None)


def _settings(label: str, runs: Sequence[MeasuredRun], scenario: Scenario) -> Iterator[str]:
    """Yields the settings of its own, what they make of it, a tuned factor, and where its files go."""
    own = label.split(":")[1:]
    yield from own
    for config in (run.record.config for run in runs[:1]):
        yield from _checkpoints(own, config, scenario)
        entry, options = recorded(config.system.name), config.system.options
        if entry and entry.tunes and options.get("tuned_in"):
            yield f"{entry.tunes} {options[entry.tunes]:g}, tuned in {options['tuned_in']}"
        if config.system.name == OURS and config.planner.spans == "none":
            why = "" if config.emulation else " where the CPU that computes moves the bytes"
            yield f"planner.spans=none sends as soon as staged: nothing is planned{why}"
        if entry and entry.writes_files:
            where = {"disk": "the disk of the run folder", "tmpfs": "memory (tmpfs)"}[options["medium"]]
            yield f"files go to {where}, {'with' if options['fsync'] else 'without'} fsync"


def _tiers(runs: Sequence[MeasuredRun]) -> tuple[str, ...]:
    """Where the system of these runs restores from, as far as it is known here."""
    entry = recorded(runs[0].record.config.system.name) if runs else None
    return entry.tiers if entry else ()


def _checkpoints(own: Sequence[str], config: Scenario, scenario: Scenario) -> Iterator[str]:
    """Yields what its own settings change in the checkpoints that are compared."""
    asked = {assignment.partition("=")[0] for assignment in own} & set(CHECKPOINTS)
    ours, theirs = flat_settings(config), flat_settings(scenario)
    if config.system.name != BASE:
        for key in [key for key in differing(ours, theirs) if key in asked]:
            yield f"makes other checkpoints than the others: {key} is {ours[key]}, theirs is {theirs[key]}"


def _partnerless(runs: Sequence[MeasuredRun | None], others: Runs) -> Iterator[str]:
    """Yields which of its runs count in the medians and in no ratio."""
    for system, what in SHARES.items():
        theirs = others[system]
        alone = [runs[repeat] for repeat in unpaired(_durations(runs), _durations(theirs))] if any(theirs) else []
        if names := ", ".join(run.record.run_id for run in alone if run):
            yield f"not in the {what}, without a run of {system} that has the repeat and iterations in common: {names}"


# --- faults and notes of the whole -------------------------------------------------------------------------------


def _unknown(runs: Runs) -> list[str]:
    systems = set(map(_system_of, runs))
    unknown = {BASE: "slowdowns are", OURS: "the speedup of Capricorn is"}
    return [f"{what} unknown without {system}" for system, what in unknown.items() if system not in systems]


def _unrepeated(runs: Runs) -> list[str]:
    """Returns that the intervals hold less than they seem to, if they do."""
    is_once = max(sum(run is not None for run in each) for each in runs.values()) == 1
    return ["one run of each: intervals leave out how one run differs from the next; use --repeats"] if is_once else []


def _machines(runs: Sequence[MeasuredRun]) -> list[str]:
    hosts = sorted({run.record.environment.host for run in runs})
    return [f"runs of several machines: {', '.join(hosts)}"] if len(hosts) > 1 else []


def _remarks(runs: Sequence[MeasuredRun]) -> list[str]:
    return [f"{run.record.run_id}: {note}" for run in runs for note in run.summary["notes"]]


def _describe(scenario: Scenario, runs: Sequence[MeasuredRun], num_repeats: int) -> str:
    lengths = [run.record.config.train.iterations for run in runs] or [scenario.train.iterations]
    short, long = min(lengths), max(lengths)
    iterations = f"{long} iterations" if short == long else f"{short} to {long} iterations"
    repeats = "1 repeat" if num_repeats == 1 else f"{num_repeats} repeats"
    return f"{scenario.model.name}, {scenario.cluster.describe()}; {iterations}, {repeats}"
