"""The replicating system: every checkpoint is staged into a local slot and sent from there to peer nodes.

It puts the machinery together: the states of a save stand in `save.save`, those of a vote in `commit_tracker`, those of
a recovery in `recovery`, those of the persistent tier in `persist.persister`. What is sent when is the planner's
decision. Registered as `capricorn`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import ClassVar

from capricorn.errors import CapricornError, StoreError
from capricorn.hooks import OpKey
from capricorn.planner.placement import holders_of, owners_on
from capricorn.planner.plan import Planner, StreamPlanner
from capricorn.planner.span_planner import SpanPlanner
from capricorn.runtime.comm.collectives import barrier, gather_addresses, share_secret
from capricorn.runtime.comm.handshake import Identity
from capricorn.runtime.comm.replica_link import ReplicaLink
from capricorn.runtime.comm.replica_server import ReplicaServer
from capricorn.runtime.commit_tracker import CommitTracker
from capricorn.runtime.deadline import OWN_FRAC, Deadline, check_timeout
from capricorn.runtime.layout_agreement import agree_on_layouts
from capricorn.runtime.persist.names import refuse_shared_names
from capricorn.runtime.persist.persister import Persister
from capricorn.runtime.persist.restore import PersistentTier
from capricorn.runtime.recovery import Recovery
from capricorn.runtime.save.executor import Executor
from capricorn.runtime.save.live_source import LiveSource
from capricorn.runtime.save.save import ReplicatedSave
from capricorn.runtime.save.staging import Stager, make_stager, payload_of
from capricorn.runtime.schedule.gate import Gate
from capricorn.runtime.schedule.scheduler import make_scheduler
from capricorn.runtime.store.node_store import NodeStore
from capricorn.runtime.store.slot import Layout
from capricorn.systems.flat_state import FlatState
from capricorn.systems.interface import (
    CheckpointSystem,
    ChunkEvent,
    Counters,
    JobContext,
    Planning,
    RestoreReport,
)
from capricorn.units import Bytes, Seconds


class ReplicatingSystem(CheckpointSystem):
    """Checkpoints into the memory of this node and of its peers.

    The update waits for the local copy alone, which is made while the next iteration computes. One save is on its way
    at a time; the next starts once it has settled on all ranks, which a vote tells: a reduction of a few integers per
    iteration.

    Source: Capricorn, CLUSTER 2025 (what is checkpointed and where); the staged path is ours.
    """

    kind = "replicates"
    can_be_replaced: ClassVar[bool] = True
    plans: ClassVar[bool] = True
    """Whether idle spans are looked for; otherwise all is sent as soon as it is staged."""

    def __init__(self) -> None:
        self._counters = Counters()
        self._server: ReplicaServer | None = None
        self._links: list[ReplicaLink] = []
        self._executor: Executor | None = None
        self._store: NodeStore | None = None
        self._completed: list[int] = []
        self._latest_local: int | None = None
        self._waiting: int | None = None
        """An iteration whose save cannot start yet, since the one before has not settled."""
        self._is_clean = False
        """Whether copies of an abandoned future are gone from the stores."""

    def attach(self, job: JobContext, state: FlatState) -> None:
        self.job, self._state = job, state
        self._timeout_s = check_timeout("system.timeout_s", job.config.timeout_s)
        check_timeout("persist.timeout_s", job.persist.timeout_s)
        store = NodeStore.open(job.store_dir)
        self._persister, self._store = Persister(job, store, self._counters), store
        holders, owners = self._peers(holders_of), self._peers(owners_on)
        tier = PersistentTier(job, job.persist_dir, store, state) if job.persist_dir is not None else None
        if tier is not None:
            refuse_shared_names(job.control_group, state)
            tier.refuse_other_state()
        mine = [job.rank, *owners]
        layouts = agree_on_layouts(job.control_group, store, state, mine, job.config.block_bytes)
        store.open_all({owner: layouts[owner] for owner in mine}, {job.rank: self._persister.num_slots})
        slots = store.open_slots(job.rank, layouts[job.rank])
        me = Identity(job.run_id, job.attempt, share_secret(job.control_group))
        deadline_s, idle_priority = self._timeout_s, job.config.idle_priority
        self._server = ReplicaServer(
            me, job.rank, job.address, store, timeout_s=deadline_s, idle_priority=idle_priority, routes=job.routes
        )
        self._server.start({owner: layouts[owner] for owner in owners})
        addresses = gather_addresses(job.control_group, self._server.address)
        self._connect(me, {holder: addresses[holder] for holder in holders})
        gate = Gate(is_reactive=self._is_reactive(), patience_s=self._timeout_s / 2)
        planner = self.make_planner(holders, state.num_bytes)
        self._scheduler = make_scheduler(job, planner, gate, me.secret, holders, owners)
        stager, live = self._make_sources(make_stager(state, slots, job.device), layouts[job.rank])
        self._executor = Executor(
            store,
            job.rank,
            job.attempt,
            stager,
            self._links,
            gate=gate,
            timeout_s=deadline_s,
            idle_priority=idle_priority,
            staging_threads=job.config.staging_threads,
            live=live,
        )
        self._commit_tracker = CommitTracker[ReplicatedSave](job.control_group)
        self._recovery = Recovery(job.rank, job.control_group, store, mine, self._links, job.attempt, tier)
        self._persister.start()

    def on_iteration_begin(self, iteration: int) -> None:
        self._scheduler.on_iteration_begin(self.iteration_order.check(iteration))

    def on_op_begin(self, op: OpKey) -> None:
        self._scheduler.on_op_begin(op)
        # Before the update, since the vote would have to wait behind its broadcasts.
        if op.kind == "reduce":
            self._start_vote()

    def on_op_end(self, op: OpKey) -> None:
        self._scheduler.on_op_end(op)
        if self._waiting is not None:
            self._retry_waiting(op)

    def on_routed(self, layer: int, tokens_per_expert: Sequence[int]) -> None:
        self._scheduler.on_routed(layer, tokens_per_expert)

    def before_update(self, iteration: int) -> None:
        self.iteration_order.check(iteration)
        self._check_threads()
        self._scheduler.take_profile()
        if self._waiting is not None:
            self._overflow()
            self._start(self._waiting)
        save = self._commit_tracker.pending
        if save is not None:
            if not save.wait_staged(self._timeout_s):
                raise StoreError(f"rank {self.job.rank}: iteration {save.iteration} is still not staged")
            self._latest_local = save.iteration if save.is_local else self._latest_local
            if not self._poll_vote():
                self._start_vote()

    def after_update(self, iteration: int) -> None:
        iteration = self.iteration_order.advance(iteration)
        self._check_threads()
        self._scheduler.after_update(iteration)
        self._persister.note(iteration)
        is_settled = self._poll_vote()
        every = self.job.config.every
        if every == 0 or iteration % every or iteration < self.first_iteration:
            return
        self._forget_after(None)
        self._state.capture()
        if not is_settled:
            self._scheduler.note_deadline_missed()
            if self.job.config.max_lost > 1:
                self._waiting = iteration
                self._start_vote()
                return
            self._overflow()  # or a node that is lost before the save has settled would cost two finished iterations
        self._start(iteration)

    def on_iteration_end(self, iteration: int) -> None:
        assert self._executor is not None
        self._scheduler.book(self._executor.take_sent())
        self._scheduler.on_iteration_end(iteration)

    def latest_complete(self) -> int | None:
        return self._commit_tracker.latest

    def latest_local(self) -> int | None:
        return self._latest_local

    def drain(self, timeout_s: Seconds) -> None:
        deadline = Deadline(timeout_s)
        self._check_threads()
        self._finish(timeout_s, deadline)
        self._persister.finish(min(deadline.left_s, self.job.persist.timeout_s))
        complaints = [self._counters.complaint(self.job.rank), self._persister.complaint()]
        if any(complaints):
            raise CapricornError("; ".join(filter(None, complaints)))

    def restore(self) -> RestoreReport:
        self.iteration_order.check_restore()
        found = self._recovery.run()
        begin_s = time.perf_counter()
        assert self._store is not None
        slot = self._store.read(self.job.rank, found.iteration)
        assert slot is not None
        self._state.load(payload_of(slot))
        self._state.publish()
        self._forget_after(found.iteration)
        self._commit_tracker.latest = self._latest_local = self.iteration_order.advance(found.iteration)
        self._replace_lost(found.iteration, found.holders[self.job.rank])
        self._persister.resume(found.newest_persisted)
        times = found.agree_s, found.fetch_s, time.perf_counter() - begin_s
        return RestoreReport(found.iteration, found.tiers, *times, found.damaged, found.notes)

    def close(self) -> None:
        executor, links, server, store = self._executor, self._links, self._server, self._store
        self._executor, self._links, self._server, self._store = None, [], None, None
        with ExitStack() as ending:  # of which the last comes first; whatever fails, the others are ended too
            if store is not None:
                ending.callback(store.close)
                ending.callback(self._persister.close)
            if server is not None:
                ending.callback(server.close)
            for link in links:
                ending.callback(link.close)
            if executor is not None:
                ending.callback(executor.close)
                ending.callback(self._scheduler.close)

    def counters(self) -> Counters:
        if self._executor is not None:
            self._counters.staged_bytes = self._executor.staged_bytes
            self._counters.sent_bytes = self._executor.sent_bytes
        return self._counters

    def take_completed(self) -> list[int]:
        taken, self._completed = self._completed, []
        return taken

    def take_events(self) -> list[ChunkEvent]:
        return self._executor.take_events() if self._executor is not None else []

    def take_planning(self) -> Planning:
        return self._scheduler.take()

    def make_planner(self, holders: Sequence[int], shard_bytes: Bytes) -> Planner:
        config = self.job.planner
        if config.spans == "none" or not holders or not self.plans:
            return StreamPlanner(shard_bytes, len(holders), self.job.config.block_bytes)
        return SpanPlanner(config, rank=self.job.rank, holders=holders, shard_bytes=shard_bytes)

    def _is_reactive(self) -> bool:
        """Tells whether chunks pass by what the link really does, or by the plan alone."""
        return self.job.planner.gate

    def _make_sources(self, stager: Stager, layout: Layout) -> tuple[Stager, LiveSource | None]:
        """Returns the stager of the local copy, and the live source if replicas are sent from the live state."""
        return stager, None

    def _peers(self, nodes_of: Callable[[int, int, int], list[int]]) -> list[int]:
        """Returns the ranks with this rank's local rank on the nodes that `nodes_of` names."""
        topology = self.job.topology
        node, local_rank = topology.node_of(self.job.rank), topology.local_rank_of(self.job.rank)
        nodes = nodes_of(node, topology.num_nodes, self.job.config.replicas)
        return [topology.ranks_of(node)[local_rank] for node in nodes]

    def _connect(self, me: Identity, addresses: dict[int, tuple[str, int]]) -> None:
        assert self._store is not None
        manifest, config = json.dumps(self._state.manifest()), self.job.config
        self._store.write_manifest(self.job.rank, manifest)
        for holder, address in addresses.items():
            link = ReplicaLink(
                me,
                self.job.rank,
                holder,
                address,
                timeout_s=self._timeout_s,
                low_class=config.low_class,
                send_buffer_bytes=config.send_buffer_bytes,
                route=self.job.routes.get(holder),
            )
            link.connect(manifest)
            self._links.append(link)

    def _start(self, iteration: int) -> None:
        assert self._executor is not None
        is_late, self._waiting = self._waiting is not None, None
        plan = self._scheduler.plan(iteration, self._executor.link_model(), is_late=is_late)
        save = self._executor.start(iteration, self._commit_tracker.latest, plan)
        self._commit_tracker.track(save)

    def _retry_waiting(self, op: OpKey) -> None:
        """Starts the waiting save as soon as the one before has settled on all ranks.

        A vote starts when a rank comes to its experts and is polled when it is done with them, and with what follows.
        In between the links are empty: nobody waits for the answer.
        """
        into, out_of = ("dispatch", "combine") if op.direction == "forward" else ("combine", "dispatch")
        if op.kind == into:
            self._start_vote()
        elif op.kind == out_of and self._waiting is not None and self._poll_vote():
            self._start(self._waiting)

    def _start_vote(self) -> None:
        """Starts a vote on the pending save, once all ranks have come to the same moment; collective."""
        save = self._commit_tracker.pending
        if save is not None and self._commit_tracker.can_start_vote:
            self._commit_tracker.start_vote(self._scheduler.take_losses())
            self._persister.start_vote(save.iteration)

    def _poll_vote(self, deadline: Deadline | None = None) -> bool:
        """Takes in the result of the last vote; returns whether no save is on its way any more.

        Without a deadline the vote is waited for as long as the control group waits.
        """
        save = self._commit_tracker.pending
        is_settled = self._commit_tracker.poll_vote(None if deadline is None else deadline.left_s)
        self._persister.poll_vote(None if deadline is None else deadline.left_s)
        self._scheduler.note_losses(*self._commit_tracker.losses_s)
        if not is_settled or save is None:
            return is_settled
        if self._commit_tracker.latest == save.iteration:
            self._completed.append(save.iteration)
            self._persister.take(save.iteration)
        if save.failures:
            self._counters.failed_saves += 1
            self._counters.last_failure = f"iteration {save.iteration}: {save.failures[0]}"
        return True

    def _settle(self, timeout_s: Seconds, deadline: Deadline | None = None) -> None:
        """Blocks until no save is on its way on any rank; each rank waits for its own, so one vote is enough.

        The rank's own save has `timeout_s`. With a deadline the votes must be over by then, too; so a part of what is
        left of it is for the others to hear what became of the save.
        """
        if self._poll_vote(deadline):
            return
        assert self._executor is not None
        assert self._commit_tracker.pending is not None
        own_s = timeout_s if deadline is None else OWN_FRAC * deadline.left_s
        self._executor.settle(self._commit_tracker.pending, own_s)
        self._start_vote()
        self._poll_vote(deadline)

    def _overflow(self) -> None:
        """Blocks until the save on its way has settled on all ranks; the wait is booked as its overflow."""
        begin_s = time.perf_counter()
        self._settle(self._timeout_s)
        self._scheduler.overflow(time.perf_counter() - begin_s)

    def _finish(self, timeout_s: Seconds, deadline: Deadline | None = None) -> None:
        """Blocks until everything requested is in place or has failed, also a save that could not start yet."""
        self._settle(timeout_s, deadline)
        if self._waiting is not None:
            self._start(self._waiting)
            self._settle(timeout_s, deadline)

    def _check_threads(self) -> None:
        """Hears of what went wrong beside training: a replica of others that failed here is counted.

        Raises:
            CapricornError: a thread has ended that saves cannot do without, and why.
        """
        if self._executor is None or self._server is None:
            return
        self._executor.check()
        self._scheduler.check()
        self._server.check()
        for failure in self._server.take_failures():
            self._counters.failed_saves += 1
            self._counters.last_failure = failure

    def _forget_after(self, iteration: int | None) -> None:
        """Empties, before the first save, the slots that an abandoned attempt left of later iterations; collective."""
        if not self._is_clean:
            assert self._store is not None
            self._store.forget_after(iteration)
            # Or a faster owner's new copy could be taken for an old one.
            barrier(self.job.control_group, "all ranks to empty the slots of an abandoned future")
            self._is_clean = True

    def _replace_lost(self, iteration: int, holders: Sequence[int]) -> None:
        """Sends the restored state to the holders that lost it, so that the next failure finds all replicas again."""
        assert self._executor is not None
        lost = [link.holder for link in self._links if link.holder not in holders]
        plan = self._scheduler.plan(iteration, None)
        self._commit_tracker.track(self._executor.resend(iteration, plan, lost))
