"""Writes what happens on one rank into the run folder: samples, timelines, loads, events, recoveries."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from capricorn.harness.job import Job
from capricorn.harness.trainer import Measured
from capricorn.hooks import OpKey, TrainerHook
from capricorn.records import (
    EVENTS,
    ITERATIONS,
    LOADS,
    OPS,
    RECOVERIES,
    EventSample,
    IterationSample,
    LoadSample,
    OpSample,
    RecoverySample,
    append,
    read_samples,
)
from capricorn.system import CheckpointSystem, Counters, RestoreReport
from capricorn.units import Bytes, Seconds


class Recorder(TrainerHook):
    """Listens to the trainer and writes between iterations, outside of what is timed."""

    def __init__(self, job: Job, rank: int, attempt: int, system: CheckpointSystem) -> None:
        self._dir, self._rank, self._attempt, self._system = job.run_dir, rank, attempt, system
        self._tokens = job.scenario.model.tokens_per_rank
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
            self._open_ops[op] = time.perf_counter()

    def on_op_end(self, op: OpKey) -> None:
        if self._is_sampled:
            self._ops.append((op, self._open_ops.pop(op), time.perf_counter()))

    def on_routed(self, layer: int, tokens_per_expert: Sequence[int]) -> None:
        if self._rank == 0:
            loads = list(map(int, tokens_per_expert))
            self._loads.append(LoadSample(iteration=self._iteration, layer=layer, tokens_per_expert=loads))

    def event(self, event: str, detail: str = "", *, iteration: int = 0) -> None:
        """Writes an event of now, with what the system has done since the last sample."""
        now, before = self._system.counters(), self._before
        values = {"event": event, "at_s": time.time(), "attempt": self._attempt, "rank": self._rank}
        values |= {"iteration": iteration, "detail": detail, "completed": tuple(self._system.take_completed())}
        values |= {"staged_bytes": now.staged_bytes - before.staged_bytes}
        values |= {"sent_bytes": now.sent_bytes - before.sent_bytes}
        append(self._dir / EVENTS, EventSample.model_validate(values))
        self._before = replace(now)

    def iteration(self, measured: Measured) -> None:
        """Writes the sample of a finished iteration, and what was collected during it."""
        now, before = self._system.counters(), self._before
        sample = IterationSample(
            iteration=measured.iteration,
            rank=self._rank,
            attempt=self._attempt,
            at_s=time.time(),
            duration_s=measured.duration_s,
            stall_s=measured.stall_s,
            loss=measured.loss,
            tokens=self._tokens,
            staged_bytes=now.staged_bytes - before.staged_bytes,
            sent_bytes=now.sent_bytes - before.sent_bytes,
            requested=self._every > 0 and measured.iteration % self._every == 0,
            latest_complete=self._system.latest_complete() or 0,
            latest_local=self._system.latest_local() or 0,
            completed=tuple(self._system.take_completed()),
            failed_saves=now.failed_saves - before.failed_saves,
            rss_bytes=_rss_bytes(),
        )
        append(self._dir / ITERATIONS, sample)
        self._before = replace(now)
        self._write_timeline()
        for load in self._loads:
            append(self._dir / LOADS, load)
        self._loads.clear()

    def recovery(self, report: RestoreReport | None, first: Measured) -> None:
        """Writes how this attempt came about, once its first iteration is done; rank 0 only."""
        events = [e for e in read_samples(self._dir / EVENTS, EventSample) if e.attempt >= self._attempt - 1]
        earlier = [e for e in events if e.attempt == self._attempt - 1]
        ready_s = next(e.at_s for e in events if e.attempt == self._attempt and e.event == "ready" and e.rank == 0)
        faults = [e for e in earlier if e.event == "fault"]
        failures = [e for e in earlier if e.event == "failed"]
        fault_s = min((e.at_s for e in faults), default=min((e.at_s for e in failures), default=ready_s))
        detected_s = min((e.at_s for e in failures), default=fault_s)
        resumed = report.iteration if report is not None else 0
        done = max((s.iteration for s in read_samples(self._dir / ITERATIONS, IterationSample)
                    if s.attempt < self._attempt), default=0)  # fmt: skip
        sample = RecoverySample(
            attempt=self._attempt,
            what=(faults or failures)[0].detail if faults or failures else "unknown",
            detected_at_s=detected_s,
            resumed_iteration=resumed,
            lost_iterations=max(0, done - resumed),
            sources=list(report.sources) if report is not None else [],
            detect_s=max(0.0, detected_s - fault_s),
            restart_s=max(0.0, ready_s - detected_s),
            agree_s=report.agree_s if report is not None else 0.0,
            fetch_s=report.fetch_s if report is not None else 0.0,
            load_s=report.load_s if report is not None else 0.0,
            first_iteration_s=first.duration_s,
        )
        append(self._dir / RECOVERIES, sample)

    def _write_timeline(self) -> None:
        chunks = self._system.take_events()
        if self._is_sampled:
            for op, begin_s, end_s in self._ops:
                self._write_op(op.layer, op.direction, op.kind, begin_s, end_s)
            for chunk in chunks:
                if chunk.end_s >= self._begin_s:
                    self._write_op(-1, "", chunk.kind, chunk.begin_s, chunk.end_s, chunk.num_bytes)
        self._ops.clear()

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
        append(self._dir / OPS, sample)


def was_ever_complete(run_dir: Path) -> bool:
    """Whether some checkpoint of the run has been complete on all ranks, by its records."""
    samples = read_samples(run_dir / ITERATIONS, IterationSample)
    return any(sample.completed or sample.latest_complete for sample in samples)


def _rss_bytes() -> Bytes:
    """Resident memory of this process without what it maps of tmpfs, which is the store's."""
    status = Path("/proc/self/status").read_text()
    return 1024 * sum(int(kib) for kib in re.findall(r"^Rss(?:Anon|File):\s+(\d+) kB", status, re.MULTILINE))
