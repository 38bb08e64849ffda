"""lm-resiliency, the real library: copies in the memory of the workers, which peers exchange.

It works on its own threads, process groups and restart files. The system knows when to ask the library for what; how
it does it is the library's affair, but for the faults that are corrected. When workers end, its manager writes the
copies that it holds, of its own rank and of its peer, to files on its node. What the library leaves to its caller is to
find out after a restart who still has which state; its transfer moves it to whom it belongs.
"""

from __future__ import annotations

import gc
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Final
from unittest.mock import patch

import torch
import torch.distributed as dist
from lm_resiliency import InMemoryCkptConfig
from lm_resiliency.checkpointing.buffer import SlotState
from lm_resiliency.checkpointing.disk import ChecksumMismatch
from lm_resiliency.checkpointing.replication import ChunkedGlooBackend, PeerReplicator, ReplicationBackend
from lm_resiliency.experimental import InMemoryCheckpointManager
from lm_resiliency.manager_api import make_transfer

from capricorn.config.planner import PlannerConfig
from capricorn.errors import CapricornError, ConfigError, NoCompleteCheckpointError, StoreError
from capricorn.hooks import OpKey
from capricorn.runtime.comm.collectives import gather, gather_texts, maximum
from capricorn.runtime.commit_tracker import CommitTracker
from capricorn.runtime.deadline import OWN_FRAC, Deadline, check_timeout
from capricorn.runtime.recovery import Survivors, newest_common
from capricorn.systems.flat_state import FlatState
from capricorn.systems.interface import CheckpointSystem, ChunkEvent, Counters, JobContext, RestoreReport
from capricorn.units import Bytes, Seconds

FOLDER: Final = "lm-resiliency"
"""Of the files for a restart, in the folder of the node's store."""
FLUSH_PATIENCE_S: Final[Seconds] = 1.0
"""For sending and for receiving what is on its way when a worker ends; torchrun kills it 5 s after SIGTERM."""
NUM_FLUSHED: Final = 2
"""Periodic flushes that are kept, so that all ranks have one in common while the next is written."""
MAX_SHARDS: Final = 4
"""Iterations of an owner that are looked at on a node: two a restart leaves, and two older ones."""
HOSTNAME_BYTES: Final = 64


