"""The training thread's side of the persistent tier: when a checkpoint is persisted, and what became of it.

Decides alike on all ranks, never waits for a file system, and knows no file format: a process of its own writes.

    state      what has happened                                              moved by                    collective
    due        `every` iterations have passed since the last one; each rank   training thread             yes, a vote
               says in a vote whether its writer is idle (`start_vote`)
    skipped    the checkpoint became complete in memory on all ranks, but     training thread             no, decided
               some writer was busy                                                                       alike
    ordered    the same, but all writers are idle: its slot is pinned, and    training thread             no, decided
               the writer has its order (`take`)                                                          alike
    handed in  a rank's tensors, verified, and then its `part-<r>.json` lie   writer of that rank         no, by files
               in the temporary folder
    complete   all parts were there: metadata and manifest are written, and   writer of rank 0            no, by files
               the folder has its name
    given up   a part failed or is missing at the deadline: the folder is     writer of rank 0            no, by files
               removed, a mark beside it tells late writers
    answered   the training thread has read the writer's answer: the slot is  training thread, in the     no
               unpinned, and the result counted                               next vote or in `finish`

A writer that ends too early or answers too late is killed, and its order counts as failed; the next order starts a new
one.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from pydantic import ValidationError

from capricorn.errors import StoreError
from capricorn.process import PolledChild
from capricorn.runtime.comm.collectives import finish, waiting_for
from capricorn.runtime.persist.layout import remove, sweep, temporary_of
from capricorn.runtime.persist.messages import Answer, Order, WriterTask
from capricorn.runtime.persist.writer_process import spawn_writer
from capricorn.runtime.store.node_store import NodeStore
from capricorn.runtime.store.slot import Slot
from capricorn.sizing.memory import NUM_SLOTS
from capricorn.systems.interface import Counters, JobContext
from capricorn.units import Seconds, format_seconds

STOP_TIMEOUT_S: Seconds = 5.0
_SHOWN_BYTES = 80
"""Of a message that makes no sense."""


class Persister:
    """Hands every `every`-th checkpoint to this rank's writer, once it is complete in memory on all ranks.

    All ranks vote and take at the same moments. A checkpoint that comes due while some writer is busy is skipped.
    """

    def __init__(self, job: JobContext, store: NodeStore, counters: Counters) -> None:
        """Removes, on rank 0, what dead attempts have left half written."""
        self._job, self._store, self._counters = job, store, counters
        self._every = job.persist.every if job.persist_dir is not None else 0
        self._last: int | None = None
        """Newest iteration that was persisted or skipped; at first, the one before the first that is trained."""
        self._vote: tuple[int, torch.Tensor, dist.Work] | None = None
        self._are_all_idle = False
        self._slot: Slot | None = None
        """The slot that the writer reads, pinned."""
        self._order: Order | None = None
        self._writer: _Writer | None = None
        if self._every and job.rank == 0 and job.persist_dir is not None:
            sweep(job.persist_dir)

    def start(self) -> None:
        """Starts the writer, whose imports would hold up the first checkpoint by seconds."""
        if self._every:
            with contextlib.suppress(OSError):  # it is tried again, and told, with the first checkpoint
                self._writer = self._new_writer()

    @property
    def num_slots(self) -> int:
        """Local slots that a rank needs, so that one may be held back while it is written."""
        return NUM_SLOTS + bool(self._every)

    def resume(self, newest: int | None) -> None:
        """Notes the newest persisted iteration up to the one restored, if any; all ranks have agreed on it."""
        self._last = 0 if newest is None else newest

    def note(self, iteration: int) -> None:
        """Notes that an iteration was trained; the first of all tells where to count from."""
        if self._last is None:
            self._last = iteration - 1

    def start_vote(self, iteration: int) -> None:
        """Starts a vote on whether all writers are idle, if that iteration is due; collective."""
        if self._is_due(iteration):
            self._poll()
            idle, group = torch.tensor(int(self._order is None)), self._job.control_group
            with waiting_for(group, self._what(iteration)):
                work = dist.all_reduce(idle, dist.ReduceOp.MIN, group=group, async_op=True)
            assert work is not None
            self._vote = iteration, idle, work

    def poll_vote(self, timeout_s: Seconds | None = None) -> None:
        """Waits for the vote under way, if there is one, and keeps its result; by default as long as the group waits.

        Raises:
            PeerLostError: a peer is gone, or did not come in time.
        """
        if self._vote is not None:
            iteration, idle, work = self._vote
            finish(self._job.control_group, work, self._what(iteration), timeout_s)
            self._are_all_idle, self._vote = bool(idle), None

    def take(self, iteration: int) -> None:
        """Hands an iteration that has become complete in memory on all ranks to the writer, if it is due."""
        if not self._is_due(iteration):
            return
        self._last = iteration
        if not self._are_all_idle:
            self._counters.skipped_persists += 1
            return
        self._slot = slot = self._store.read(self._job.rank, iteration)
        assert slot is not None
        self._store.pin(slot)
        self._order = Order(iteration=iteration, slot=slot.path)
        try:
            if self._writer is None or not self._writer.is_alive:
                self._end_writer()
                self._writer = self._new_writer()
            self._writer.send(self._order)
        except OSError as error:
            self._settle(f"the writer does not take its order: {error.strerror}")

    def finish(self, timeout_s: Seconds) -> None:
        """Waits until what was handed to the writer is persisted or has failed."""
        if self._order is not None and self._writer is not None and not self._poll(timeout_s):
            self._end_writer()
            self._settle(f"not written within {format_seconds(timeout_s)}")

    def complaint(self) -> str:
        """Returns what has failed so far, in words; empty if nothing has."""
        counters = self._counters
        if not counters.failed_persists:
            return ""
        return (
            f"{counters.failed_persists} checkpoints were not persisted, the last one: {counters.last_persist_failure}"
        )

    def close(self) -> None:
        """Ends the writer, also in the middle of a checkpoint, which is then removed."""
        self._end_writer()
        if self._order is not None and self._job.rank == 0 and self._job.persist_dir is not None:
            remove(temporary_of(self._job.persist_dir, self._order.iteration, self._job.attempt))
        self._order = self._slot = None

    def _what(self, iteration: int) -> str:
        return f"the vote on persisting iteration {iteration}"

    def _is_due(self, iteration: int) -> bool:
        return bool(self._every) and self._last is not None and iteration // self._every > self._last // self._every

    def _poll(self, timeout_s: Seconds = 0.0) -> bool:
        """Takes what the writer answers within that time; returns whether it is idle."""
        if self._order is not None and self._writer is not None:
            try:
                answer = self._writer.take(self._order, timeout_s)
            except StoreError as error:
                self._end_writer()
                self._settle(str(error))
            else:
                if answer is not None:
                    self._settle(answer.failure)
        return self._order is None

    def _end_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _settle(self, failure: str) -> None:
        assert self._order is not None
        if failure:
            self._counters.failed_persists += 1
            self._counters.last_persist_failure = f"iteration {self._order.iteration}: {failure}"
        else:
            self._counters.persisted += 1
        if self._slot is not None:
            self._store.unpin(self._slot)
        self._order = self._slot = None

    def _new_writer(self) -> _Writer:
        task, start = self._task(), self._job.start_writer or spawn_writer
        return _Writer(lambda ends: start(task, ends))

    def _task(self) -> WriterTask:
        job = self._job
        assert job.persist_dir is not None
        return WriterTask(
            run_id=job.run_id,
            attempt=job.attempt,
            rank=job.rank,
            num_nodes=job.topology.num_nodes,
            ranks_per_node=job.topology.ranks_per_node,
            model=job.model,
            root=job.persist_dir,
            layout=self._store.manifest_path(job.rank),
            keep=job.persist.keep,
            timeout_s=job.persist.timeout_s,
        )


class _Writer:
    """The writer process, and the lines to and from it.

    They have descriptors of their own: whatever a library reads or prints over there is not between them.
    """

    def __init__(self, start: Callable[[tuple[int, int]], PolledChild]) -> None:
        """Has it started with the far ends of the two pipes, the one for orders and the one for answers."""
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        ends = orders, answers
        try:
            self._process = start(ends)
        except OSError:
            self._close_ours()
            raise
        finally:
            for end in ends:
                os.close(end)
        os.set_blocking(self._orders, False)
        os.set_blocking(self._answers, False)
        self._read = b""
        self._ready = select.poll()
        self._ready.register(self._answers, select.POLLIN)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def send(self, order: Order) -> None:
        """Sends a line that fits the buffer of an empty pipe; raises OSError if the process has ended."""
        os.write(self._orders, order.model_dump_json().encode() + b"\n")

    def take(self, order: Order, timeout_s: Seconds) -> Answer | None:
        """Returns the answer to an order, None if it does not come within that time.

        Raises:
            StoreError: the process has ended, or what came is no answer to that order.
        """
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self._read:
            if not self._ready.poll(1000 * max(0.0, deadline_s - time.monotonic())):
                return None
            data = os.read(self._answers, 1 << 16)
            if not data:
                raise StoreError(f"the writer has ended with code {self._wait()}")
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        try:
            answer = Answer.model_validate_json(line)
        except ValidationError:
            raise StoreError(f"a damaged message came from the writer: {line[:_SHOWN_BYTES]!r}") from None
        if answer.iteration != order.iteration:
            raise StoreError(f"the writer answers to iteration {answer.iteration}, not {order.iteration}")
        return answer

    def close(self) -> None:
        self._process.kill()
        self._wait()
        self._close_ours()

    def _wait(self) -> int | None:
        """Returns the exit code, None if even a killed process does not end: it may wait for a dead file system."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(STOP_TIMEOUT_S)
        return None

    def _close_ours(self) -> None:
        for end in (self._orders, self._answers):
            os.close(end)
