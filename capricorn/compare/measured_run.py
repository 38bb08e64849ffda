"""One run as a comparison sees it: its record, its steady iterations and its losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from capricorn.compare.compare_record import BASE
from capricorn.records.samples import RunRecord, read_run
from capricorn.stats.run_samples import RunIteration, RunSamples
from capricorn.stats.run_summary import Summary, summary_of
from capricorn.units import Seconds

Losses: TypeAlias = Mapping[tuple[int, int], float]
"""Losses by iteration and rank."""


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """The measurements of one run, computed anew from its samples; of what is stored only the record is used."""

    record: RunRecord
    summary: Summary
    """Computed from the samples; the one in the record was computed by the version that ran."""
    verdict: str
    """`ok`, or what is wrong with the run, by that summary."""
    steady: list[RunIteration]
    """The iterations that count; none of those before the first checkpoint was due."""
    losses: Losses

    @property
    def durations_s(self) -> dict[int, Seconds]:
        """How long each of the iterations that count took."""
        return {each.iteration: each.duration_s for each in self.steady}

    @classmethod
    def read(cls, folder: Path) -> MeasuredRun:
        """Returns the run in that folder.

        Raises:
            ConfigError: there is none, or a file of it is damaged.
        """
        record = read_run(folder)
        samples = RunSamples.read(folder, record.config)
        losses = {(sample.iteration, sample.rank): sample.loss for sample in samples.lasting}
        summary, verdict = summary_of(samples, folder, record.config, record.environment.num_cpus)
        return cls(record, summary, verdict, _checkpointed(samples, record), losses)


def _checkpointed(samples: RunSamples, record: RunRecord) -> list[RunIteration]:
    """Returns the steady iterations that checkpoint: a system that watches the training first costs nothing yet."""
    if not is_checkpointing(record):
        return samples.steady
    first = min((each.iteration for each in samples.requested), default=float("inf"))
    return [each for each in samples.steady if each.iteration >= first]


def is_checkpointing(record: RunRecord) -> bool:
    """Returns whether the run was to keep checkpoints at all."""
    return record.system != BASE and record.config.system.every > 0


def loss_faults(runs: Sequence[MeasuredRun]) -> list[str]:
    """Returns in which runs the training went another way than in the first, and where it first did."""
    return [fault for run in runs[1:] if (fault := _first_difference(run, runs[0]))]


def _first_difference(run: MeasuredRun, base: MeasuredRun) -> str:
    for iteration, rank in sorted(run.losses.keys() & base.losses.keys()):
        ours, theirs = run.losses[iteration, rank], base.losses[iteration, rank]
        if ours.hex() != theirs.hex():  # what is no number equals itself
            return (
                f"losses differ: {run.record.system} has {ours!r} in iteration {iteration} on rank {rank}, "
                f"{base.record.system} {theirs!r} ({run.record.run_id}, {base.record.run_id})"
            )
    return ""
