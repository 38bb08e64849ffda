"""A rank's record of an iteration: what a timeline says of ops that were launched long before they ran."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import pytest
from capricorn.baselines.none import NoCheckpoint

from capricorn.hooks import OpKey
from capricorn.launch.recorder import Recorder
from capricorn.records.samples import OPS, OpSample, read_samples
from capricorn.trainer.loop import TrainedIteration
from tests.support.fault_jobs import make_job

OP, NEXT = OpKey(0, "forward", "attention"), OpKey(0, "forward", "gate")


class FakeClock:
    """A device that runs nothing before somebody waits; then each moment comes a second after the one before."""

    def __init__(self) -> None:
        self.marks: list[Callable[[float], None]] = []
        self.begin_s = 0.0

    def at(self, reached: Callable[[float], None]) -> None:
        self.marks.append(reached)

    def settle(self) -> None:
        for number, reached in enumerate(self.marks, 1):
            reached(self.begin_s + number)
        self.marks.clear()

    def check(self) -> None: ...

    def close(self) -> None: ...


def test_a_timeline_has_the_times_at_which_ops_ran_and_not_those_at_which_they_were_launched(tmp_path: Path) -> None:
    job, clock = make_job(tmp_path), FakeClock()
    recorder = Recorder(job, 0, 0, NoCheckpoint(), None, clock)
    iteration = job.scenario.train.timeline_every
    recorder.on_iteration_begin(iteration)
    clock.begin_s = recorder._begin_s
    for op in (OP, NEXT):
        recorder.on_op_begin(op)
        recorder.on_op_end(op)
    recorder.iteration(TrainedIteration(iteration, 1.0, 4.0, 0.0))
    ops = list(read_samples(job.run_dir / OPS, OpSample))
    assert [(op.kind, round(op.begin_s, 6), round(op.end_s, 6)) for op in ops] == [
        ("attention", 1.0, 2.0),
        ("gate", 3.0, 4.0),
    ]


def test_on_the_cpu_an_op_ran_when_it_was_launched(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    recorder = Recorder(job, 0, 0, NoCheckpoint(), None)
    iteration = job.scenario.train.timeline_every
    before_s = perf_counter()
    recorder.on_iteration_begin(iteration)
    recorder.on_op_begin(OP)
    recorder.on_op_end(OP)
    recorder.iteration(TrainedIteration(iteration, 1.0, 1.0, 0.0))
    (op,) = read_samples(job.run_dir / OPS, OpSample)
    assert 0 <= op.begin_s <= op.end_s <= perf_counter() - before_s


@pytest.mark.parametrize("sampled", [True, False])
def test_a_device_is_asked_for_times_only_in_iterations_with_a_timeline(tmp_path: Path, sampled: bool) -> None:
    job, clock = make_job(tmp_path), FakeClock()
    recorder = Recorder(job, 0, 0, NoCheckpoint(), None, clock)
    recorder.on_iteration_begin(job.scenario.train.timeline_every + (not sampled))
    recorder.on_op_begin(OP)
    assert bool(clock.marks) == sampled
