"""A comparison of systems and how far it has come: variants, planned runs, and the record it goes on from.

Starts nothing; knows no torch and none of the samples that runs record.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, Self

from pydantic import Field

from capricorn.config.fields import FrozenModel
from capricorn.config.own_code import absolute
from capricorn.config.resolve import canonical_key, note_older
from capricorn.config.scenario import Scenario
from capricorn.errors import ConfigError
from capricorn.files import named, open_descriptor
from capricorn.records.samples import RunRecord, read_record, read_run, write_record
from capricorn.systems.registry import SYSTEMS, find, short_name
from capricorn.systems.settings import OPTIONS, flat_settings, override

SCHEMA_VERSION = 1
COMPARE, LOCK = "compare.json", "compare.lock"

WORK = ("model", "train", "data", "cluster", "loads")
"""Sections that say what is trained, where and on what; systems are compared on the same."""
LENGTH = ("train.iterations", "train.warmup", "train.timeline_every")
"""Fields of these sections that may differ: only iterations that both have measured are compared."""
SYSTEM = "system.name"
BASE = "none"
"""The system that makes no checkpoints, whatever its settings say of them."""
CHECKPOINTS = ("system.every", "system.replicas")
"""Fields that must be equal among systems that make checkpoints, or be asked for by one of them."""
KEPT = ("requested", "effective")
"""Figures of a run's summary: its checkpoints, and those that became complete."""
SPELLING = "none,capricorn,gemini:mu=0.9"


