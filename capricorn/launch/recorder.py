"""Writes what happens on one rank into the run folder: samples, timelines, loads, events."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from capricorn.config.fields import FrozenModel
from capricorn.emulation.pacer import Pacer
from capricorn.hooks import OpKey, TrainerHook
from capricorn.records.job_file import Job
from capricorn.records.samples import (
    EVENTS,
    ITERATIONS,
    LOADS,
    OPS,
    PACE,
    EventSample,
    IterationSample,
    LoadSample,
    OpSample,
    PaceSample,
    append,
    read_samples,
)
from capricorn.runtime.schedule.op_clock import Clock, CpuClock
from capricorn.systems.interface import CheckpointSystem, Counters, RestoreReport
from capricorn.trainer.loop import TrainedIteration
from capricorn.units import Bytes, Seconds

ROOM_PATIENCE_S: Final[Seconds] = 5.0
"""How long a full disk under the records holds a rank up before it ends the run."""
PERSISTS: Final = ("persisted", "failed_persists", "skipped_persists")


class Recorder(TrainerHook):
    """Listens to the trainer and writes between iterations, outside of what is timed."""

    def __init__(
        self,
        job: Job,
        rank: int,
        attempt: int,
        system: CheckpointSystem,
        pacer: Pacer | None,
        clock: Clock | None = None,
    ) -> None:
        """Writes nothing yet.

        Args:
            job: whose records they are.
            rank: of this process.
            attempt: counts the starts of the job.
            system: what is asked for what it has done.
            pacer: what is asked for how well computing was paced, if it is.
            clock: tells when an op is reached that was launched; by default at once, as on the CPU.
        """
        self._job, self._dir, self._rank, self._attempt, self._system = job, job.run_dir, rank, attempt, system
        self._pacer, self._clock = pacer, clock or CpuClock()
        self._tokens, self._num_experts = job.scenario.model.tokens_per_rank, job.scenario.model.num_experts
        self._every = job.scenario.system.every
        self._timeline_every = job.scenario.train.timeline_every
        self._before = Counters()
        self._loads: list[LoadSample] = []
        self._ops: list[tuple[OpKey, Seconds, Seconds]] = []
        self._open_ops: dict[OpKey, Seconds] = {}
        self._iteration, self._begin_s, self._is_sampled = 0, 0.0, False

    def on_iteration_begin(self, iteration: int) -> None:
        self._iteration, self._begin_s = iteration, time.perf_counter()
        self._is_sampled = iteration % self._timeline_every == 0

    def on_op_begin(self, op: OpKey) -> None:
        if self._is_sampled:
            self._clock.at(lambda now_s: self._open_ops.__setitem__(op, now_s))

    def on_op_end(self, op: OpKey) -> None:
        if self._is_sampled:
            self._clock.at(lambda now_s: self._ops.append((op, self._open_ops.pop(op), now_s)))

    def on_routed(self, layer: int, tokens_per_expert: Sequence[int]) -> None:
        if self._rank == 0:
            # Of all expert-parallel groups together, whose loads come one after the other.
            loads = [int(sum(tokens_per_expert[expert :: self._num_experts])) for expert in range(self._num_experts)]
            self._loads.append(LoadSample(iteration=self._iteration, layer=layer, tokens_per_expert=loads))

    def event(
        self,
        event: str,
        detail: str = "",
        *,
        iteration: int = 0,
        restored: RestoreReport | None = None,
        state_digest: str = "",
    ) -> None:
        """Writes an event of now, with what the system has done since the last sample."""
        now, before = self._system.counters(), self._before
        values = {"event": event, "at_s": self._job.now_s(), "attempt": self._attempt, "rank": self._rank}
        values |= {
            "iteration": iteration,
            "detail": detail,
            "state_digest": state_digest,
            "completed": tuple(self._system.take_completed()),
        }
        values |= {"staged_bytes": now.staged_bytes - before.staged_bytes}
        values |= {"sent_bytes": now.sent_bytes - before.sent_bytes} | _persists(now, before)
        if restored is not None:
            values |= {"sources": tuple(restored.sources), "agree_s": restored.agree_s}
            values |= {"fetch_s": restored.fetch_s, "load_s": restored.load_s}
        self._append(EVENTS, EventSample.model_validate(values))
        self._before = replace(now)

    def iteration(self, measured: TrainedIteration) -> None:
        """Writes the sample of a finished iteration, and what was collected during it."""
        now, before = self._system.counters(), self._before
        sample = IterationSample(
            iteration=measured.iteration,
            rank=self._rank,
            attempt=self._attempt,
            at_s=self._job.now_s(),
            duration_s=measured.duration_s,
            stall_s=measured.stall_s,
            loss=measured.loss,
            tokens=self._tokens,
            staged_bytes=now.staged_bytes - before.staged_bytes,
            sent_bytes=now.sent_bytes - before.sent_bytes,
            requested=self._is_requested(measured.iteration),
            latest_complete=self._system.latest_complete() or 0,
            latest_local=self._system.latest_local() or 0,
            completed=tuple(self._system.take_completed()),
            failed_saves=now.failed_saves - before.failed_saves,
            **_persists(now, before),
            rss_bytes=_rss_bytes(),
            **asdict(self._system.take_planning()),
        )
        self._append(ITERATIONS, sample)
        self._before = replace(now)
        self._write_timeline()
        self._write_pace()
        for load in self._loads:
            self._append(LOADS, load)
        self._loads.clear()

    def _append(self, name: str, sample: FrozenModel) -> None:
        append(self._dir / name, sample, patience_s=ROOM_PATIENCE_S)

    def _is_requested(self, iteration: int) -> bool:
        return self._every > 0 and iteration % self._every == 0 and iteration >= self._system.first_iteration

    def _write_timeline(self) -> None:
        chunks = self._system.take_events()
        if self._is_sampled:
            self._clock.settle()
            for op, begin_s, end_s in self._ops:
                self._write_op(op.layer, op.direction, op.kind, begin_s, end_s)
            for chunk in chunks:
                if chunk.end_s >= self._begin_s:
                    self._write_op(-1, "", chunk.kind, chunk.begin_s, chunk.end_s, chunk.num_bytes)
        self._ops.clear()

    def _write_pace(self) -> None:
        if self._pacer is not None:
            errors_s, overruns_s = self._pacer.take()
            sample = PaceSample(
                iteration=self._iteration,
                rank=self._rank,
                attempt=self._attempt,
                errors_s=errors_s,
                overruns_s=overruns_s,
            )
            self._append(PACE, sample)

    def _write_op(
        self, layer: int, direction: str, kind: str, begin_s: Seconds, end_s: Seconds, num_bytes: Bytes = 0
    ) -> None:
        sample = OpSample(
            iteration=self._iteration,
            rank=self._rank,
            layer=layer,
            direction=direction,
            kind=kind,
            begin_s=begin_s - self._begin_s,
            end_s=end_s - self._begin_s,
            bytes=num_bytes,
        )
        self._append(OPS, sample)


def _persists(now: Counters, before: Counters) -> dict[str, Any]:
    """Returns what became of checkpoints that were to go to the persistent tier."""
    return {name: getattr(now, name) - getattr(before, name) for name in PERSISTS}


def was_ever_complete(run_dir: Path) -> bool:
    """Returns whether some checkpoint of the run has been complete on all ranks, by its records."""
    samples = read_samples(run_dir / ITERATIONS, IterationSample)
    return any(sample.completed or sample.latest_complete for sample in samples)


def _rss_bytes() -> Bytes:
    """Returns the resident memory of this process without what it maps of tmpfs, which is the store's."""
    status = Path("/proc/self/status").read_text()
    return 1024 * sum(int(kib) for kib in re.findall(r"^Rss(?:Anon|File):\s+(\d+) kB", status, re.MULTILINE))