class LmResiliency(CheckpointSystem):
    """Copies into this rank's memory after each update, then exchanges copies with the peer beside the next iteration.

    A save starts once the exchange before it has ended. The copies die with the workers; those that end by an error or
    by SIGTERM first write theirs to files in the memory of the node, from which the next attempt starts.
    Source: lm-resiliency 0.2, `InMemoryCheckpointManager`, after Gemini, SOSP'23.
    """

    survives = frozenset({"kill", "node-loss"})
    first_iteration = 1  # to the library step 0 is none

    def __init__(self) -> None:
        self._is_open = False
        self._meter: MeteredBackend | None = None
        self._counters = Counters()
        self._completed: list[int] = []
        self._save: PeerSave | None = None
        self._events: list[ChunkEvent] = []
        self._latest_local: int | None = None
        self._restored: int | None = None
        self._is_broken = False
        """Whether a save has failed on some rank: sockets that lost a message or the peer stay out of step."""

    def attach(self, job: JobContext, state: FlatState) -> None:
        check(job)
        self._job, self._state = job, state
        self._timeout_s = check_timeout("system.timeout_s", job.config.timeout_s)
        self._tracker = CommitTracker[PeerSave](job.control_group)
        self._manager = CorrectedManager(job)
        self._meter, self._is_open = self._manager.meter, True

    def on_op_begin(self, op: OpKey) -> None:
        # All ranks come to this anyway, and the broadcasts of the update are not in the way yet.
        if op.kind == "reduce":
            self._ask()

    def before_update(self, iteration: int) -> None:
        self.iteration_order.check(iteration)
        if self._save is not None:
            if not self._manager.wait_copied(self._timeout_s):
                raise StoreError(f"rank {self._job.rank}: iteration {self._save.iteration} is still not copied")
            self._latest_local = self._save.iteration
            if not self._learn():
                self._ask()

    def after_update(self, iteration: int) -> None:
        iteration = self.iteration_order.advance(iteration)
        self._learn()
        every = self._job.config.every
        if every and iteration % every == 0 and iteration >= self.first_iteration:
            self._settle(self._timeout_s)
            self._state.capture()
            self._start(iteration)

    def latest_complete(self) -> int | None:
        return self._restored if self._tracker.latest is None else self._tracker.latest

    def latest_local(self) -> int | None:
        return self._latest_local

    def drain(self, timeout_s: Seconds) -> None:
        self._settle(timeout_s, Deadline(timeout_s))
        if complaint := self._counters.complaint(self._job.rank):
            raise CapricornError(complaint)

    def restore(self) -> RestoreReport:
        self.iteration_order.check_restore()
        report = Restart(self._job, self._manager).run(self._state)
        self._restored = self.iteration_order.advance(report.iteration)
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
        self._save = self._manager.start(iteration, _live_of(self._state))
        self._tracker.track(self._save)
        self._counters.staged_bytes += self._state.num_bytes
        if self._job.device.type == "cpu":  # elsewhere nobody is told when the copy ends
            self._events.append(ChunkEvent("stage", iteration, begin_s, time.perf_counter(), self._state.num_bytes))

    def _ask(self) -> None:
        """Starts to find out whether the exchange on its way has ended everywhere; all ranks come to this together."""
        if self._save is not None and self._tracker.can_start_vote:
            if not self._manager.is_busy:
                self._manager.end(self._save, self._timeout_s)
            self._tracker.start_vote()

    def _settle(self, timeout_s: Seconds, deadline: Deadline | None = None) -> None:
        """Blocks until no save is on its way on any rank; each waits for its own, so one reduction is enough.

        The rank's own save has `timeout_s`; with a deadline the reductions must be over by then, too.
        """
        if not self._learn(deadline) and self._save is not None:
            self._manager.end(self._save, timeout_s if deadline is None else OWN_FRAC * deadline.left_s)
            self._ask()
            self._learn(deadline)

    def _learn(self, deadline: Deadline | None = None) -> bool:
        """Takes what the last reduction said; returns whether no save is on its way any more."""
        if not self._tracker.poll_vote(None if deadline is None else deadline.left_s):
            return False
        if (save := self._save) is not None:
            self._save, self._is_broken = None, self._tracker.latest != save.iteration
            self._completed += [] if self._is_broken else [save.iteration]
            if save.failure:
                self._fail(f"iteration {save.iteration}: {save.failure}")
        return True

    def _fail(self, what: str) -> None:
        self._counters.failed_saves += 1
        self._counters.last_failure = what


# --- the library's manager, corrected


@dataclass(slots=True)
class PeerSave:
    """One rank's part of a checkpoint, on its way into its memory and that of its peer."""

    iteration: int
    is_settled: bool = False
    failure: str = ""
    """What went wrong on this rank, in words; empty if nothing did."""

    @property
    def is_complete(self) -> bool:
        return self.is_settled and not self.failure


