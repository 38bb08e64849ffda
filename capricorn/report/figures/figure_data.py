"""What the exported figures show, read from the raw samples of the runs of a comparison. Draws nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from capricorn.compare.measured import Measured
from capricorn.compare.results import Comparison, ComparisonRow
from capricorn.errors import ConfigError
from capricorn.records.samples import LOADS, OPS, LoadSample, OpSample, read_samples
from capricorn.stats.lanes import timelines
from capricorn.stats.run_summary import summarize
from capricorn.units import Bytes, Seconds


@dataclass(frozen=True, slots=True)
class Shown:
    """A system of a comparison with what its runs measured."""

    row: ComparisonRow
    folders: Sequence[Path]
    runs: Sequence[Measured]

    @property
    def label(self) -> str:
        return self.row.label

    @property
    def run_ids(self) -> tuple[str, ...]:
        return tuple(run.record.run_id for run in self.runs)

    def steady(self, column: str) -> pd.Series[Any]:
        """That column of the steady iterations of all its runs."""
        return pd.concat([run.steady[column] for run in self.runs], ignore_index=True).dropna()


def read_shown(comparison: Comparison, folders: Mapping[str, Sequence[Path]]) -> list[Shown]:
    """The systems of a comparison that measured something, in its order.

    Raises:
        ConfigError: a run is damaged, or was made in another mode than the comparison.
    """
    shown = [_read(row, folders.get(row.label, ()), comparison) for row in comparison.rows]
    return [each for each in shown if each.runs and len(each.steady("duration_s"))]


def _read(row: ComparisonRow, folders: Sequence[Path], comparison: Comparison) -> Shown:
    runs = [Measured.read(folder) for folder in folders]
    for run in runs:
        if run.record.mode != comparison.mode:
            raise ConfigError(
                f"run {run.record.run_id} is {run.record.mode}, its comparison {comparison.mode}: never shown together"
            )
    return Shown(row, folders, runs)


# --- memory ------------------------------------------------------------------------------------------------------


class Memory(NamedTuple):
    """At the most, of all ranks together, in the run that took most."""

    rss_bytes: Bytes
    store_bytes: Bytes


def memory_of(shown: Shown) -> Memory:
    """Computed from the samples and from the sizes of the stores."""
    summaries = [summarize(folder, run.record.config)[0] for folder, run in zip(shown.folders, shown.runs, strict=True)]
    each = [Memory(summary["peak_rss_bytes"], summary["store_bytes"] or 0) for summary in summaries]
    return max(each, key=sum)


# --- timelines ---------------------------------------------------------------------------------------------------


class Timeline(NamedTuple):
    """What one rank of one run did in one iteration."""

    run_id: str
    iteration: int
    rank: int
    duration_s: Seconds
    """Of the iteration, on its slowest rank."""
    ops: Sequence[OpSample]


def typical_timelines(systems: Sequence[Shown]) -> dict[str, Timeline]:
    """By label, one sampled iteration of the first rank: that in which it took nearest to its usual time.

    It is the same iteration of all systems, of whichever of their runs, if there is one that all have sampled.
    """
    usual_s = {each.label: float(each.steady("duration_s").median()) for each in systems}
    sampled = {each.label: found for each in systems if (found := _sampled(each, usual_s[each.label]))}

    def most_usual(labels: Iterable[str], iterations: Iterable[int]) -> int:
        def unusual(iteration: int) -> float:
            return sum(_unusual(sampled[label][iteration].duration_s, usual_s[label]) for label in labels)

        return min(sorted(iterations), key=unusual)

    common = set.intersection(*map(set, sampled.values())) if sampled else set()
    if common:
        iteration = most_usual(list(sampled), common)
        return {label: each[iteration] for label, each in sampled.items()}
    return {label: each[most_usual([label], each)] for label, each in sampled.items()}


def _unusual(duration_s: Seconds, usual_s: Seconds) -> float:
    """How far the one is from the other: half and double are equally far."""
    return abs(math.log(duration_s / usual_s))


def _sampled(shown: Shown, usual_s: Seconds) -> dict[int, Timeline]:
    """By iteration its most usual timeline in any run."""
    best: dict[int, Timeline] = {}
    for folder, run in zip(shown.folders, shown.runs, strict=True):
        for iteration, timeline in _sampled_in(folder, run).items():
            other = best.setdefault(iteration, timeline)
            best[iteration] = min(other, timeline, key=lambda each: _unusual(each.duration_s, usual_s))
    return best


def _sampled_in(folder: Path, run: Measured) -> dict[int, Timeline]:
    """By steady iteration the timeline of the first rank; of a redone one the last."""
    first = min((rank for _, rank in run.losses), default=0)
    durations_s = dict(zip(map(int, run.durations_s.index), map(float, run.durations_s), strict=True))
    found: dict[int, Timeline] = {}
    for ops in timelines(read_samples(folder / OPS, OpSample)):
        iteration, rank = ops[0].iteration, ops[0].rank
        if rank == first and iteration in durations_s:
            found[iteration] = Timeline(run.record.run_id, iteration, rank, durations_s[iteration], ops)
    return found


# --- loads -------------------------------------------------------------------------------------------------------


class Loads(NamedTuple):
    """Shares of the tokens of one layer, of the run with this id."""

    run_id: str
    layer: int
    first_iteration: int
    share_EI: npt.NDArray[np.float64]
    """By expert and iteration; not a number where an iteration has no record."""
    skew: float
    """Tokens of the busiest expert / mean of all, averaged over iterations."""


def most_skewed(systems: Sequence[Shown]) -> Loads | None:
    """The loads of the layer whose busiest expert has most, in the first run that recorded any."""
    for shown in systems:
        for folder, run in zip(shown.folders, shown.runs, strict=True):
            if layers := _loads(folder):
                layer = max(sorted(layers), key=lambda layer: _skew(layers[layer]))
                frame = layers[layer]
                first, last = int(frame.columns[0]), int(frame.columns[-1])
                whole = frame.reindex(columns=range(first, last + 1))
                shares_EI = whole.to_numpy(float)
                return Loads(run.record.run_id, layer, first, shares_EI, _skew(frame))
    return None


def _loads(folder: Path) -> dict[int, pd.DataFrame]:
    """By layer, the share of each expert (rows) in each iteration (columns); of a redone iteration the last."""
    tokens: dict[int, dict[int, list[int]]] = {}
    for sample in read_samples(folder / LOADS, LoadSample):
        if sum(sample.tokens_per_expert):
            tokens.setdefault(sample.layer, {})[sample.iteration] = sample.tokens_per_expert
    frames = {layer: pd.DataFrame(each).sort_index(axis=1) for layer, each in tokens.items()}
    return {layer: frame / frame.sum() for layer, frame in frames.items()}


def _skew(share_EI: pd.DataFrame) -> float:
    return float((share_EI.max() * len(share_EI)).mean())
