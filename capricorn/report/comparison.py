"""What a comparison of systems came to: a row for each, computed from the samples of its runs and from nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd

from capricorn.comparison import require_same_work
from capricorn.config import Scenario
from capricorn.errors import ConfigError
from capricorn.records import Mode, read_run
from capricorn.registry import FILES, SYSTEMS
from capricorn.report.measured import Measured, is_checkpointing, loss_faults
from capricorn.report.numbers import number, quantile
from capricorn.report.paired import Ratio, paired_ratio
from capricorn.report.tables import describe_place
from capricorn.units import Bytes, Seconds
from capricorn.values import Frozen

BASE, OURS = "none", "capricorn"

Runs: TypeAlias = Mapping[str, Sequence[Measured | None]]
"""By label of a variant, its runs by repeat; None where one is missing."""
Interval: TypeAlias = tuple[float, float]


class ComparisonRow(Frozen):
    """One system with its settings; None is not known."""

    label: str
    """As it was asked for: the system, with the settings that are its own."""
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
    """It restores from these."""
    notes: tuple[str, ...] = ()
    """What was chosen for it: a tuned factor, where it writes, whether it fsyncs, what is corrected."""
    runs: tuple[str, ...] = ()


class Comparison(Frozen):
    """Systems that did the same work in one mode."""

    label: str
    """What tells it from others of the same record; may be empty."""
    mode: Mode
    what: str
    """Model, cluster, iterations and repeats in a line."""
    valid: bool
    faults: tuple[str, ...]
    """Why it is not valid."""
    rows: tuple[ComparisonRow, ...]
    runs: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """What is to be known of it and does not speak against it."""


def compare_runs(label: str, runs: Mapping[str, Sequence[Path | None]]) -> Comparison:
    """The comparison of finished runs: by label of a variant its folders by repeat, None where one is missing.

    Raises:
        ConfigError: there is no run, one is damaged, or they did not do the same work in the same mode.
    """
    first = next((folder for folders in runs.values() for folder in folders if folder), None)
    if first is None:
        raise ConfigError("there is no finished run to compare")
    return compare_within(label, runs, read_run(first).config)


def compare_within(label: str, folders: Mapping[str, Sequence[Path | None]], scenario: Scenario) -> Comparison:
    """The same of runs of that scenario under several systems; there may be none yet.

    Raises:
        ConfigError: a run is damaged, or they did not do the same work in the same mode.
    """
    runs = {
        variant: [Measured.read(each) if each else None for each in several] for variant, several in folders.items()
    }
    measured = [run for each in runs.values() for run in each if run]
    require_same_work({run.record.run_id: run.record for run in measured})
    base, ours = (_runs_of(system, runs) for system in (BASE, OURS))
    rows = tuple(_row(variant, each, base, ours) for variant, each in runs.items())
    losses = loss_faults(sorted(measured, key=lambda run: run.record.system != BASE))
    on_cpu = scenario.cluster.device == "cpu"
    faults = [f"{run.record.run_id}: {run.record.verdict}" for run in measured if run.record.verdict != "ok"]
    faults += [*_unrequested(runs), *(losses if on_cpu else [])]
    return Comparison(
        label=label,
        mode=measured[0].record.mode if measured else "emulated" if scenario.emulation else "live",
        what=_describe(scenario, measured, max(map(len, runs.values()))),
        valid=not faults,
        faults=tuple(faults),
        rows=rows,
        runs=tuple(run.record.run_id for run in measured),
        # The order of sums is not fixed on other devices.
        notes=(*_unknown(runs), *_hosts(measured), *([] if on_cpu else losses)),
    )


# --- rows --------------------------------------------------------------------------------------------------------


def _runs_of(system: str, runs: Runs) -> Sequence[Measured | None]:
    """Of the variants of a system those of the first; the one without settings goes before."""
    labels = sorted((label for label in runs if _system_of(label) == system), key=lambda label: label != system)
    return runs[labels[0]] if labels else []


def _system_of(label: str) -> str:
    return label.partition(":")[0]


def _row(
    label: str, runs: Sequence[Measured | None], base: Sequence[Measured | None], ours: Sequence[Measured | None]
) -> ComparisonRow:
    there = [run for run in runs if run]
    steady = pd.concat([run.steady for run in there]) if there else pd.DataFrame(columns=["duration_s", "stall_s"])
    slowdown, speedup = _ratio(runs, base), _ratio(runs, ours)
    summaries = [run.record.summary for run in there]
    return ComparisonRow(
        label=label,
        system=_system_of(label),
        iteration_s_p50=quantile(steady["duration_s"], 50),
        stall_s_p50=quantile(steady["stall_s"], 50),
        slowdown=slowdown and slowdown.value,
        slowdown_ci=slowdown and slowdown.ci,
        speedup_of_capricorn=speedup and speedup.value,
        speedup_ci=speedup and speedup.ci,
        requested=sum(summary["requested"] for summary in summaries),
        effective=sum(summary["effective"] for summary in summaries),
        peak_rss_bytes=_most("peak_rss_bytes", summaries),
        store_bytes=_most("store_bytes", summaries),
        sent_bytes_per_iteration=number(steady["sent_bytes"].mean()) if len(steady) else None,
        tiers=SYSTEMS[_system_of(label)].tiers if _system_of(label) in SYSTEMS else (),
        notes=_notes(label, there),
        runs=tuple(run.record.run_id for run in there),
    )


def _ratio(runs: Sequence[Measured | None], base: Sequence[Measured | None]) -> Ratio | None:
    ours, theirs = ([run.durations_s if run else None for run in each] for each in (runs, base))
    return paired_ratio(ours, theirs)


def _most(key: str, summaries: Sequence[Mapping[str, Any]]) -> Bytes | None:
    return max((value for summary in summaries if (value := summary.get(key)) is not None), default=None)


def _notes(label: str, runs: Sequence[Measured]) -> tuple[str, ...]:
    """The settings that are its own, a tuned factor, and where its files go."""
    notes = label.split(":")[1:]
    for config in (run.record.config for run in runs[:1]):
        if config.gemini.tuned_in:
            notes.append(f"mu {config.gemini.mu:g}, tuned in {config.gemini.tuned_in}")
        system = SYSTEMS.get(config.system.name)
        if system and set(FILES) <= set(system.tiers):
            where = {"disk": "the disk of the run folder", "tmpfs": "memory (tmpfs)"}[config.storage.medium]
            notes.append(f"files go to {where}, {'with' if config.storage.fsync else 'without'} fsync")
    return tuple(notes)


# --- faults and notes of the whole -------------------------------------------------------------------------------


def _unrequested(runs: Runs) -> list[str]:
    """Variants that were to checkpoint and never got to it."""
    return [
        f"{label} was to make no checkpoint in its {run.record.config.train.iterations} iterations: train longer"
        for label, each in runs.items()
        for run in [run for run in each if run][:1]
        if is_checkpointing(run.record) and not run.record.summary["requested"]
    ]


def _unknown(runs: Runs) -> list[str]:
    systems = set(map(_system_of, runs))
    unknown = {BASE: "slowdowns are", OURS: "the speedup of Capricorn is"}
    return [f"{what} unknown without {system}" for system, what in unknown.items() if system not in systems]


def _hosts(runs: Sequence[Measured]) -> list[str]:
    hosts = sorted({run.record.environment.host for run in runs})
    return [f"runs of several machines: {', '.join(hosts)}"] if len(hosts) > 1 else []


def _describe(scenario: Scenario, runs: Sequence[Measured], num_repeats: int) -> str:
    lengths = [run.record.config.train.iterations for run in runs] or [scenario.train.iterations]
    short, long = min(lengths), max(lengths)
    iterations = f"{long} iterations" if short == long else f"{short} to {long} iterations"
    repeats = "1 repeat" if num_repeats == 1 else f"{num_repeats} repeats"
    return f"{scenario.model.name}, {describe_place(scenario.cluster)}; {iterations}, {repeats}"