class CorrectedManager(InMemoryCheckpointManager):
    """The library's manager, corrected.

    As it is, a slot that is being overwritten passes for the generation it held, also to a SIGTERM that comes then;
    waits for a peer have no deadline; a second SIGTERM cuts off the files that the first one asked for; files of
    periodic flushes stay for ever.
    """

    def __init__(self, job: JobContext) -> None:
        self.failure = ""
        """Says why the last exchange did not end well."""
        self._is_flushing = False
        self._patience_s = job.config.timeout_s / 2  # sending and receiving are waited for one after the other
        # The library's groups wait 30 min for each message, and ending a group does not end who waits in it.
        new_group = partial(dist.new_group, timeout=timedelta(seconds=self._patience_s))
        with patch.object(dist, "new_group", new_group):
            super().__init__(settings(job), Parallelism(job.config.replicas == 1), process_group=job.control_group)
        self.meter: MeteredBackend | None = None
        if isinstance(self._replicator._backend, ChunkedGlooBackend):
            self.meter = MeteredBackend(self._replicator._backend)
            self._replicator = PeerReplicator(self.meter)

    @property
    def is_busy(self) -> bool:
        """Returns whether the copy into memory or the exchange is still on its way."""
        thread = self._completion_thread
        return (thread is not None and thread.is_alive()) or bool(self._replicator.in_flight)

    @property
    def peer_rank(self) -> int:
        """Returns the rank whose replica this one keeps; -1 without replicas."""
        return int(self._replicator.peer_rank)

    def start(self, iteration: int, tensors: list[torch.Tensor]) -> PeerSave:
        """Starts a save of the tensors; on the CPU they are copied when it returns."""
        save = PeerSave(iteration)
        try:
            self.save_tensors(tensors, iteration)
        except (OSError, RuntimeError) as error:
            save.failure, save.is_settled = str(error), True
        return save

    def end(self, save: PeerSave, timeout_s: Seconds) -> None:
        """Waits for the exchange of that save; one that has not ended by then has failed."""
        if not save.is_settled and not self.finalize_replication(timeout_s / 2):
            save.failure = self.failure
        save.is_settled = True

    def save_tensors(self, tensors: list[torch.Tensor], step: int, extra: dict[str, object] | None = None) -> None:
        super().save_tensors(tensors, step, extra)
        if step % self.config.disk_flush_interval == 0:
            for iteration in self.shards(self._rank)[NUM_FLUSHED:]:
                self.shard_path(self._rank, iteration).unlink(missing_ok=True)

    def wait_copied(self, timeout_s: Seconds) -> bool:
        """Waits until the state may change again; returns False if that took longer."""
        thread = self._completion_thread
        if thread is not None:
            thread.join(timeout_s)  # its error is told by `finalize_replication`, once
        return thread is None or not thread.is_alive()

    def finalize_replication(self, timeout_s: Seconds | None = None) -> bool:
        try:
            is_aligned = super().finalize_replication(timeout_s or self._patience_s)
        except RuntimeError as error:
            self.failure = f"{error}: {error.__cause__}"
            return False
        self.failure = (self.meter.failure if self.meter else "") or "the exchange did not end in time"
        return bool(is_aligned)

    def flush_for_restart(self) -> int:
        self._is_flushing = True
        self.finalize_replication(FLUSH_PATIENCE_S)
        iteration = int(super().flush_for_restart())
        self._is_flushing = False
        return iteration

    def close(self) -> None:
        """Also writes the files for a restart, if there is anything that they do not have."""
        try:
            if self._exit_flush_registered:
                self.flush_for_restart()
        finally:
            super().close()

    def shards(self, owner: int) -> list[int]:
        """Returns the iterations of which this node has a file of that owner, newest first."""
        return list(self._disk.find_steps_on_disk(rank=owner))

    def shard_path(self, owner: int, iteration: int) -> Path:
        return Path(self._disk._folder) / f"step-{iteration}" / f"rank-{owner}.pt"

    def read_shard(self, owner: int, iteration: int) -> list[torch.Tensor]:
        """Reads the state of an owner from this node's files, and compares its checksums."""
        return list(self._disk.load(iteration, rank=owner)[1])

    def _prepare_next_capture(self) -> None:
        super()._prepare_next_capture()
        slot = self._buffer_pool.own_current
        slot.step, slot.state = -1, SlotState.EMPTY

    def _sigterm_handler(self, signum: int, frame: FrameType | None) -> None:
        if not self._is_flushing:
            super()._sigterm_handler(signum, frame)


# --- what the manager is given: its settings in a job, and its way to a rank's peer


def check(job: JobContext) -> None:
    """Refuses a job in which the library cannot work.

    Raises:
        ConfigError: links are paced in user space, or nodes cannot be paired.
    """
    if job.routes:
        raise ConfigError(
            "system lm-resiliency has sockets of its own, which links that are paced in user space do not see; "
            "use cluster.links=namespaces (or user-namespaces)"
        )
    replicas, num_nodes = job.config.replicas, job.topology.num_nodes
    if replicas > 2 or (replicas == 2 and num_nodes % 2):
        raise ConfigError(
            "system lm-resiliency pairs nodes: it needs --replicas 1, or 2 and an even number of nodes; "
            f"there are {replicas} replicas on {num_nodes} nodes"
        )


