"""Decides when a fault is injected: an observer of the trainer that claims each once in a run, however often that
starts again.

Knows when and who acts; what a fault does is told in `inject`, and the life of one in `context`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from capricorn.config.fault_kinds import kind_of
from capricorn.config.fault_spec import FaultSpec
from capricorn.faults.context import FaultContext
from capricorn.faults.inject import inject, prepare
from capricorn.faults.persisted import PersistedWait, persisted_in
from capricorn.hooks import OpKey, TrainerHook, matches_op
from capricorn.process import deferred_sigterm
from capricorn.records.job_file import FAULTS, Job
from capricorn.records.samples import EVENTS, EventName, EventSample, append
from capricorn.systems.interface import PacedRoute
from capricorn.topology import Topology


class FaultInjector(TrainerHook):
    """Injects a fault when this rank is the one to act and the moment has come."""

    def __init__(self, job: Job, rank: int, attempt: int) -> None:
        self._job, self._rank, self._attempt = job, rank, attempt
        self._context = FaultContext(job, rank)
        numbered = enumerate(job.scenario.faults)
        self._faults = [(index, fault) for index, fault in numbered if actor_of(fault, job.scenario.topology) == rank]
        for _, fault in self._faults:
            kind_of(fault.kind)  # one of one's own is loaded now: at its moment that would take time
        self._wait = PersistedWait(job, [fault for index, fault in self._faults if not self._mark(index).exists()])
        self._iteration = 0

    def routes(self, routes: Mapping[int, PacedRoute]) -> Mapping[int, PacedRoute]:
        """Returns the ways to the peers, or lossy ones in front of them if a fault is to damage what is sent."""
        if not any(fault.kind == "corrupt" and fault.where == "wire" for _, fault in self._faults):
            return routes
        topology = self._job.scenario.topology
        own = topology.node_of(self._rank)
        return self._context.lossy_routes.routes(
            routes, [r for r in range(topology.world_size) if topology.node_of(r) != own]
        )

    def on_iteration_begin(self, iteration: int) -> None:
        self._iteration = iteration
        self._wait.before(iteration)
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
                self._inject(index, fault)

    def _at_op(self, op: OpKey, edge: str) -> None:
        for index, fault in self._faults:
            if fault.iteration == self._iteration and matches_op(fault.op, op, edge):
                self._inject(index, fault)

    def _inject(self, index: int, fault: FaultSpec) -> None:
        # Who is told to end meanwhile ends after it: a fault that is in the record has happened.
        with deferred_sigterm():
            self._inject_once(index, fault)

    def _inject_once(self, index: int, fault: FaultSpec) -> None:
        if not self._claim(index):
            return  # it was injected in an earlier attempt
        # Nodes that are lost at the same moment are lost together: whoever comes first takes the others along.
        # On machines of their own each loses itself.
        is_alone = self._job.scenario.launch.nnodes > 0
        others = [each for number, each in enumerate(self._job.scenario.faults) if _is_lost_with(each, fault)
                  and number != index and not is_alone and self._claim(number)]  # fmt: skip
        prepare(fault, self._context)
        ahead = [*others, fault]
        for each in ahead:
            self._tell("fault", each)
        try:
            while ahead:
                inject(ahead[0], self._context)
                del ahead[0]
        except BaseException:
            for each in ahead:
                self._tell("not-injected", each)
            raise

    def _claim(self, index: int) -> bool:
        """Claims the fault for this run; returns False if it was claimed before."""
        mark = self._mark(index)
        mark.parent.mkdir(exist_ok=True)
        try:
            mark.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _mark(self, index: int) -> Path:
        """Returns the file that is there once the fault was claimed."""
        return self._job.run_dir / FAULTS / str(index)

    def _tell(self, event: EventName, fault: FaultSpec) -> None:
        sample = EventSample(
            event=event,
            at_s=self._job.now_s(),
            attempt=self._attempt,
            rank=self._rank,
            iteration=self._iteration,
            detail=str(fault),
            on_disk=persisted_in(self._job),
        )
        append(self._job.run_dir / EVENTS, sample)


def claimed_faults(run_dir: Path) -> tuple[str, ...]:
    """Returns the marks of the faults that were claimed so far."""
    marks = run_dir / FAULTS
    return tuple(sorted(mark.name for mark in marks.iterdir())) if marks.is_dir() else ()


def claim_faults(run_dir: Path, marks: Iterable[str]) -> None:
    """Marks faults that were claimed on another machine, so that none is injected again."""
    for mark in marks:
        (run_dir / FAULTS).mkdir(exist_ok=True)
        (run_dir / FAULTS / mark).touch()


def actor_of(fault: FaultSpec, topology: Topology) -> int:
    """Returns the rank that injects the fault."""
    if fault.node is not None:
        return topology.ranks_of(fault.node)[0]
    return fault.rank or 0


def _is_lost_with(one: FaultSpec, other: FaultSpec) -> bool:
    return one.kind == other.kind == "node-loss" and (one.iteration, one.op) == (other.iteration, other.op)
