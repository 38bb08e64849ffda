"""The threads that carry out plans: what they send when, what they learn of the link, and how long they may wait."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from capricorn.errors import CapricornError, TransportError
from capricorn.planner.link_model import LinkModel
from capricorn.planner.plan import Chunk, Limit, Plan, tile
from capricorn.runtime.comm.handshake import Identity
from capricorn.runtime.comm.replica_link import ReplicaLink, Source
from capricorn.runtime.comm.replica_server import ReplicaServer
from capricorn.runtime.save.executor import Executor, Outage
from capricorn.runtime.save.live_source import LiveSource
from capricorn.runtime.save.staging import CpuStager, Piece
from capricorn.runtime.schedule.gate import Gate
from capricorn.runtime.store.node_store import NodeStore
from capricorn.runtime.store.slot import Layout, Slot
from capricorn.systems.flat_state import FlatState
from capricorn.topology import Topology

ME = Identity("run", 0, b"secret")
OWNER, HOLDER = 1, 0
SIZE, BLOCK = 100_000, 65536
DEADLINE_S = 20.0
CLOSED = Limit(0.0, 0)


class Rank:
    """An owner with an executor, and the holder of its replica."""

    def __init__(
        self, folder: Path, timeout_s: float = DEADLINE_S, *, is_reactive: bool = True, staging_threads: int = 1
    ) -> None:
        topology = Topology(2, 1)
        self.weights = torch.arange(SIZE, dtype=torch.float32)
        self.state = state = FlatState({"w": self.weights})
        layout = Layout(state.num_bytes, BLOCK, state.digest)
        self.num_bytes = state.num_bytes
        self.holder_store = NodeStore.create(folder / "node0", "run", 0, topology)
        self.holder_store.open_slots(OWNER, layout)
        self.store = NodeStore.create(folder / "node1", "run", 1, topology)
        self.slots = slots = self.store.open_slots(OWNER, layout)
        self.server = ReplicaServer(
            ME, HOLDER, "127.0.0.1", self.holder_store, timeout_s=timeout_s, idle_priority=False
        )
        self.server.start({OWNER: layout})
        self.link = ReplicaLink(
            ME, OWNER, HOLDER, self.server.address, timeout_s=timeout_s, low_class=False, send_buffer_bytes=BLOCK
        )
        self.link.connect("{}")
        self.gate = Gate(is_reactive=is_reactive, patience_s=timeout_s / 2)
        stager = CpuStager(state, slots)
        self.executor = Executor(
            self.store,
            OWNER,
            0,
            stager,
            [self.link],
            gate=self.gate,
            timeout_s=timeout_s,
            idle_priority=False,
            staging_threads=staging_threads,
        )

    def plan(self, cuts: Sequence[int], limits: tuple[Limit, ...] = ()) -> Plan:
        """A chunk up to each of these places, in a span of its own, and the rest as overflow."""
        edges = [0, *cuts, self.num_bytes]
        return Plan(tuple(Chunk(a, b - a, span) for span, (a, b) in enumerate(pairwise(edges))), limits)

    def replica_is(self, iteration: int) -> bool:
        slot = self.holder_store.read(OWNER, iteration)
        return (
            slot is not None and slot.damaged_block() is None and bytes(slot.payload) == self.weights.numpy().tobytes()
        )

    def close(self) -> None:
        self.gate.release()
        self.executor.close()
        self.link.close()
        self.server.close()


@pytest.fixture(params=[1, 3], ids=["one staging thread", "three staging threads"])
def rank(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Rank]:
    rank = Rank(tmp_path, staging_threads=request.param)
    yield rank
    rank.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("capricorn")]


def test_a_plan_of_any_cut_is_carried_out(rank: Rank) -> None:
    for iteration, cuts in enumerate(([], [1, 2, 3], [100_001, 100_002, 399_999], list(range(999, 400_000, 999))), 1):
        rank.weights += iteration
        save = rank.executor.start(iteration, iteration - 1, rank.plan(cuts))
        assert save.wait_settled(DEADLINE_S)
        assert save.is_complete, save.failures
        assert rank.replica_is(iteration)
        assert rank.executor.sent_bytes == iteration * rank.num_bytes


def test_while_the_gate_is_closed_a_checkpoint_is_staged_and_not_sent(rank: Rank) -> None:
    rank.gate.open(1, 0.0, CLOSED)
    save = rank.executor.start(1, 0, rank.plan([5000]))
    assert save.wait_staged(DEADLINE_S)
    assert save.is_local
    assert not save.is_settled
    assert rank.executor.sent_bytes == 0
    rank.gate.release()
    assert save.wait_settled(DEADLINE_S)
    assert save.is_complete
    assert rank.replica_is(1)


def test_an_update_that_waits_lets_everything_pass_and_then_no_more(rank: Rank) -> None:
    rank.gate.open(1, 0.0, CLOSED)
    save = rank.executor.start(1, 0, rank.plan([5000]))
    rank.executor.settle(save, DEADLINE_S)
    assert save.is_complete
    sent = rank.executor.take_sent()
    assert sum(event.num_bytes for event in sent if event.is_pressed) == rank.num_bytes
    rank.weights += 1
    save = rank.executor.start(2, 1, rank.plan([5000]))
    assert save.wait_staged(DEADLINE_S)
    assert not save.is_settled


def test_a_plan_leaves_span_by_span_and_its_overflow_last(tmp_path: Path) -> None:
    limits = (Limit(1.0, 5000), Limit(1.0, 300_000))
    with closing(Rank(tmp_path, is_reactive=False)) as rank:
        rank.gate.open(1, 0.0, CLOSED)
        rank.gate.begin_save(is_late=False)
        save = rank.executor.start(1, 0, rank.plan([5000, 305_000], limits))
        assert save.wait_staged(DEADLINE_S)
        sent = [rank.executor.sent_bytes]
        for number, limit in enumerate(limits, 2):
            rank.gate.open(number, 0.0, limit)
            wait_until_sent(rank, sum(limit.num_bytes for limit in limits[: number - 1]))
            sent.append(rank.executor.sent_bytes)
            rank.gate.close(is_last=number == 3)
        assert sent == [0, 5000, 305_000]
        assert save.wait_settled(DEADLINE_S)
        assert save.is_complete


def wait_until_sent(rank: Rank, sent_bytes: int) -> None:
    pause = threading.Event()
    for _ in range(int(DEADLINE_S / 0.001)):
        if rank.executor.sent_bytes >= sent_bytes:
            return
        pause.wait(0.001)


def test_transfers_teach_the_link_and_are_taken_in_order_once(rank: Rank) -> None:
    assert rank.executor.link_model() is None
    for iteration in (1, 2, 3):
        save = rank.executor.start(iteration, iteration - 1, Plan(tile(rank.num_bytes, 1, BLOCK)))
        assert save.wait_settled(DEADLINE_S)
    sent = rank.executor.take_sent()
    assert sum(event.num_bytes for event in sent) == 3 * rank.num_bytes
    assert {event.iteration for event in sent} == {1, 2, 3}
    assert all(event.kind == "send" and event.begin_s <= event.end_s for event in sent)
    assert [event.begin_s for event in sent] == sorted(event.begin_s for event in sent)
    assert rank.executor.take_sent() == []
    link = rank.executor.link_model()
    assert link is not None
    assert link.bytes_per_s > 0
    assert link.latency_s >= 0


def test_what_is_still_on_its_way_when_it_was_handed_over_takes_its_time_on_the_link(rank: Rank) -> None:
    rank.gate.link = LinkModel(0.0, 1e-3)  # a byte takes a thousand seconds
    save = rank.executor.start(1, 0, rank.plan([]))
    assert save.wait_settled(DEADLINE_S)
    (event,) = rank.executor.take_sent()
    assert event.num_bytes == rank.num_bytes
    assert event.end_s >= event.begin_s


def test_a_wait_in_the_gate_ends_a_transfer(rank: Rank) -> None:
    rank.gate.open(1, 0.0, CLOSED)
    save = rank.executor.start(1, 0, rank.plan([5000]))
    assert save.wait_staged(DEADLINE_S)
    rank.gate.release()
    assert save.wait_settled(DEADLINE_S)
    assert sum(event.num_bytes for event in rank.executor.take_sent()) == rank.num_bytes


def test_a_gate_that_stays_closed_does_not_break_the_link(tmp_path: Path) -> None:
    """As in an iteration that is longer than the deadline: nobody is late, and the replica must count."""
    with closing(Rank(tmp_path, timeout_s=0.4)) as rank:
        rank.gate.open(1, 0.0, CLOSED)
        save = rank.executor.start(1, 0, rank.plan([5000] * 4))
        assert save.wait_settled(DEADLINE_S)
        assert save.failures == []


# --- the live state ----------------------------------------------------------------------------------------------


class FakeLink:
    """To a holder that takes everything, opens again after it was closed, and remembers what it was sent."""

    def __init__(self, holder: int) -> None:
        self.holder, self.sent_bytes, self.in_flight_bytes = holder, 0, 0
        self.received = bytearray()
        self.committed: list[int] = []

    def begin(self, iteration: int, keep: int | None) -> None:
        self.received.clear()

    def send_range(self, iteration: int, source: Source, start: int, stop: int) -> None:
        size = source.layout.block_bytes
        for at in range(start, stop, size):
            self.received += source.view(at, min(stop, at + size))

    def commit(self, iteration: int) -> None:
        self.committed.append(iteration)

    def close(self) -> None:
        """It opens again when something is sent."""


class StalledLink(FakeLink):
    """To a holder that takes nothing until the link is closed."""

    def __init__(self, holder: int) -> None:
        super().__init__(holder)
        self.closed = threading.Event()

    def begin(self, iteration: int, keep: int | None) -> None:
        assert self.closed.wait(DEADLINE_S)
        raise TransportError("closed")

    def close(self) -> None:
        self.closed.set()


class FailingSource(LiveSource):
    """Of a state that cannot be copied."""

    def view(self, start: int, stop: int) -> memoryview:
        raise RuntimeError("out of memory")


def live_executor(
    folder: Path,
    weights: torch.Tensor,
    links: Sequence[FakeLink],
    source: type[LiveSource] = LiveSource,
    *,
    idle_priority: bool = False,
) -> Executor:
    """An executor that sends the live weights."""
    state = FlatState({"w": weights})
    layout = Layout(state.num_bytes, BLOCK, state.digest)
    store = NodeStore.create(folder / "node1", "run", 1, Topology(2, 1))
    stager = CpuStager(state, store.open_slots(OWNER, layout))
    live = source(state, layout, torch.device("cpu"), buffer_bytes=2 * BLOCK, num_buffers=2)
    gate = Gate(is_reactive=False)
    return Executor(
        store, OWNER, 0, stager, links, gate=gate, timeout_s=DEADLINE_S, idle_priority=idle_priority, live=live  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize("is_closed", [False, True])
def test_once_an_update_waits_no_longer_nothing_of_the_live_state_is_sent_and_committed(
    tmp_path: Path, is_closed: bool
) -> None:
    weights = torch.zeros(SIZE)
    stalled, other = StalledLink(10), FakeLink(11)
    executor = live_executor(tmp_path, weights, [stalled, other])
    save = executor.start(7, 6, Plan(tile(4 * SIZE, 2, BLOCK)))
    if is_closed:
        executor.close()
    else:
        executor.settle(save, 0.1)
        assert not save.is_complete
    weights.fill_(1.0)  # the update
    if not is_closed:
        executor.close()
    assert other.committed == []
    assert not any(other.received)


def test_replicas_sent_one_after_the_other_are_all_of_the_state_as_it_is(tmp_path: Path) -> None:
    weights = torch.arange(SIZE, dtype=torch.float32)
    links = [FakeLink(10), FakeLink(11)]
    executor = live_executor(tmp_path, weights, links)
    for iteration in (1, 2):
        weights += iteration
        save = executor.start(iteration, iteration - 1, Plan(tile(4 * SIZE, 2, BLOCK)))
        assert save.wait_settled(DEADLINE_S)
        for link in links:
            assert bytes(link.received)[: 4 * SIZE] == weights.numpy().tobytes()
            assert link.committed[-1] == iteration
    executor.close()


def test_a_live_state_that_cannot_be_read_fails_the_save_and_not_the_thread(tmp_path: Path) -> None:
    executor = live_executor(tmp_path, torch.zeros(SIZE), [FakeLink(10)], FailingSource)
    for iteration in (1, 2):
        save = executor.start(iteration, 0, Plan(tile(4 * SIZE, 1, BLOCK)))
        assert save.wait_settled(DEADLINE_S)
        assert "out of memory" in save.failures[0]
    executor.close()


# --- what goes wrong on a thread


class Sudden(BaseException):
    """An end that no handler of errors expects."""


FAILURES = [ValueError("no"), KeyError("no"), struct.error("no"), MemoryError("no"), SystemExit("no"), Sudden("no")]


class FailingStager(CpuStager):
    """Fails once, half way through the state."""

    failure: BaseException | None = None

    def copy(self, pieces: Iterator[Piece]) -> Iterator[int]:
        for index in super().copy(pieces):
            if index and self.failure is not None:
                failure, self.failure = self.failure, None
                raise failure
            yield index


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
def test_any_end_of_a_staging_is_a_failed_save_with_its_cause_and_the_next_one_completes(
    rank: Rank, failure: BaseException
) -> None:
    stager = FailingStager(rank.state, rank.slots, BLOCK)
    stager.failure, rank.executor._stager = failure, stager
    save = rank.executor.start(1, None, rank.plan([]))
    assert save.wait_staged(DEADLINE_S)
    assert save.wait_settled(DEADLINE_S)
    assert not save.is_complete
    assert f"staging: {type(failure).__name__}: " in save.failures[0]
    assert rank.store.iterations(OWNER) == []
    save = rank.executor.start(2, None, rank.plan([]))
    assert save.wait_settled(DEADLINE_S)
    assert save.is_complete, save.failures
    rank.executor.check()


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
def test_a_save_whose_slot_cannot_be_begun_settles_at_once(
    rank: Rank, failure: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(*arguments: object) -> Slot:
        raise failure

    monkeypatch.setattr(rank.store, "begin", begin)
    save = rank.executor.start(1, None, rank.plan([]))
    assert save.wait_settled(DEADLINE_S)
    assert save.wait_staged(DEADLINE_S)
    assert type(failure).__name__ in save.failures[0]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
def test_any_end_of_a_transfer_is_a_failed_save_with_its_cause_and_the_next_one_completes(
    rank: Rank, failure: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send_range(*arguments: object) -> None:
        raise failure

    with monkeypatch.context() as patched:
        patched.setattr(rank.link, "send_range", send_range)
        save = rank.executor.start(1, None, rank.plan([]))
        assert save.wait_settled(DEADLINE_S)
        assert save.failures == [f"{type(failure).__name__}: {failure}"]
    save = rank.executor.start(2, None, rank.plan([]))
    assert save.wait_settled(DEADLINE_S)
    assert save.is_complete, save.failures


def test_a_thread_that_has_ended_all_the_same_is_heard_of_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def use_idle_priority() -> None:
        raise Sudden("no such priority")

    monkeypatch.setattr("capricorn.runtime.save.executor.use_idle_priority", use_idle_priority)
    executor = live_executor(tmp_path, torch.zeros(SIZE), [FakeLink(10)], idle_priority=True)
    for thread in executor._threads[1:]:
        thread.join(DEADLINE_S)
    with pytest.raises(CapricornError, match="capricorn-send-10 has ended: Sudden: no such priority") as caught:
        executor.check()
    assert isinstance(caught.value.__cause__, Sudden)
    executor.close()


class Clock:
    """A time that is set."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def fail(outage: Outage, clock: Clock, iteration: int, took_s: float, why: str = "no answer") -> str:
    """One save over a link that fails; what is said if it was not tried."""
    try:
        outage.check()
    except CapricornError as error:
        return str(error)
    clock.now_s += took_s
    outage.note(iteration, why)
    return ""


