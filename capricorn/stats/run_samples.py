"""The samples of a run as they count: of each iteration the last attempt, folded over ranks. Computes no summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from capricorn.config.scenario import Scenario
from capricorn.records.samples import (
    EVENTS,
    ITERATIONS,
    RECOVERIES,
    EventSample,
    IterationSample,
    RecoverySample,
    damage_in_words,
    read_samples,
)
from capricorn.stats.numbers import mean
from capricorn.units import Bytes, Seconds

SETTLING = 3
"""Checkpoints after which a system is taken to have settled."""


class RunIteration(NamedTuple):
    """One iteration of a whole run: its last attempt, folded over ranks."""

    iteration: int
    attempt: int
    duration_s: Seconds
    """It lasts as long as on its slowest rank; the stall likewise."""
    stall_s: Seconds
    loss: float
    """The mean of the ranks."""
    tokens: int
    """The sum of the ranks, as of the bytes."""
    sent_bytes: Bytes
    requested: bool
    latest_complete: int


@dataclass(frozen=True, slots=True)
class RunSamples:
    """The samples of a run: all of them, those that count, and the same folded over ranks."""

    samples: list[IterationSample]
    """Every sample of every attempt."""
    lasting: list[IterationSample]
    """Those that count: one of each rank and iteration done, of its last attempt."""
    iterations: list[RunIteration]
    """Every iteration done, in order."""
    steady: list[RunIteration]
    """The iterations after warm-up and after the first checkpoints, by which a system settles."""
    recoveries: list[RecoverySample]
    events: list[EventSample]
    notes: tuple[str, ...] = ()
    """Remarks on files of which lines are damaged."""

    @classmethod
    def read(cls, run_dir: Path, scenario: Scenario) -> RunSamples:
        """Returns the samples of a run folder, finished or not.

        Raises:
            ConfigError: a file of the folder cannot be read.
        """
        damaged: dict[str, list[int]] = {ITERATIONS: [], EVENTS: [], RECOVERIES: []}
        samples = list(read_samples(run_dir / ITERATIONS, IterationSample, damaged[ITERATIONS]))
        events = list(read_samples(run_dir / EVENTS, EventSample, damaged[EVENTS]))
        lasting = _lasting(samples, _newest_start(samples, events), scenario.topology.world_size)
        # The trainer asks any system by the interval alone, also the one that keeps nothing.
        iterations = [_folded(each, keeps=scenario.system.name != "none") for each in grouped(lasting, "iteration")]
        return cls(
            samples=samples,
            lasting=lasting,
            iterations=iterations,
            steady=_steady(iterations, scenario.train.warmup),
            recoveries=list(read_samples(run_dir / RECOVERIES, RecoverySample, damaged[RECOVERIES])),
            events=events,
            notes=tuple(f"{name}: {damage_in_words(lines)}" for name, lines in damaged.items() if lines),
        )

    @property
    def measured(self) -> list[IterationSample]:
        """The samples of which `steady` was folded."""
        steady = {each.iteration for each in self.steady}
        return [sample for sample in self.lasting if sample.iteration in steady]

    @property
    def requested(self) -> list[RunIteration]:
        """The iterations done of which a checkpoint was asked for."""
        return [each for each in self.iterations if each.requested]

    @property
    def num_done(self) -> int:
        """Iterations done; the last of them may have been restored though no rank lived to record it."""
        recorded = self.iterations[-1].iteration if self.iterations else 0
        return max(recorded, _newest_start(self.samples, self.events).iteration)


def grouped(samples: Iterable[IterationSample], key: str) -> list[list[IterationSample]]:
    """Returns the samples in groups that have that field alike, in the order of its values."""
    groups: dict[int, list[IterationSample]] = {}
    value_of = attrgetter(key)
    for sample in samples:
        groups.setdefault(value_of(sample), []).append(sample)
    return [groups[value] for value in sorted(groups)]


class _Start(NamedTuple):
    """The newest start of the job, and the iteration it was restored to; 0 is the initial state."""

    attempt: int
    iteration: int


def _newest_start(samples: Sequence[IterationSample], events: Sequence[EventSample]) -> _Start:
    starts = [_Start(event.attempt, event.iteration) for event in events if event.event == "resumed"]
    starts += [_Start(attempt, 0) for attempt in {sample.attempt for sample in samples}]
    return max(starts, default=_Start(0, 0))


def _lasting(samples: Sequence[IterationSample], start: _Start, num_ranks: int) -> list[IterationSample]:
    """Returns the samples of iterations whose effect lasts: not redone, not rolled back, and done by every rank.

    A rank that was killed between an iteration and its sample did that iteration all the same, if it was restored.
    """
    newest = [sample.iteration for sample in samples if sample.attempt == start.attempt]
    reached = max(newest, default=start.iteration)
    kept = [sample for sample in samples if sample.iteration <= reached]
    last = {sample.iteration: sample.attempt for sample in sorted(kept, key=attrgetter("attempt"))}
    found: dict[tuple[int, int], IterationSample] = {}
    for sample in kept:
        if sample.attempt == last[sample.iteration]:
            found.setdefault((sample.iteration, sample.rank), sample)
    num_found = Counter(iteration for iteration, _ in found)
    return [
        sample
        for (iteration, _), sample in found.items()
        if num_found[iteration] == num_ranks or iteration <= start.iteration
    ]


def _folded(samples: Sequence[IterationSample], *, keeps: bool) -> RunIteration:
    return RunIteration(
        iteration=samples[0].iteration,
        attempt=samples[0].attempt,
        duration_s=max(sample.duration_s for sample in samples),
        stall_s=max(sample.stall_s for sample in samples),
        loss=mean([sample.loss for sample in samples]),
        tokens=sum(sample.tokens for sample in samples),
        sent_bytes=sum(sample.sent_bytes for sample in samples),
        requested=keeps and any(sample.requested for sample in samples),
        latest_complete=max(sample.latest_complete for sample in samples),
    )


def _steady(iterations: Sequence[RunIteration], warmup: int) -> list[RunIteration]:
    """Returns the iterations after warm-up and after the first checkpoints, unless nothing else was measured.

    The first one allocates and connects; by how it and the next ones leave, a planner comes to know the link.
    """
    measured = [each for each in iterations if each.iteration > warmup]
    settling = [each.iteration for each in iterations if each.requested][:SETTLING]
    return [each for each in measured if each.iteration > max(settling, default=0)] or measured
