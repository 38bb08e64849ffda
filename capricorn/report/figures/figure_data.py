"""The data that exported figures show, read from the raw samples of the runs of a comparison. Draws nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from capricorn.compare.comparison import Comparison, ComparisonRow
from capricorn.compare.measured_run import MeasuredRun
from capricorn.errors import ConfigError
from capricorn.records.samples import LOADS, OPS, LoadSample, OpSample, read_samples
from capricorn.stats.lanes import timelines
from capricorn.units import Bytes, Seconds


@dataclass(frozen=True, slots=True)
class Shown:
    """A system of a comparison with what its runs measured."""

    row: ComparisonRow
    folders: Sequence[Path]
    runs: Sequence[MeasuredRun]

    @property
    def label(self) -> str:
        return self.row.label

    @property
    def run_ids(self) -> tuple[str, ...]:
        return tuple(run.record.run_id for run in self.runs)

    @property
    def durations_s(self) -> npt.NDArray[np.float64]:
        """How long each steady iteration of its runs took."""
        return np.array([each.duration_s for run in self.runs for each in run.steady])

    @property
    def stalls_s(self) -> npt.NDArray[np.float64]:
        """How long training waited in each steady iteration of its runs."""
        return np.array([each.stall_s for run in self.runs for each in run.steady])


def read_shown(comparison: Comparison, folders: Mapping[str, Sequence[Path]]) -> list[Shown]:
    """Returns the systems of a comparison that measured something, in its order.

    Raises:
        ConfigError: a run is damaged, or was made in another mode than the comparison.
    """
    shown = [_read(row, folders.get(row.label, ()), comparison) for row in comparison.rows]
    return [each for each in shown if len(each.durations_s)]


def _read(row: ComparisonRow, folders: Sequence[Path], comparison: Comparison) -> Shown:
    runs = [MeasuredRun.read(folder) for folder in folders]
    for run in runs:
        if run.record.mode != comparison.mode:
            raise ConfigError(
                f"run {run.record.run_id} is {run.record.mode}, its comparison {comparison.mode}: never shown together"
            )
    return Shown(row, folders, runs)


# --- memory ------------------------------------------------------------------------------------------------------


class Memory(NamedTuple):
    """The most that all ranks together took, in the run that took most."""

    rss_bytes: Bytes
    store_bytes: Bytes


def memory_of(shown: Shown) -> Memory:
    """Returns the memory of the run of a system that took most."""
    return max((Memory(run.summary["peak_rss_bytes"], run.summary["store_bytes"] or 0) for run in shown.runs), key=sum)


# --- timelines ---------------------------------------------------------------------------------------------------


class Timeline(NamedTuple):
    """The ops and transfers of one rank of one run in one iteration."""

    run_id: str
    iteration: int
    rank: int
    duration_s: Seconds
    """How long the iteration lasted on its slowest rank."""
    ops: Sequence[OpSample]


def typical_timelines(systems: Sequence[Shown]) -> dict[str, Timeline]:
    """Returns by label one sampled iteration of the first rank: that which took nearest to its usual time.

    It is the same iteration of all systems, of whichever of their runs, if there is one that all have sampled.
    """
    usual_s = {each.label: float(np.median(each.durations_s)) for each in systems}
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
    """Returns how far the one is from the other: half and double are equally far."""
    return abs(math.log(duration_s / usual_s))


def _sampled(shown: Shown, usual_s: Seconds) -> dict[int, Timeline]:
    """Returns by iteration its most usual timeline in any run."""
    best: dict[int, Timeline] = {}
    for folder, run in zip(shown.folders, shown.runs, strict=True):
        for iteration, timeline in _sampled_in(folder, run).items():
            other = best.setdefault(iteration, timeline)
            best[iteration] = min(other, timeline, key=lambda each: _unusual(each.duration_s, usual_s))
    return best


def _sampled_in(folder: Path, run: MeasuredRun) -> dict[int, Timeline]:
    """Returns by steady iteration the timeline of the first rank; of a redone one the last."""
    first = min((rank for _, rank in run.losses), default=0)
    durations_s = run.durations_s
    found: dict[int, Timeline] = {}
    for ops in timelines(read_samples(folder / OPS, OpSample)):
        iteration, rank = ops[0].iteration, ops[0].rank
        if rank == first and iteration in durations_s:
            found[iteration] = Timeline(run.record.run_id, iteration, rank, durations_s[iteration], ops)
    return found


# --- loads -------------------------------------------------------------------------------------------------------


class LayerLoads(NamedTuple):
    """Shares of the tokens of one layer, of the run with this id."""

    run_id: str
    layer: int
    first_iteration: int
    share_EI: npt.NDArray[np.float64]
    """[E, I] experts and iterations; not a number where an iteration has no record."""
    skew: float
    """Tokens of the busiest expert / mean of all, averaged over iterations."""


def most_skewed(systems: Sequence[Shown]) -> LayerLoads | None:
    """Returns the loads of the layer whose busiest expert has most, in the first run that recorded any."""
    for shown in systems:
        for folder, run in zip(shown.folders, shown.runs, strict=True):
            if layers := _loads(folder, run.record.run_id):
                return max(layers, key=lambda loads: loads.skew)
    return None


def _loads(folder: Path, run_id: str) -> list[LayerLoads]:
    """Returns the loads of each layer, of a redone iteration the last."""
    tokens: dict[int, dict[int, list[int]]] = {}
    for sample in read_samples(folder / LOADS, LoadSample):
        if sum(sample.tokens_per_expert):
            tokens.setdefault(sample.layer, {})[sample.iteration] = sample.tokens_per_expert
    return [_layer_loads(run_id, layer, tokens[layer]) for layer in sorted(tokens)]


def _layer_loads(run_id: str, layer: int, tokens: Mapping[int, Sequence[int]]) -> LayerLoads:
    iterations = sorted(tokens)
    tokens_EI = np.array([tokens[iteration] for iteration in iterations], float).T
    share_EI = tokens_EI / tokens_EI.sum(0)
    whole_EI = np.full((len(share_EI), iterations[-1] - iterations[0] + 1), np.nan)
    whole_EI[:, np.array(iterations) - iterations[0]] = share_EI
    skew = float((share_EI.max(0) * len(share_EI)).mean())
    return LayerLoads(run_id, layer, iterations[0], whole_EI, skew)
