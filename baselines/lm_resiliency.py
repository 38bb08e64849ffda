"""The in-memory checkpoints of the library lm-resiliency, on its own threads, process groups and restart files.

Knows when to ask the library for what; how it does it is the library's affair.
"""

from __future__ import annotations

import time

from capricorn.errors import CapricornError, StoreError
from capricorn.hooks import OpKey
from capricorn.runtime.commit_tracker import Completion
from capricorn.runtime.save.flat_state import FlatState
from capricorn.systems.interface import CheckpointSystem, ChunkEvent, Counters, JobContext, RestoreReport
from capricorn.units import Seconds

from .lm_manager import Manager, Save
from .lm_peer import Meter, check
from .lm_restart import Restart


class LmResiliency(CheckpointSystem):
    """Copies into this rank's memory after each update, then exchanges copies with the peer beside the next iteration.

    A save starts once the exchange before it has ended. The copies die with the workers; those that end by an error or
    by SIGTERM first write theirs to files in the memory of the node, from which the next attempt starts.
    Source: lm-resiliency 0.2, `InMemoryCheckpointManager`, after Gemini, SOSP'23.
    """

    survives = frozenset({"kill", "node-loss"})

    def __init__(self) -> None:
        self._is_open = False
        self._meter: Meter | None = None
        self._counters = Counters()
        self._completed: list[int] = []
        self._save: Save | None = None
        self._events: list[ChunkEvent] = []
        self._latest_local = self._restored = 0
        self._is_broken = False
        """Whether a save has failed on some rank: sockets that lost a message or the peer stay out of step."""

    def attach(self, job: JobContext, state: FlatState) -> None:
        check(job)
        self._job, self._state, self._timeout_s = job, state, job.config.timeout_s
        self._live = [run.source for run in state.runs]  # neighbours as one: the library moves tensor by tensor
        self._completion = Completion[Save](job.control_group)
        self._manager = Manager(job)
        self._meter, self._is_open = self._manager.meter, True

    def on_op_begin(self, op: OpKey) -> None:
        # All ranks come to this anyway, and the broadcasts of the update are not in the way yet.
        if op.kind == "reduce":
            self._ask()

    def before_update(self, iteration: int) -> None:
        if self._save is not None:
            if not self._manager.wait_copied(self._timeout_s):
                raise StoreError(f"rank {self._job.rank}: iteration {self._save.iteration} is still not copied")
            self._latest_local = self._save.iteration
            if not self._learn():
                self._ask()

    def after_update(self, iteration: int) -> None:
        self._learn()
        if self._job.config.every and iteration % self._job.config.every == 0:
            self._settle(self._timeout_s)
            self._state.capture()
            self._start(iteration)

    def latest_complete(self) -> int | None:
        return max(self._completion.latest, self._restored) or None

    def latest_local(self) -> int | None:
        return self._latest_local or None

    def drain(self, timeout_s: Seconds) -> None:
        self._settle(timeout_s)
        if failed := self._counters.failed_saves:
            saves = f"{failed} saves failed on rank {self._job.rank}"
            raise CapricornError(f"{saves}, the last one: {self._counters.last_failure}")

    def restore(self) -> RestoreReport:
        report = Restart(self._job, self._manager).run(self._state)
        self._restored = report.iteration
        self._start(report.iteration)  # so that the next failure finds all copies again
        return report

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        try:
            self._manager.close()
        except (OSError, RuntimeError) as error:  # no room for the files, and the worker must end all the same
            self._fail(f"files for a restart: {error}")

    def counters(self) -> Counters:
        if self._meter is not None:
            self._counters.sent_bytes = self._meter.sent_bytes
        return self._counters

    def take_completed(self) -> list[int]:
        taken, self._completed = self._completed, []
        return taken

    def take_events(self) -> list[ChunkEvent]:
        taken, self._events = self._events, []
        return taken + (self._meter.take_events() if self._meter is not None else [])

    def _start(self, iteration: int) -> None:
        if self._is_broken:
            self._fail(f"iteration {iteration}: not tried, since one before it has failed")
            return
        begin_s = time.perf_counter()
        self._save = self._manager.start(iteration, self._live)
        self._completion.expect(self._save)
        self._counters.staged_bytes += self._state.num_bytes
        if self._job.device.type == "cpu":  # elsewhere nobody is told when the copy ends
            self._events.append(ChunkEvent("stage", iteration, begin_s, time.perf_counter(), self._state.num_bytes))

    def _ask(self) -> None:
        """Asks once all ranks have come to the same moment whether the exchange on its way has ended."""
        if self._save is not None and self._completion.may_ask:
            if not self._manager.is_busy:
                self._manager.end(self._save, self._timeout_s)
            self._completion.ask()

    def _settle(self, timeout_s: Seconds) -> None:
        """Blocks until no save is on its way on any rank; each waits for its own, so one reduction is enough."""
        if not self._learn() and self._save is not None:
            self._manager.end(self._save, timeout_s)
            self._ask()
            self._learn()

    def _learn(self) -> bool:
        """Takes what the last reduction said; whether no save is on its way any more."""
        if not self._completion.learn():
            return False
        if (save := self._save) is not None:
            self._save, self._is_broken = None, self._completion.latest != save.iteration
            self._completed += [] if self._is_broken else [save.iteration]
            for failure in save.failures:
                self._fail(f"iteration {save.iteration}: {failure}")
        return True

    def _fail(self, what: str) -> None:
        self._counters.failed_saves += 1
        self._counters.last_failure = what
