"""Injected failures: an observer that kills its own process, all workers, or its whole node at a named moment.

Each fault strikes once in a run, also across restarts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from capricorn.faults import FaultSpec
from capricorn.harness.job import FAULTS, WORKERS, Job
from capricorn.hooks import OpKey, TrainerHook, matches_op
from capricorn.records import EVENTS, EventSample, append
from capricorn.topology import Topology


def register_worker(run_dir: Path, rank: int) -> None:
    """Notes this process as the one that runs `rank`, for faults that strike other workers."""
    folder = run_dir / WORKERS
    folder.mkdir(exist_ok=True)
    (folder / str(rank)).write_text(f"{os.getpid()} {psutil.Process().create_time()}")


class FaultInjector(TrainerHook):
    """Strikes when this rank is the one to act and the moment has come."""

    def __init__(self, job: Job, rank: int, attempt: int) -> None:
        self._job, self._rank, self._attempt = job, rank, attempt
        topology = job.scenario.topology
        numbered = enumerate(job.scenario.faults)
        self._faults = [(index, fault) for index, fault in numbered if actor_of(fault, topology) == rank]
        self._iteration = 0

    def on_iteration_begin(self, iteration: int) -> None:
        self._iteration = iteration
        self._at("iteration_begin")

    def on_routed(self, layer: int, tokens_per_expert: Sequence[int]) -> None:
        self._at("routed")

    def before_update(self, iteration: int) -> None:
        self._at("before_update")

    def after_update(self, iteration: int) -> None:
        self._at("after_update")

    def on_iteration_end(self, iteration: int) -> None:
        self._at("iteration_end")

    def on_op_begin(self, op: OpKey) -> None:
        self._at_op(op, "begin")

    def on_op_end(self, op: OpKey) -> None:
        self._at_op(op, "end")

    def _at(self, moment: str) -> None:
        for index, fault in self._faults:
            if fault.iteration == self._iteration and fault.op == moment:
                self._strike(index, fault)

    def _at_op(self, op: OpKey, edge: str) -> None:
        for index, fault in self._faults:
            if fault.iteration == self._iteration and matches_op(fault.op, op, edge):
                self._strike(index, fault)

    def _strike(self, index: int, fault: FaultSpec) -> None:
        folder = self._job.run_dir / FAULTS
        folder.mkdir(exist_ok=True)
        try:
            (folder / str(index)).touch(exist_ok=False)
        except FileExistsError:
            return  # it struck in an earlier attempt
        event = EventSample(
            event="fault",
            at_s=time.time(),
            attempt=self._attempt,
            rank=self._rank,
            iteration=self._iteration,
            detail=str(fault),
        )
        append(self._job.run_dir / EVENTS, event)
        if fault.kind == "kill-all":
            self._kill_workers()
        if fault.kind == "node-loss":
            self._lose_node()
        os.kill(os.getpid(), signal.SIGKILL)

    def _kill_workers(self) -> None:
        for file in (self._job.run_dir / WORKERS).iterdir():
            pid, created_s = file.read_text().split()
            # A process id may have been given to somebody else since.
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(int(pid))
                if process.pid != os.getpid() and process.create_time() == float(created_s):
                    process.kill()

    def _lose_node(self) -> None:
        # Memory goes with the node. The agent's death takes its workers along, this one included.
        shutil.rmtree(self._job.node_dir(self._job.scenario.topology.node_of(self._rank)), ignore_errors=True)
        os.kill(os.getppid(), signal.SIGKILL)


def actor_of(fault: FaultSpec, topology: Topology) -> int:
    """The rank that makes the fault happen."""
    if fault.node is not None:
        return topology.ranks_of(fault.node)[0]
    return fault.rank or 0