def settings(job: JobContext) -> InMemoryCkptConfig:
    """Returns the library's own defaults, but for where the peer and the files are, checksums in them, and chunks.

    Its chunks of 16 MiB suit fast links, and cost less CPU time than small ones. Where ours are set smaller than usual,
    as they are for slow links, its are as small as ours: about what its `estimate_chunk_size` comes to there.
    """
    config = InMemoryCkptConfig(
        interval=max(1, job.config.every),
        replication_jump=job.topology.ranks_per_node,
        disk_folder=str(job.store_dir / FOLDER),
        run_id=job.run_id,
        verify_integrity=True,
        pin_memory=job.device.type == "cuda",
    )
    if job.planner.max_chunk_bytes < PlannerConfig().max_chunk_bytes:
        config.replication_chunk_size = job.planner.max_chunk_bytes
    return config


@dataclass(frozen=True, slots=True)
class Parallelism:
    """What the library asks of a parallelism: whether other ranks hold the same state anyway."""

    has_natural_replicas: bool


class MeteredBackend(ReplicationBackend):
    """A backend of the library that counts what it has sent, and keeps why it failed."""

    def __init__(self, backend: ChunkedGlooBackend) -> None:
        self._backend = backend
        self.sent_bytes: Bytes = 0
        self.failure = ""
        self._events: list[ChunkEvent] = []

    @property
    def peer_rank(self) -> int:
        return int(self._backend.peer_rank)

    def send(self, tensors: list[torch.Tensor], step: int, meta: bytes = b"") -> None:
        begin_s = time.perf_counter()
        try:
            self._backend.send(tensors, step, meta)
        except RuntimeError as error:
            self.failure = f"cannot send to rank {self.peer_rank}: {error}"
            raise
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        self.sent_bytes += num_bytes
        self._events.append(ChunkEvent("send", step, begin_s, time.perf_counter(), num_bytes))

    def recv(self, buffers: list[torch.Tensor]) -> tuple[int, bytes]:
        try:
            step, meta = self._backend.recv(buffers)
        except RuntimeError as error:
            self.failure = f"cannot receive from rank {self.peer_rank}: {error}"
            raise
        return int(step), bytes(meta)

    def take_events(self) -> list[ChunkEvent]:
        taken = self._events[:]
        del self._events[: len(taken)]  # the sending thread may have added one meanwhile
        return taken

    def close(self) -> None:
        # The library leaves its group to the end of the job, and its threads end with the last who knows it.
        dist.destroy_process_group(self._backend._group)
        del self._backend._group
        gc.collect()


# --- restart


def _live_of(state: FlatState) -> list[torch.Tensor]:
    """Returns the live memory, neighbours as one: the library moves tensor by tensor."""
    return [run.source for run in state.runs]