class Variant(FrozenModel):
    """A system with settings of its own, which go before those that all share."""

    system: str
    assignments: tuple[str, ...] = ()
    """`section.field=value`, as for --set; an option of the system may leave out `system.options.`."""

    @property
    def label(self) -> str:
        """Names it in tables: as it is spelled, `gemini:mu=0.9`, without the module or file of the system."""
        return ":".join((short_name(self.system), *self.assignments))

    @property
    def spelling(self) -> str:
        """The word for --systems that means the same in every folder."""
        return ":".join((self.system, *self.assignments))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Returns the variant that is spelled `SYSTEM[:KEY=VALUE]...`

        Raises:
            ConfigError: a part is empty or not key=value.
        """
        system, *assignments = map(str.strip, text.split(":"))
        if system not in SYSTEMS and assignments and assignments[0] and "=" not in assignments[0]:
            system = f"{system}:{assignments.pop(0)}"  # MODULE:CLASS or FILE.py:CLASS
        if not system:
            raise ConfigError(f"--systems: {text!r} names no system; write it as in {SPELLING}")
        for assignment in assignments:
            if not all(assignment.partition("=")):
                raise ConfigError(f"--systems {text!r}: {assignment!r} is not key=value, as in gemini:mu=0.9")
        return cls(system=absolute(system), assignments=tuple(assignments))

    def of(self, scenario: Scenario) -> Scenario:
        """Returns the scenario under this variant.

        Raises:
            ConfigError: a key is unknown, its value does not fit, or it would change the work.
        """
        for assignment in self.assignments:
            key = assignment.partition("=")[0]
            if key == SYSTEM:
                raise ConfigError(f"--systems {self.label!r}: {SYSTEM} is the name before the first colon")
            if key.partition(".")[0] in WORK and key not in LENGTH:
                raise ConfigError(
                    f"--systems {self.label!r} would do other work than the others; use --set {assignment} for all"
                )
        try:
            return override(scenario, (f"{SYSTEM}={self.system}", *map(_whole, self.assignments)))
        except ConfigError as error:
            raise ConfigError(f"--systems {self.label!r}: {str(error).removeprefix('--set ')}") from None


def parse_variants(texts: Iterable[str]) -> tuple[Variant, ...]:
    """Returns the variants that are spelled so.

    Raises:
        ConfigError: there is none, or one is misspelled or comes twice.
    """
    variants = [Variant.parse(text) for text in texts]
    if not variants:
        raise ConfigError(f"--systems names no system; write it as in {SPELLING}")
    note_older(assignment for variant in variants for assignment in variant.assignments)
    labels = [variant.label for variant in variants]
    twice = [label for number, label in enumerate(labels) if label in labels[:number]]
    if twice:
        raise ConfigError(f"--systems names {twice[0]!r} twice; --repeats says how often each of them runs")
    return tuple(variants)


def own_options(assignments: Iterable[str], variants: Iterable[Variant]) -> list[str]:
    """Returns those `key=value` whose key is an option of one of the systems, as settings that all may share."""
    fields = {field for variant in variants for field in _fields(variant)}
    return [_whole(each) for each in assignments if each.partition("=")[0] in fields]


def check_shared_options(scenario: Scenario, variants: Iterable[Variant]) -> None:
    """Raises ConfigError for an option that all share and none of the systems has."""
    fields = {field for variant in variants for field in _fields(variant)}
    for key in scenario.system.options:
        if key not in fields:
            raise ConfigError(f"{OPTIONS}.{key}: none of the systems has such an option; they have {_words(fields)}")


def _fields(variant: Variant) -> Iterable[str]:
    model = find(variant.system).settings_model()
    return () if model is None else model.model_fields


def _words(fields: Iterable[str]) -> str:
    return ", ".join(sorted(fields)) or "none"


def setting_key(assignment: str) -> str:
    """Returns the whole key of a `key=value` of a variant, as it is spelled today."""
    return canonical_key(_whole(assignment).partition("=")[0])


def _whole(assignment: str) -> str:
    """The setting with its section: `system.options.mu=0.9` for `mu=0.9`."""
    return assignment if "." in assignment.partition("=")[0] else f"{OPTIONS}.{assignment}"


# --- the record --------------------------------------------------------------------------------------------------


class PlannedRun(FrozenModel):
    """One run of a comparison."""

    variant: str
    """The label of the variant."""
    repeat: int
    """Number of the repeat, from 1."""
    run_id: str = ""
    """The id of its newest start; empty before the first."""
    failure: str = ""
    """The reason why that start ended early, in one sentence."""
    finished: bool | None = None
    """Whether that start came to its end, rather than being interrupted; None is not known."""


class Tuned(FrozenModel):
    """Settings that a variant was given after they had been tried out."""

    assignments: tuple[str, ...]
    run_id: str
    """The run that tried them."""


class PlannedComparison(FrozenModel):
    """Variants that do the same work, and the runs that takes, in their order."""

    label: str
    scenario: Scenario
    """Resolved; what all share."""
    variants: tuple[Variant, ...]
    repeats: int
    runs: tuple[PlannedRun, ...]
    tuned: dict[str, Tuned] = Field(default_factory=dict)
    """Tuned settings by label of the variant."""

    @classmethod
    def plan(cls, label: str, scenario: Scenario, variants: Sequence[Variant], repeats: int) -> Self:
        """Returns the comparison before its first run.

        Runs go there and back (A B B A ...), so that a machine that gets slower does so for all alike.

        Args:
            label: what tells it from the other comparisons of the same record; may be empty.
            scenario: what all variants share, resolved.
            variants: the systems with their settings.
            repeats: how often each of them runs.
        """
        runs = tuple(
            PlannedRun(variant=variant.label, repeat=repeat)
            for repeat in range(1, repeats + 1)
            for variant in (variants if repeat % 2 else reversed(variants))
        )
        return cls(label=label, scenario=scenario, variants=tuple(variants), repeats=repeats, runs=runs)

    def scenario_of(self, variant: str) -> Scenario:
        """Returns what the variant of that label runs, tuned if it was."""
        found = next(each for each in self.variants if each.label == variant)
        scenario = found.of(self.scenario)
        return override(scenario, self.tuned[variant].assignments) if variant in self.tuned else scenario

    def with_run(self, run: PlannedRun) -> Self:
        """Returns the comparison with that run in the place of the one before."""
        runs = tuple(run if (old.variant, old.repeat) == (run.variant, run.repeat) else old for old in self.runs)
        return self.model_copy(update={"runs": runs})

    def with_tuned(self, variant: str, tuned: Tuned) -> Self:
        return self.model_copy(update={"tuned": self.tuned | {variant: tuned}})


class CompareRecord(FrozenModel):
    """`compare.json`: comparisons that were started by one command; their runs lie beside its folder."""

    schema_version: int = SCHEMA_VERSION
    compare_id: str
    started_at: str
    """UTC, ISO 8601."""
    comparisons: tuple[PlannedComparison, ...]

    def with_comparison(self, number: int, comparison: PlannedComparison) -> Self:
        before, after = self.comparisons[:number], self.comparisons[number + 1 :]
        return self.model_copy(update={"comparisons": (*before, comparison, *after)})


def read_compare(folder: Path, *, goes_on: bool = False) -> CompareRecord:
    """Returns the record of a comparison's folder; `goes_on` is whether its missing runs are to be made.

    Raises:
        ConfigError: there is none, it is damaged, or a newer version has written what this one cannot read, or would
            lose.
    """
    return read_record(folder / COMPARE, CompareRecord, SCHEMA_VERSION, "comparison", goes_on=goes_on)


def write_compare(folder: Path, record: CompareRecord) -> None:
    """Writes `compare.json` so that a reader sees the old one or the new one, never a part.

    Raises:
        CapricornError: there is no room for it.
    """
    with named(f"make {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    write_record(folder / COMPARE, record)


def is_compare(folder: Path) -> bool:
    """Returns whether that is the folder of a comparison."""
    return (folder / COMPARE).exists()


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Holds the folder of a comparison against all others that would carry it out; ends with us if we are killed.

    Raises:
        ConfigError: another one does, or the folder cannot be written to.
    """
    with named(f"write {folder / LOCK}"):
        lock = os.fdopen(open_descriptor(folder / LOCK, os.O_RDWR | os.O_CREAT), "w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"{folder} is being carried out by another command; wait until that is over, or end it"
            ) from None
        yield


