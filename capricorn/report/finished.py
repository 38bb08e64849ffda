"""Comparisons of finished runs, found in the folders of runs and of comparisons; computes no figure itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from capricorn.comparison import (
    LENGTH,
    SYSTEM,
    WORK,
    PlannedComparison,
    differing,
    is_compare,
    is_done,
    place_of,
    read_compare,
    require_same_work,
    settings_of,
    work_of,
)
from capricorn.errors import ConfigError
from capricorn.records import RunRecord, read_run
from capricorn.report.comparison import BASE, Comparison, compare_runs, compare_within
from capricorn.report.measured import Measured
from capricorn.report.paired import Ratio, paired_ratio
from capricorn.settings import SWEEP

PLACES = ("store", "launch")
"""Sections that say where things lie and start, and do not tell one variant from another."""


def compare_planned(folder: Path, planned: PlannedComparison) -> Comparison:
    """The comparison as far as it has come; what is missing of it is among its faults.

    Raises:
        ConfigError: a run is damaged, or they did not do the same work in the same mode.
    """
    folders = folders_of(folder, planned)
    comparison = compare_within(planned.label, folders, planned.scenario)
    num_done = sum(each is not None for runs in folders.values() for each in runs)
    if num_done == len(planned.runs):
        return comparison
    failures = [f"{run.variant}, repeat {run.repeat}: {run.failure}" for run in planned.runs if run.failure]
    missing = f"{num_done} of {len(planned.runs)} runs are done"
    return comparison.model_copy(update={"valid": False, "faults": (*comparison.faults, *failures, missing)})


def folders_of(folder: Path, planned: PlannedComparison) -> dict[str, list[Path | None]]:
    """By label of a variant the folders of its runs by repeat; None where none is finished."""
    folders: dict[str, list[Path | None]] = {variant.label: [None] * planned.repeats for variant in planned.variants}
    for run in planned.runs:
        if is_done(folder, run):
            folders[run.variant][run.repeat - 1] = place_of(folder, run)
    return folders


def load_comparisons(paths: Sequence[Path]) -> list[tuple[Comparison, dict[str, list[Path]]]]:
    """Each comparison in those folders, with the finished runs of each variant.

    A path is the folder of a comparison, or of a run; runs that did the same work in the same mode make a comparison,
    in which several of one system with the same settings are its repeats. Left out are runs that tried out settings,
    and those of a comparison that is named too.

    Raises:
        ConfigError: a folder is neither, or damaged; or nothing is left.
    """
    loaded = [
        (compare_planned(path, planned), folders_of(path, planned))
        for path in paths
        if is_compare(path)
        for planned in read_compare(path).comparisons
    ]
    theirs = {each.resolve() for _, folders in loaded for runs in folders.values() for each in runs if each}
    alone = [path for path in dict.fromkeys(paths) if not is_compare(path) and path.resolve() not in theirs]
    groups = _by_work({path: read_run(path) for path in alone})
    loaded += [(compare_runs("", runs), dict(runs)) for runs in map(_by_variant, groups)]
    found = [
        (comparison, {variant: [each for each in runs if each] for variant, runs in folders.items()})
        for comparison, folders in loaded
        if comparison.runs
    ]
    if not found:
        raise ConfigError(f"there is no finished run to compare in {', '.join(map(str, paths))}")
    return found


def ratio_of(run: Path, base: Path) -> Ratio:
    """Time of a run / time of the same iterations in another.

    Raises:
        ConfigError: there are none, or they did not do the same work.
    """
    ours, theirs = Measured.read(run), Measured.read(base)
    require_same_work({str(base): theirs.record, str(run): ours.record})
    ratio = paired_ratio([ours.durations_s], [theirs.durations_s])
    if ratio is None:
        raise ConfigError(f"{run} and {base} measured no iteration in common; train longer")
    return ratio


# --- runs that were not planned together -------------------------------------------------------------------------


def _by_work(records: Mapping[Path, RunRecord]) -> list[dict[Path, RunRecord]]:
    groups: list[dict[Path, RunRecord]] = []
    for path, record in records.items():
        if record.config.gemini.mu == SWEEP:
            continue
        for group in groups:
            if work_of(next(iter(group.values()))) == work_of(record):
                group[path] = record
                break
        else:
            groups.append({path: record})
    return groups


def _by_variant(records: Mapping[Path, RunRecord]) -> dict[str, list[Path | None]]:
    """The runs by system, and by those settings that its runs do not all have alike."""
    runs: dict[str, list[Path | None]] = {}
    for path, record in records.items():
        settings = _own(record)
        alike = [_own(other) for other in records.values() if other.system == record.system]
        keys = sorted({key for other in alike for key in differing(settings, other)})
        label = ":".join((record.system, *(f"{key}={settings[key]}" for key in keys)))
        runs.setdefault(label, []).append(path)
    return runs


def _own(record: RunRecord) -> dict[str, Any]:
    """The settings that tell variants of a system apart."""
    if record.system == BASE:
        return {}
    common = {*LENGTH, SYSTEM, "gemini.tuned_in"}
    sections = (*WORK, *PLACES)
    settings = settings_of(record.config)
    return {
        key: value for key, value in settings.items() if key.partition(".")[0] not in sections and key not in common
    }
