"""What the displays show of a run: its newest iteration folded over ranks, and the time left. Shown, never recorded."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from statistics import median

from capricorn.config.scenario import Scenario
from capricorn.records.samples import IterationSample
from capricorn.units import Bytes, BytesPerSecond, Seconds

RECENT = 10


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One iteration as all ranks together saw it."""

    iteration: int
    loss: float
    duration_s: Seconds
    stall_s: Seconds
    latest_local: int
    latest_complete: int
    sent_bytes_per_s: BytesPerSecond
    rss_bytes: Bytes
    failed_saves: int

    @property
    def lag(self) -> int:
        """Iterations that the newest complete checkpoint is behind."""
        return self.iteration - self.latest_complete


class Progress:
    """Collects samples as ranks report them, in any order."""

    def __init__(self, scenario: Scenario) -> None:
        self.iterations = scenario.train.iterations
        self.latest: Snapshot | None = None
        self.not_finite_from: int | None = None
        """The first iteration whose loss was not finite, of all that were shown."""
        self._num_ranks = scenario.topology.world_size
        self._attempt = 0
        self._pending: dict[int, dict[int, IterationSample]] = {}
        self._ends_s: deque[Seconds] = deque(maxlen=RECENT)
        self._failed_saves = 0

    @property
    def iteration(self) -> int:
        return self.latest.iteration if self.latest else 0

    def add(self, sample: IterationSample) -> Snapshot | None:
        """Returns the iteration that this sample completes, if it is the last rank's."""
        if sample.attempt > self._attempt:
            self._attempt = sample.attempt
            self._pending.clear()
            self._ends_s.clear()
        ranks = self._pending.setdefault(sample.iteration, {})
        ranks[sample.rank] = sample
        self._failed_saves += sample.failed_saves
        if len(ranks) < self._num_ranks:
            return None
        del self._pending[sample.iteration]
        self._ends_s.append(sample.at_s)
        self.latest = self._fold(list(ranks.values()))
        if self.not_finite_from is None and not isfinite(self.latest.loss):
            self.not_finite_from = self.latest.iteration
        return self.latest

    def seconds_left(self) -> Seconds | None:
        """Returns the time that is left at the pace of the latest iterations; None before there are two."""
        ends = list(self._ends_s)
        paces = [after - before for before, after in pairwise(ends)]
        return (self.iterations - self.iteration) * median(paces) if paces else None

    def _fold(self, ranks: list[IterationSample]) -> Snapshot:
        duration_s = max(sample.duration_s for sample in ranks)
        return Snapshot(
            iteration=ranks[0].iteration,
            loss=sum(sample.loss for sample in ranks) / len(ranks),
            duration_s=duration_s,
            stall_s=max(sample.stall_s for sample in ranks),
            latest_local=min(sample.latest_local for sample in ranks),
            latest_complete=max(sample.latest_complete for sample in ranks),
            sent_bytes_per_s=sum(sample.sent_bytes for sample in ranks) / duration_s if duration_s else 0.0,
            rss_bytes=sum(sample.rss_bytes for sample in ranks),
            failed_saves=self._failed_saves,
        )