class Restart:
    """Finds and loads the newest iteration that all owners have somewhere; collective."""

    def __init__(self, job: JobContext, manager: CorrectedManager) -> None:
        self._job, self._manager = job, manager
        self._owners = [owner for owner in (job.rank, manager.peer_rank) if owner >= 0]
        self._damaged: list[str] = []

    def run(self, state: FlatState) -> RestoreReport:
        """Loads the agreed iteration into the live state, and forgets all others.

        Raises:
            NoCompleteCheckpointError: no iteration survives on every owner.
        """
        state.follow()
        begin_s, live = time.perf_counter(), _live_of(state)
        iteration, sources, shards = self._agree()
        agreed_s = time.perf_counter()
        self._fetch(iteration, sources, shards, live)
        fetched_s = time.perf_counter()
        if sources[self._job.rank] == self._job.rank:
            for place, value in zip(live, shards[self._job.rank], strict=True):
                place.copy_(value)
        state.publish()
        self._forget_all_but(iteration)
        tiers = ["local" if source == owner else "peer" for owner, source in enumerate(sources)]
        times_s = (agreed_s - begin_s, fetched_s - agreed_s, time.perf_counter() - fetched_s)
        return RestoreReport(iteration, tiers, *times_s, self._damaged)

    def _agree(self) -> tuple[int, list[int], dict[int, list[torch.Tensor]]]:
        """Returns the iteration, by owner the rank that has it, and the verified shards that this rank gives."""
        ranks = range(self._job.topology.world_size)
        while True:
            survivors = self._survey()
            iteration = newest_common(survivors, len(ranks))
            if iteration is None:
                self._forget_all_but(None)
                raise NoCompleteCheckpointError(_describe(survivors, len(ranks)))
            sources = [survivors[iteration][owner][0] for owner in ranks]
            given = [owner for owner in self._owners if sources[owner] == self._job.rank]
            shards = {owner: shard for owner in given if (shard := self._read(owner, iteration)) is not None}
            if not maximum(self._job.control_group, len(given) - len(shards)):
                return iteration, sources, shards

    def _survey(self) -> Survivors:
        """Asks all ranks who has what; an owner stands before its peer."""
        mine = torch.full((2 * MAX_SHARDS, 2), -1, dtype=torch.int64)
        held = [(owner, i) for owner in self._owners for i in self._manager.shards(owner)[:MAX_SHARDS]]
        for row, shard in enumerate(held):
            mine[row] = torch.tensor(shard)
        survivors: dict[int, dict[int, list[int]]] = {}
        for holder, table in enumerate(gather(self._job.control_group, mine)):
            for owner, iteration in table.tolist():
                if owner >= 0:
                    survivors.setdefault(iteration, {}).setdefault(owner, []).append(holder)
        for owners in survivors.values():
            for owner, holders in owners.items():
                holders.sort(key=lambda holder: holder != owner)
        return survivors

    def _read(self, owner: int, iteration: int) -> list[torch.Tensor] | None:
        """Reads a shard from this node's files; returns None, and removes the file, if it is damaged."""
        try:
            return self._manager.read_shard(owner, iteration)
        except (ValueError, ChecksumMismatch, OSError):
            self._manager.shard_path(owner, iteration).unlink(missing_ok=True)
            self._damaged.append(f"rank {owner}'s copy of iteration {iteration} on rank {self._job.rank}")
            return None

    def _fetch(
        self,
        iteration: int,
        sources: Sequence[int],
        shards: Mapping[int, list[torch.Tensor]],
        live: Sequence[torch.Tensor],
    ) -> None:
        """Moves each shard that is not where it belongs; both ends take their turns in the same order."""
        rank = self._job.rank
        hostnames = gather_texts(self._job.control_group, socket.gethostname(), HOSTNAME_BYTES)
        with closing(make_transfer("torch_dist", rank=rank, timeout_s=self._job.config.timeout_s)) as transfer:
            for owner in sorted(self._owners):
                source, key = sources[owner], f"{self._job.run_id}/{iteration}/{owner}"
                if source != owner and rank == source:
                    transfer.serve(shards[owner], key, owner, hostnames[owner])
                elif source != owner and rank == owner:
                    transfer.fetch(list(live), key, source, hostnames[source])

    def _forget_all_but(self, iteration: int | None) -> None:
        """Removes the files of older iterations, and of later ones, which belong to an abandoned future."""
        for owner in self._owners:
            for other in self._manager.shards(owner):
                if other != iteration:
                    self._manager.shard_path(owner, other).unlink(missing_ok=True)


def _describe(survivors: Survivors, world_size: int) -> str:
    if not survivors:
        return "no checkpoint survives: the copies of lm-resiliency end with its workers, and none of them could write"
    newest = max(survivors)
    lost = ", ".join(str(owner) for owner in range(world_size) if owner not in survivors[newest])
    return f"no iteration survives on all ranks: of the newest, {newest}, rank {lost} has no copy"
