"""Comparisons of finished runs, found in the folders of runs and of comparisons; computes no figure itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from capricorn.compare.compare_record import (
    BASE,
    LENGTH,
    SYSTEM,
    WORK,
    PlannedComparison,
    PlannedRun,
    checkpoints_of,
    differing,
    folder_of,
    is_compare,
    is_done,
    read_compare,
    require_same_work,
    work_of,
)
from capricorn.compare.comparison import Comparison, Runs, compare_runs, compare_within
from capricorn.compare.measured_run import MeasuredRun
from capricorn.compare.paired_ratio import Ratio, paired_ratio
from capricorn.errors import ConfigError
from capricorn.planner.gemini_planner import SWEEP
from capricorn.records.samples import RUN, RunRecord, read_run
from capricorn.systems.settings import OPTIONS, flat_settings

PLACES = ("store", "launch")
"""Sections that say where things lie and start, and do not tell one variant from another."""


def compare_planned(folder: Path, planned: PlannedComparison) -> Comparison:
    """Returns the comparison as far as it has come; its faults name what is missing of it and what is damaged."""
    runs, faults = _read_planned(folder, planned)
    comparison = compare_within(planned.label, runs, planned.scenario)
    if len(comparison.runs) == len(planned.runs):
        return comparison
    missing = f"{len(comparison.runs)} of {len(planned.runs)} runs are done"
    return comparison.model_copy(update={"valid": False, "faults": (*comparison.faults, *faults, missing)})


def _read_planned(folder: Path, planned: PlannedComparison) -> tuple[Runs, list[str]]:
    """Returns by label of a variant its runs by repeat, None where none is finished, and what is wrong with them."""
    runs: dict[str, list[MeasuredRun | None]] = {
        variant.label: [None] * planned.repeats for variant in planned.variants
    }
    first: MeasuredRun | None = None
    faults = []
    for run in planned.runs:
        fault = run.failure
        try:
            if found := _finished(folder, run):
                first = first or found
                require_same_work({each.record.run_id: each.record for each in (first, found)})
                runs[run.variant][run.repeat - 1] = found
        except ConfigError as error:
            fault = str(error)
        if fault:
            faults.append(f"{run.variant}, repeat {run.repeat}: {fault}")
    return runs, faults


def _finished(folder: Path, run: PlannedRun) -> MeasuredRun | None:
    """Returns that run, if it is done.

    Raises:
        ConfigError: a file of it is damaged.
    """
    run_folder = folder_of(folder, run)
    if is_done(folder, run):
        return MeasuredRun.read(run_folder)
    if run.run_id and not run.failure and (run_folder / RUN).exists():
        read_run(run_folder)  # damaged is not the same as not finished
    return None


def load_comparisons(paths: Sequence[Path]) -> list[tuple[Comparison, dict[str, list[Path]]]]:
    """Returns each comparison in those folders, with the folders of the finished runs of each variant.

    A path is the folder of a comparison, or of a run; runs that did the same work in the same mode and made the same
    checkpoints are a comparison, in which several of one system with the same settings are its repeats. Left out are
    runs that tried out settings, and those of a comparison that is named too.

    Raises:
        ConfigError: a folder is neither, or damaged; a run comes twice, also as a copy; or nothing is left.
    """
    loaded = [
        (comparison, {row.label: [path.resolve().parent / run for run in row.runs] for row in comparison.rows})
        for path in paths
        if is_compare(path)
        for comparison in (compare_planned(path, planned) for planned in read_compare(path).comparisons)
    ]
    theirs = {each.resolve() for _, folders in loaded for runs in folders.values() for each in runs}
    alone = [path for path in paths if not is_compare(path) and path.resolve() not in theirs]
    records = [(path, read_run(path)) for path in alone]
    compared = [(each, each.name) for _, folders in loaded for runs in folders.values() for each in runs]
    require_distinct([*compared, *((path, record.run_id) for path, record in records)])
    groups = _by_work(dict(records))
    loaded += [(compare_runs("", runs), runs) for runs in map(_by_variant, groups)]
    found = [(comparison, folders) for comparison, folders in loaded if comparison.runs]
    if not found:
        raise ConfigError(f"there is no finished run to compare in {', '.join(map(str, paths))}")
    return found


def require_distinct(runs: Iterable[tuple[Path, str]]) -> None:
    """Raises ConfigError if two of the folders hold the same run, by its id: a copy is no repeat."""
    seen: dict[str, Path] = {}
    for path, run_id in runs:
        if run_id in seen:
            raise ConfigError(
                f"{seen[run_id]} and {path} are the same run, {run_id}: name it once; a copy is no repeat"
            )
        seen[run_id] = path


def ratio_of(run: Path, base: Path) -> Ratio:
    """Returns the time of a run / the time of the same iterations in another.

    Raises:
        ConfigError: there are none, or they did not do the same work.
    """
    ours, theirs = MeasuredRun.read(run), MeasuredRun.read(base)
    require_same_work({str(base): theirs.record, str(run): ours.record})
    ratio = paired_ratio([ours.durations_s], [theirs.durations_s])
    if ratio is None:
        raise ConfigError(f"{run} and {base} measured no iteration in common; train longer")
    return ratio


# --- runs that were not planned together -------------------------------------------------------------------------


def _by_work(records: Mapping[Path, RunRecord]) -> list[dict[Path, RunRecord]]:
    """Returns groups of runs that can be compared; one without checkpoints belongs to all that did its work."""
    kinds = {
        path: (work_of(record), checkpoints_of(record))
        for path, record in records.items()
        if record.config.system.options.get("mu") != SWEEP
    }
    apart: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for work, checkpoints in kinds.values():
        if (work, checkpoints) not in apart:
            apart.append((work, checkpoints))
    with_checkpoints = [work for work, checkpoints in apart if checkpoints]
    return [
        {path: records[path] for path, kind in kinds.items() if kind in ((work, checkpoints), (work, {}))}
        for work, checkpoints in apart
        if checkpoints or work not in with_checkpoints
    ]


def _by_variant(records: Mapping[Path, RunRecord]) -> dict[str, list[Path]]:
    """Returns the runs by system, and by those settings that its runs do not all have alike."""
    runs: dict[str, list[Path]] = {}
    for path, record in records.items():
        settings = _own(record)
        alike = [_own(other) for other in records.values() if other.system == record.system]
        keys = sorted({key for other in alike for key in differing(settings, other)})
        label = ":".join((record.system, *(f"{key}={settings[key]}" for key in keys)))
        runs.setdefault(label, []).append(path)
    return runs


def _own(record: RunRecord) -> dict[str, Any]:
    """Returns the settings that tell variants of a system apart."""
    if record.system == BASE:
        return {}
    common = {*LENGTH, SYSTEM, f"{OPTIONS}.tuned_in"}
    sections = (*WORK, *PLACES)
    settings = flat_settings(record.config)
    return {
        key: value for key, value in settings.items() if key.partition(".")[0] not in sections and key not in common
    }