def test_a_dead_link_is_tried_again_at_once_and_then_only_for_a_small_part_of_the_time() -> None:
    clock = Clock()
    outage = Outage(3, clock)
    assert fail(outage, clock, 7, 5.0, "the holder has gone") == ""
    assert fail(outage, clock, 8, 5.0) == ""
    assert fail(outage, clock, 9, 5.0) == "the link to rank 3 is down since iteration 7: the holder has gone"
    tried_s = 0.0
    for iteration in range(10, 1000):
        before_s = clock.now_s
        fail(outage, clock, iteration, 5.0)
        tried_s += clock.now_s - before_s
        clock.now_s += 1.0
    assert tried_s < 0.15 * clock.now_s


def test_saves_over_a_dead_link_settle_without_waiting_for_it_and_say_since_when(tmp_path: Path) -> None:
    link = DeadLink(10)
    executor = live_executor(tmp_path, torch.zeros(SIZE), [link])
    failures = []
    for iteration in range(6):
        save = executor.start(iteration, None, Plan(tile(4 * SIZE, 1, BLOCK)))
        assert save.wait_settled(DEADLINE_S)
        failures.append(save.failures[0])
    executor.close()
    assert link.num_tries == 2
    assert failures == ["try 1"] + ["try 2"] + ["the link to rank 10 is down since iteration 0: try 1"] * 4


class DeadLink(FakeLink):
    """To a holder that does not answer, which takes a while to find out."""

    num_tries = 0

    def begin(self, iteration: int, keep: int | None) -> None:
        self.num_tries += 1
        threading.Event().wait(0.3)
        raise TransportError(f"try {self.num_tries}")