def folder_of(folder: Path, run: PlannedRun) -> Path:
    """Returns the folder of that run of the comparison, once it has started."""
    return folder.resolve().parent / run.run_id


def is_done(folder: Path, run: PlannedRun) -> bool:
    """Returns whether that run of the comparison came to its end, did all its iterations and did not fail.

    What else may be wrong with it, its verdict says; it would be so again. Where it is not known whether it came to its
    end, missing checkpoints are taken to say that it did not. A run whose record is damaged is to be made again.
    """
    if not run.run_id or run.failure or run.finished is False:
        return False
    try:
        record = read_run(folder_of(folder, run))
    except ConfigError:
        return False
    num_iterations, requested, effective = (record.summary.get(key, 0) for key in ("iterations", *KEPT))
    is_whole: bool = num_iterations >= record.config.train.iterations
    return is_whole and (run.finished is True or effective >= requested)


def missing_runs(folder: Path, planned: PlannedComparison) -> list[PlannedRun]:
    """Returns the runs of the comparison that are still to be made, in their order."""
    return [run for run in planned.runs if not is_done(folder, run)]


# --- the same work -----------------------------------------------------------------------------------------------


def differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Returns the keys of which the two do not have the same value."""
    return [key for key in ours if ours[key] != theirs.get(key)]


def work_of(record: RunRecord) -> dict[str, Any]:
    """Returns what must be equal of runs that are compared: mode, model, data, seed, loads, cluster, links, faults."""
    settings = flat_settings(record.config)
    work = {key: value for key, value in settings.items() if key.partition(".")[0] in WORK and key not in LENGTH}
    shape = {"cluster.expert_parallel": record.config.topology.expert_parallel}  # whether or not somebody chose it
    return {"mode": record.mode, **work, **shape, "faults": [str(fault) for fault in record.config.faults]}


def checkpoints_of(record: RunRecord) -> dict[str, Any]:
    """Returns how often a run makes a checkpoint, and of how many copies; nothing for one that makes none."""
    settings = flat_settings(record.config)
    return {} if record.system == BASE else {key: settings[key] for key in CHECKPOINTS}


def require_same_work(records: Mapping[str, RunRecord]) -> None:
    """Raises ConfigError if two of the records, by what they are called, are of different work, naming the first."""
    _require_same({name: work_of(record) for name, record in records.items()}, "of the same work")


def require_same_checkpoints(records: Mapping[str, RunRecord]) -> None:
    """Raises ConfigError if two of those that make checkpoints make them differently, naming the first difference."""
    asked = {name: checkpoints_of(record) for name, record in records.items()}
    _require_same({name: each for name, each in asked.items() if each}, "that make the same checkpoints")


def _require_same(facts: Mapping[str, Mapping[str, Any]], which: str) -> None:
    for (name, first), (other_name, other) in product(list(facts.items())[:1], facts.items()):
        for key in differing(first, other):
            raise ConfigError(
                f"only runs {which} can be compared: {key} is {first[key]} in {name} and {other[key]} in {other_name}"
            )
