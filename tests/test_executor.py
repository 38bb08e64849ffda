"""The threads that carry out plans: what they send when, what they learn of the link, and how long they may wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from capricorn.planner.link import LinkModel
from capricorn.planner.plan import Chunk, Limit, Plan, tile
from capricorn.runtime.executor import Executor
from capricorn.runtime.gate import Gate
from capricorn.runtime.handshake import Identity
from capricorn.runtime.host import ReplicaHost
from capricorn.runtime.slot import Layout
from capricorn.runtime.staging import HostStager
from capricorn.runtime.state import FlatState
from capricorn.runtime.store import NodeStore
from capricorn.runtime.transport import ReplicaLink
from capricorn.topology import Topology

ME = Identity("run", 0, b"secret")
OWNER, HOST = 1, 0
SIZE, BLOCK = 100_000, 65536
DEADLINE_S = 20.0
CLOSED = Limit(0.0, 0)


class Rank:
    """An owner with an executor, and the host of its replica."""

    def __init__(self, folder: Path, timeout_s: float = DEADLINE_S, *, is_reactive: bool = True) -> None:
        topology = Topology(2, 1)
        self.weights = torch.arange(SIZE, dtype=torch.float32)
        state = FlatState({"w": self.weights})
        layout = Layout(state.num_bytes, BLOCK, state.digest)
        self.num_bytes = state.num_bytes
        self.host_store = NodeStore.create(folder / "node0", "run", 0, topology)
        self.host_store.host(OWNER, layout)
        self.store = NodeStore.create(folder / "node1", "run", 1, topology)
        slots = self.store.host(OWNER, layout)
        self.host = ReplicaHost(ME, HOST, "127.0.0.1", self.host_store, timeout_s=timeout_s, gives_way=False)
        self.host.start({OWNER: layout})
        self.link = ReplicaLink(
            ME, OWNER, HOST, self.host.address, timeout_s=timeout_s, low_class=False, send_buffer_bytes=BLOCK
        )
        self.link.connect("{}")
        self.gate = Gate(is_reactive=is_reactive, patience_s=timeout_s / 2)
        stager = HostStager(state, slots)
        self.executor = Executor(
            self.store, OWNER, 0, stager, [self.link], gate=self.gate, timeout_s=timeout_s, gives_way=False
        )

    def plan(self, cuts: Sequence[int], limits: tuple[Limit, ...] = ()) -> Plan:
        """A chunk up to each of these places, in a span of its own, and the rest as overflow."""
        edges = [0, *cuts, self.num_bytes]
        return Plan(tuple(Chunk(a, b - a, span) for span, (a, b) in enumerate(pairwise(edges))), limits)

    def replica_is(self, iteration: int) -> bool:
        slot = self.host_store.read(OWNER, iteration)
        return (
            slot is not None and slot.damaged_block() is None and bytes(slot.payload) == self.weights.numpy().tobytes()
        )

    def close(self) -> None:
        self.gate.release()
        self.executor.close()
        self.link.close()
        self.host.close()


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    rank = Rank(tmp_path)
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
