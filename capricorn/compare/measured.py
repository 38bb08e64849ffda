"""One run as a comparison sees it: its record, its steady iterations and its losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd

from capricorn.compare.compare_record import BASE
from capricorn.records.samples import RunRecord, read_run
from capricorn.stats.run_summary import RunSamples, Summary, summary_of

Losses: TypeAlias = Mapping[tuple[int, int], float]
"""By iteration and rank."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What one run measured; nothing but the record itself comes from what is stored there."""

    record: RunRecord
    summary: Summary
    """Of the samples, as the one that is stored was when they were."""
    verdict: str
    """`ok`, or what is wrong with the run, by that summary."""
    steady: pd.DataFrame
    """One row per iteration that counts, folded over ranks; none of those before the first checkpoint was due."""
    losses: Losses

    @property
    def durations_s(self) -> pd.Series[Any]:
        return self.steady["duration_s"]

    @classmethod
    def read(cls, folder: Path) -> Measured:
        """The run in that folder.

        Raises:
            ConfigError: there is none, or a file of it is damaged.
        """
        record = read_run(folder)
        samples = RunSamples.read(folder, record.config)
        lasting = samples.lasting[["iteration", "rank", "loss"]].itertuples(index=False)
        losses = {(int(iteration), int(rank)): float(loss) for iteration, rank, loss in lasting}
        summary, verdict = summary_of(samples, folder, record.config, record.environment.num_cpus)
        return cls(record, summary, verdict, _checkpointed(samples, record), losses)


def _checkpointed(samples: RunSamples, record: RunRecord) -> pd.DataFrame:
    """The steady iterations; a system that watches the training first does not checkpoint yet, which costs nothing."""
    if not is_checkpointing(record):
        return samples.steady
    requested = samples.iterations.index[samples.iterations["requested"]]
    first = requested.min() if len(requested) else float("inf")
    return samples.steady[samples.steady.index >= first]


def is_checkpointing(record: RunRecord) -> bool:
    """Whether the run was to keep checkpoints at all."""
    return record.system != BASE and record.config.system.every > 0


def loss_faults(runs: Sequence[Measured]) -> list[str]:
    """In which runs the training went another way than in the first, and where it first did."""
    return [fault for run in runs[1:] if (fault := _first_difference(run, runs[0]))]


def _first_difference(run: Measured, base: Measured) -> str:
    for iteration, rank in sorted(run.losses.keys() & base.losses.keys()):
        ours, theirs = run.losses[iteration, rank], base.losses[iteration, rank]
        if ours != theirs:
            return (
                f"losses differ: {run.record.system} has {ours!r} in iteration {iteration} on rank {rank}, "
                f"{base.record.system} {theirs!r} ({run.record.run_id}, {base.record.run_id})"
            )
    return ""
