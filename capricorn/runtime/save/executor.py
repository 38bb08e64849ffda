"""Carries out plans: one thread or more stage a checkpoint into its slot, and one thread for each holder sends it.

The threads run beside training and only copy, checksum and make system calls. Knows no collective: what is complete on
all ranks is decided elsewhere. The states of a save stand in `save.save`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

from capricorn.errors import CapricornError, StoreError, TransportError, in_words
from capricorn.planner.link_model import LinkEstimator, LinkModel
from capricorn.planner.plan import Chunk, Plan
from capricorn.runtime.comm.idle_priority import use_idle_priority
from capricorn.runtime.comm.replica_link import ReplicaLink, Source
from capricorn.runtime.deadline import Deadline
from capricorn.runtime.save.live_source import LiveSource
from capricorn.runtime.save.save import ReplicatedSave
from capricorn.runtime.save.staging import Piece, Stager
from capricorn.runtime.save.staging_team import StagingTeam
from capricorn.runtime.schedule.gate import Admission, Gate
from capricorn.runtime.store.node_store import NodeStore
from capricorn.runtime.store.slot import Slot, checksum
from capricorn.runtime.watched_thread import WatchedThread
from capricorn.systems.interface import ChunkEvent
from capricorn.units import Bytes, Seconds, format_seconds

MAX_EVENTS = 1 << 14
"""Number of transfers remembered for a timeline that nobody takes; the oldest are forgotten."""


OUTAGE_FACTOR = 10
"""A link that failed twice in a row is left alone for so many times as long as the last try took."""
MAX_TRANSFER_S: Seconds = 0.25
"""A transfer that lasts longer is booked as several, so that each belongs to one iteration."""


class _Transfer:
    """A transfer that was not interrupted so far."""

    def __init__(self, admission: Admission, in_flight_bytes: Bytes) -> None:
        """`in_flight_bytes` were handed to the network before and are not acknowledged."""
        self.admission = admission
        """How its first part came through the gate."""
        self.begin_s = self.end_s = time.perf_counter()
        self.num_bytes: Bytes = 0
        self.left_bytes = self._before_bytes = in_flight_bytes

    def may_go_on(self, admission: Admission) -> bool:
        """Tells whether what was admitted now belongs to it: under the same conditions, and not for ever."""
        is_same = (admission.is_idle, admission.is_urgent) == (self.admission.is_idle, self.admission.is_urgent)
        return is_same and time.perf_counter() - self.begin_s < MAX_TRANSFER_S

    def add(self, num_bytes: Bytes, left_bytes: Bytes) -> None:
        """Notes bytes handed to the network just now; `left_bytes` of everything are not acknowledged."""
        self.end_s = time.perf_counter()
        self.num_bytes += num_bytes
        self.left_bytes = left_bytes

    @property
    def moved_bytes(self) -> Bytes:
        """Bytes that were acknowledged between its begin and its end."""
        return self.num_bytes + self._before_bytes - self.left_bytes


class Outage:
    """Failures of one link in a row: it is tried again at once after the first, and at ever fewer saves after that.

    So a holder that is gone costs a small part of the time, and not a deadline in every save.
    """

    def __init__(self, holder: int, clock: Callable[[], Seconds] = time.monotonic) -> None:
        self._holder, self._clock = holder, clock
        self._begin_s = self._until_s = 0.0
        self._first = ""
        """When and why it failed first; empty if it has not."""

    def check(self) -> None:
        """Tells whether the link is to be tried, and takes the time from then on.

        Raises:
            CapricornError: not yet, and why.
        """
        self._begin_s = self._clock()
        if self._begin_s < self._until_s:
            raise CapricornError(f"the link to rank {self._holder} is down since {self._first}")

    def note(self, iteration: int, failure: str) -> None:
        """Notes that the link failed in the save of that iteration, and why."""
        if self._first:
            now_s = self._clock()
            self._until_s = now_s + OUTAGE_FACTOR * (now_s - self._begin_s)
        self._first = self._first or f"iteration {iteration}: {failure}"


class Executor:
    """The threads of one rank; the training thread hands in a save once the one before has settled."""

    def __init__(
        self,
        store: NodeStore,
        owner: int,
        attempt: int,
        stager: Stager,
        links: Sequence[ReplicaLink],
        *,
        gate: Gate,
        timeout_s: Seconds,
        idle_priority: bool,
        staging_threads: int = 1,
        live: LiveSource | None = None,
    ) -> None:
        """Starts the threads.

        Args:
            store: of this node, in which the slots of `owner` are open.
            owner: this rank.
            attempt: counts the starts of the job; copies are marked with it.
            stager: copies the live state into a slot.
            links: one to each holder, in the order of the plan's replicas.
            gate: lets chunks pass.
            timeout_s: deadline of every wait.
            idle_priority: whether the senders run at SCHED_IDLE.
            staging_threads: how many threads copy and hash a checkpoint.
            live: the live state, if replicas are sent from it; otherwise they are sent from the slot, block by block.
        """
        self._live = live
        self._last: ReplicatedSave | None = None
        self.staged_bytes: Bytes = 0
        self._gate = gate
        self._estimator = LinkEstimator()
        self._knows_link = False
        self._lock = threading.Lock()
        self._sent: deque[ChunkEvent] = deque(maxlen=MAX_EVENTS)
        self._transfers: dict[int, _Transfer] = {}
        """By holder: the transfer that goes on."""
        self._events: deque[ChunkEvent] = deque(maxlen=MAX_EVENTS)
        self._store, self._owner, self._attempt = store, owner, attempt
        self._stager, self._links, self._timeout_s = stager, links, timeout_s
        self._has_idle_priority = idle_priority
        self._to_stage: SimpleQueue[ReplicatedSave | None] = SimpleQueue()
        self._to_send: list[SimpleQueue[ReplicatedSave | None]] = [SimpleQueue() for _ in links]
        self._team = StagingTeam(staging_threads)
        self._threads = [WatchedThread(target=self._stage_loop, name="capricorn-stage", daemon=True)]
        for link, queue in zip(links, self._to_send, strict=True):
            name = f"capricorn-send-{link.holder}"
            self._threads.append(WatchedThread(target=self._send_loop, args=(link, queue), name=name, daemon=True))
        for thread in self._threads:
            thread.start()

    @property
    def sent_bytes(self) -> Bytes:
        """Payload handed to the network so far."""
        return sum(link.sent_bytes for link in self._links)

    def check(self) -> None:
        """Tells whether saves can still be carried out.

        Raises:
            CapricornError: a thread has ended, and why.
        """
        for thread in self._threads:
            thread.check()

    def start(self, iteration: int, keep: int | None, plan: Plan) -> ReplicatedSave:
        """Begins a checkpoint of the live state, which must not change until it is staged and, if sent live, sent."""
        save = self._last = ReplicatedSave(iteration, keep, plan, [link.holder for link in self._links], self._live)
        self._stager.mark()
        if self._live is not None:
            self._live.mark()
        self._to_stage.put(save)
        return save

    def resend(self, iteration: int, plan: Plan, holders: Sequence[int]) -> ReplicatedSave:
        """Sends a copy that is complete here to the holders that have lost theirs."""
        receivers = [link.holder for link in self._links if link.holder in holders]
        save = self._last = ReplicatedSave(iteration, iteration, plan, receivers)
        save.slot = self._store.read(self._owner, iteration)
        assert save.slot is not None
        save.advance(save.slot.layout.num_blocks)
        save.finish_staging()
        for link, queue in zip(self._links, self._to_send, strict=True):
            if link.holder in holders:
                queue.put(save)
        return save

    def settle(self, save: ReplicatedSave, timeout_s: Seconds) -> None:
        """Waits until all copies of a save are in place or have failed; those that are late by then have failed."""
        self._gate.set_urgent(True)
        try:
            if not save.wait_settled(timeout_s):
                # First, so that no thread takes a closed link for one to be opened again: the update comes next.
                save.give_up("replicas were not acknowledged within " + format_seconds(timeout_s))
                for link in self._links:
                    link.close()
        finally:
            self._gate.set_urgent(False)

    def link_model(self) -> LinkModel | None:
        """Returns how long transfers take, as measured so far; None if nothing was measured."""
        with self._lock:
            return self._estimator.model()

    def take_sent(self) -> list[ChunkEvent]:
        """Returns the uninterrupted transfers that ended since the last call, for the books of the scheduler."""
        with self._lock:
            taken = list(self._sent)
            self._sent.clear()
        return taken

    def take_events(self) -> list[ChunkEvent]:
        """Returns the transfers that ended since the last call, stagings among them, for the timeline."""
        taken = list(self._events)
        self._events.clear()
        return taken

    def close(self) -> None:
        """Lets a running staging finish, whose state is still constant, and ends everything else."""
        self._to_stage.put(None)
        self._threads[0].join(self._timeout_s)
        if self._last is not None and not self._last.is_settled:
            self._last.give_up("the system was closed")
        for link, queue in zip(self._links, self._to_send, strict=True):
            link.close()
            queue.put(None)
        deadline = Deadline(self._timeout_s)
        for thread in self._threads[1:]:
            thread.join(deadline.left_s)
        self._team.close(deadline)
        self._stager.close()

    def _stage_loop(self) -> None:
        while (save := self._to_stage.get()) is not None:
            try:
                self._stage(save)
                save.finish_staging()
            except BaseException as error:  # noqa: BLE001 - whatever it is, the save has failed and training goes on
                failure = f"staging: {in_words(error)}"
                save.finish_staging(failure)
                if save.slot is None:  # no sender has heard of it, and none will
                    save.give_up(failure)

    def _stage(self, save: ReplicatedSave) -> None:
        begin_s = time.perf_counter()
        slot = save.slot = self._store.begin(self._owner, save.iteration, save.keep, self._attempt)
        for queue in self._to_send:
            queue.put(save)
        pieces = self._stager.pieces(slot)
        self._team.run(lambda: self._stage_pieces(save, slot, pieces))
        self._store.commit(slot)  # all threads are done, and none has failed
        self.staged_bytes += slot.layout.payload_bytes
        self._note("stage", save, begin_s, slot.layout.payload_bytes)

    def _stage_pieces(self, save: ReplicatedSave, slot: Slot, pieces: Iterator[Piece]) -> None:
        """Copies and hashes pieces until none is left; several threads share them."""
        try:
            for index in self._stager.copy(pieces):
                slot.table[index] = checksum(slot.payload[slot.layout.block(index)])
                save.note_staged(index)
        except BaseException:
            deque(pieces, maxlen=0)  # what the others have not begun is in vain
            raise

    def _send_loop(self, link: ReplicaLink, queue: SimpleQueue[ReplicatedSave | None]) -> None:
        if self._has_idle_priority:
            use_idle_priority()
        outage = Outage(link.holder)
        while (save := queue.get()) is not None:
            try:
                outage.check()
                self._send(link, save)
            except BaseException as error:  # noqa: BLE001 - whatever it is, the save has failed and training goes on
                link.close()
                save.end_turn(link.holder)
                if isinstance(error, TransportError):
                    outage.note(save.iteration, in_words(error))
                save.finish_link(in_words(error))
            else:
                outage = Outage(link.holder)
                save.finish_link()

    def _send(self, link: ReplicaLink, save: ReplicatedSave) -> None:
        source = save.live or save.slot
        assert source is not None
        replica = self._links.index(link)
        try:
            if not save.wait_turn(link.holder, self._timeout_s):
                raise CapricornError(f"the replicas before that on rank {link.holder} did not get out")
            if save.live is not None:
                save.live.begin()
            link.begin(save.iteration, save.keep)
            for chunk in save.plan.chunks:
                if chunk.replica == replica:
                    self._send_chunk(link, save, source, chunk)
        finally:
            save.end_turn(link.holder)
            self._end(link, save)
        _refuse_given_up(save)
        link.commit(save.iteration)

    def _send_chunk(self, link: ReplicaLink, save: ReplicatedSave, source: Source, chunk: Chunk) -> None:
        start, stop = chunk.offset, chunk.offset + chunk.num_bytes
        block = (stop - 1) // source.layout.block_bytes
        if save.live is None and not save.is_block_staged(block):
            self._end(link, save)
            if not save.wait_block(block, self._timeout_s):
                raise StoreError(f"iteration {save.iteration} was not staged")
        is_overflow = chunk.span >= len(save.plan.limits)
        while start < stop:
            _refuse_given_up(save)
            left_bytes = stop - start
            admission = self._gate.wait(link.holder, left_bytes, lambda: link.in_flight_bytes, is_overflow=is_overflow)
            transfer = self._transfers.get(link.holder)
            if transfer is not None and (admission.has_waited or not transfer.may_go_on(admission)):
                self._end(link, save)
            if link.holder not in self._transfers:
                self._transfers[link.holder] = _Transfer(admission, link.in_flight_bytes)
            link.send_range(save.iteration, source, start, start + admission.num_bytes)
            start += admission.num_bytes
            self._transfers[link.holder].add(admission.num_bytes, link.in_flight_bytes)

    def _end(self, link: ReplicaLink, save: ReplicatedSave) -> None:
        """Books the transfer that went on until now, and lets the link model learn from it."""
        transfer = self._transfers.pop(link.holder, None)
        if transfer is None:
            return
        end_s = transfer.end_s
        if self._gate.link is not None:
            end_s += transfer.left_bytes / self._gate.link.bytes_per_s
        is_urgent = transfer.admission.is_urgent
        event = ChunkEvent("send", save.iteration, transfer.begin_s, end_s, transfer.num_bytes, is_urgent)
        with self._lock:
            self._sent.append(event)
            # What shared the link tells little of it, but more than nothing.
            if transfer.moved_bytes > 0 and (transfer.admission.is_idle or not self._knows_link):
                self._knows_link = transfer.admission.is_idle
                self._estimator.note(transfer.moved_bytes, transfer.end_s - transfer.begin_s)
        self._events.append(event)

    def _note(self, kind: str, save: ReplicatedSave, begin_s: Seconds, num_bytes: int) -> None:
        self._events.append(ChunkEvent(kind, save.iteration, begin_s, time.perf_counter(), num_bytes))


def _refuse_given_up(save: ReplicatedSave) -> None:
    """Raises CapricornError if what is sent may no longer be the state of its iteration."""
    if save.is_given_up:
        raise CapricornError(f"iteration {save.iteration} was given up")
