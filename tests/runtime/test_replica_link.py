"""Replicas over TCP: what is acknowledged is there, whoever else knocks is refused, and no wait is without end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from capricorn.errors import CapricornError, StoreError, TransportError
from capricorn.runtime.comm.handshake import Identity, greet
from capricorn.runtime.comm.replica_link import ReplicaLink
from capricorn.runtime.comm.wire import FRAME_BYTES, Frame, FrameKind, receive, set_deadline
from capricorn.runtime.store.slot import Slot
from capricorn.systems.iteration_order import MAX_ITERATION
from tests.support.replicas import HOLDER, LAYOUT, ME, OWNER, Pair, assert_threads_end
from tests.support.runs import polls


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    pair.close()
    assert_threads_end()


def test_an_acknowledged_replica_is_the_same_bytes(pair: Pair) -> None:
    pair.link.connect("{}")
    for iteration in (1, 2, 3):
        slot = pair.staged(iteration, keep=iteration - 1)
        pair.replicate(slot, iteration, keep=iteration - 1)
        replica = pair.replica(iteration)
        assert replica is not None
        assert replica.damaged_block() is None
        assert replica.payload == slot.payload
    assert pair.replica(2) is not None


def send_cut(pair: Pair, slot: Slot, iteration: int, cuts: list[int], link: ReplicaLink | None = None) -> None:
    """A replica in ranges that end at these places."""
    link = link or pair.link
    link.begin(iteration, iteration - 1)
    for start, stop in pairwise([0, *cuts, LAYOUT.payload_bytes]):
        link.send_range(iteration, slot, start, stop)
    link.commit(iteration)


def assert_arrived(pair: Pair, slot: Slot, iteration: int) -> None:
    replica = pair.replica(iteration)
    assert replica is not None
    assert replica.damaged_block() is None
    assert replica.payload == slot.payload


BLOCK = LAYOUT.block_bytes
CUTS = [
    pytest.param([], id="in one"),
    pytest.param([BLOCK, 2 * BLOCK, 3 * BLOCK, 4 * BLOCK], id="by block"),
    pytest.param(list(range(10_007, 300_000, 10_007)), id="several to a block"),
    pytest.param([100_001, 200_002], id="several blocks in each"),
    pytest.param([1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK, 299_999], id="around the edges"),
    pytest.param([0, 70_000, 70_000, BLOCK * 2, BLOCK * 2, 300_000], id="with ranges of nothing"),
]


@pytest.mark.parametrize("cuts", CUTS)
def test_however_a_replica_is_cut_it_arrives_intact(pair: Pair, cuts: list[int]) -> None:
    pair.link.connect("{}")
    slot = pair.staged(1)
    send_cut(pair, slot, 1, cuts)
    assert_arrived(pair, slot, 1)
    assert pair.link.sent_bytes == LAYOUT.payload_bytes


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, LAYOUT.payload_bytes), max_size=12).map(sorted))
def test_whatever_the_cuts_a_replica_arrives_intact(pair: Pair, cuts: list[int]) -> None:
    pair.link.close()
    pair.link.connect("{}")
    iteration = 1 + max(pair.holder_store.iterations(OWNER), default=0)
    slot = pair.staged(iteration, keep=iteration - 1)
    send_cut(pair, slot, iteration, cuts)
    assert_arrived(pair, slot, iteration)


class Through:
    """A way to the holder that hands on a payload in small pieces."""

    def pieces(self, view: memoryview, *, low: bool = False) -> Iterator[memoryview]:
        assert low
        yield from (view[start : start + 7000] for start in range(0, len(view), 7000))


@pytest.mark.parametrize("cuts", CUTS)
def test_a_cut_replica_also_arrives_over_modelled_links(pair: Pair, cuts: list[int]) -> None:
    with closing(pair.make_link(route=Through())) as link:
        link.connect("{}")
        slot = pair.staged(1)
        send_cut(pair, slot, 1, cuts, link)
        assert_arrived(pair, slot, 1)


def test_a_replica_whose_last_range_is_missing_does_not_count(pair: Pair) -> None:
    pair.link.connect("{}")
    slot = pair.staged(1)
    pair.link.begin(1, 0)
    pair.link.send_range(1, slot, 0, 4 * BLOCK)
    with pytest.raises(TransportError):
        pair.link.commit(1)
    assert pair.replica(1) is None


def test_after_the_acknowledgement_nothing_is_in_flight_and_on_a_closed_link_neither(pair: Pair) -> None:
    assert pair.link.in_flight_bytes == 0
    pair.link.connect("{}")
    pair.replicate(pair.staged(1), 1)
    assert pair.link.in_flight_bytes == 0
    pair.link.close()
    assert pair.link.in_flight_bytes == 0


def test_what_the_holder_has_not_taken_is_in_flight() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        link = ReplicaLink(
            ME, OWNER, HOLDER, silent.getsockname(), timeout_s=5.0, low_class=False, send_buffer_bytes=4096
        )
        link._sock = socket.create_connection(silent.getsockname())
        link._sock.setblocking(False)
        sent = 0
        with suppress(BlockingIOError):
            while True:
                sent += link._sock.send(bytes(1 << 16))
        assert 0 < link.in_flight_bytes <= sent
        link._sock.close()  # as a thread does that gives up the link
        assert link.in_flight_bytes == 0


def test_a_lost_state_is_fetched_back(pair: Pair) -> None:
    pair.link.connect("{}")
    slot = pair.staged(1)
    before = bytes(slot.payload)
    pair.replicate(slot, 1)
    lost = pair.owner_store.begin(OWNER, 1, keep=0)
    pair.link.fetch(1, lost)
    assert lost.holds(1)
    assert bytes(lost.payload) == before


def test_the_manifest_of_an_owner_lies_beside_its_replicas(pair: Pair) -> None:
    pair.link.connect('{"entries": []}')
    pair.replicate(pair.staged(1), 1)
    assert (pair.holder_store.folder / f"owner{OWNER}.json").read_text() == '{"entries": []}'


def test_a_block_damaged_on_the_way_is_refused_and_the_older_copy_stays(pair: Pair) -> None:
    pair.link.connect("{}")
    pair.replicate(pair.staged(1), 1)
    slot = pair.staged(2, keep=1)
    slot.payload[LAYOUT.block_bytes + 3] ^= 1
    with pytest.raises(TransportError, match=r"rank 0.*damaged"):
        pair.replicate(slot, 2, keep=1)
    assert pair.replica(2) is None
    assert pair.replica(1) is not None


def test_a_replica_with_a_missing_block_does_not_count(pair: Pair) -> None:
    pair.link.connect("{}")
    slot = pair.staged(1)
    pair.link.begin(1, 0)
    pair.link.send_range(1, slot, 0, LAYOUT.block_bytes)
    with pytest.raises(TransportError):
        pair.link.commit(1)
    assert pair.replica(1) is None


def test_an_owner_that_dies_in_the_middle_leaves_the_older_replica(pair: Pair) -> None:
    pair.link.connect("{}")
    pair.replicate(pair.staged(1), 1)
    slot = pair.staged(2, keep=1)
    pair.link.begin(2, 1)
    pair.link.send_range(2, slot, 0, LAYOUT.block_bytes)
    pair.link.close()
    again = pair.make_link()
    again.connect("{}")
    pair.replicate(slot, 2, keep=1, link=again)
    assert pair.replica(1) is not None
    assert pair.replica(2) is not None
    again.close()


def test_a_fetch_of_a_copy_that_is_not_there_says_so(pair: Pair) -> None:
    pair.link.connect("{}")
    slot = pair.owner_store.begin(OWNER, 9, keep=0)
    with pytest.raises(TransportError, match="rank 0"):
        pair.link.fetch(9, slot)
    assert not slot.holds(9)


def test_a_copy_damaged_at_rest_is_not_fetched(pair: Pair) -> None:
    pair.link.connect("{}")
    pair.replicate(pair.staged(1), 1)
    replica = pair.replica(1)
    assert replica is not None
    replica.payload[17] ^= 1
    lost = pair.owner_store.begin(OWNER, 1, keep=0)
    with pytest.raises(TransportError, match="damaged"):
        pair.link.fetch(1, lost)
    assert not lost.holds(1)


@pytest.mark.parametrize(
    "peer",
    [replace(ME, secret=b"other"), replace(ME, attempt=1), replace(ME, run_id="other")],
    ids=["without the secret", "of another attempt", "of another run"],
)
def test_a_peer_is_refused(pair: Pair, peer: Identity) -> None:
    link = pair.make_link(peer)
    with pytest.raises(TransportError, match="cannot link to rank 0"):
        link.connect("{}")
    pair.link.connect("{}")


def test_an_owner_whose_replicas_are_elsewhere_is_refused(pair: Pair) -> None:
    link = pair.make_link(owner=5)
    with pytest.raises(TransportError, match="rank 5 cannot link"):
        link.connect("{}")


def test_a_recorded_greeting_cannot_be_replayed(pair: Pair) -> None:
    recorded = bytearray()

    class Recording(socket.socket):
        def sendall(self, data: bytes) -> None:  # type: ignore[override]
            recorded.extend(data)
            super().sendall(data)

    with Recording(socket.AF_INET, socket.SOCK_STREAM) as first:
        set_deadline(first, 5.0)
        first.connect(pair.server.address)
        greet(first, ME, OWNER, HOLDER)
    with socket.create_connection(pair.server.address) as second:
        set_deadline(second, 5.0)
        receive(second, 16)
        second.sendall(bytes(recorded))
        assert second.recv(1) == b""


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(min_size=1, max_size=300))
def test_garbage_from_an_unauthenticated_connection_does_no_harm(pair: Pair, garbage: bytes) -> None:
    with socket.create_connection(pair.server.address) as unauthenticated:
        unauthenticated.sendall(garbage)
    with socket.create_connection(pair.server.address):
        pair.link.close()
        pair.link.connect("{}")  # also while another unauthenticated one is silent


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(
    st.binary(min_size=FRAME_BYTES, max_size=FRAME_BYTES),
    st.builds(Frame, st.sampled_from(FrameKind), st.integers(0, 9), st.integers(0, 99), st.integers(0, 1 << 60)).map(
        Frame.pack
    ),
))  # fmt: skip
def test_a_frame_that_makes_no_sense_ends_the_connection_and_harms_no_copy(pair: Pair, frame: bytes) -> None:
    pair.link.close()
    pair.link.connect("{}")
    pair.replicate(pair.staged(1), 1)
    with socket.socket() as owner:
        set_deadline(owner, 5.0)
        owner.connect(pair.server.address)
        greet(owner, ME, OWNER, HOLDER)
        owner.sendall(Frame.begin(2, keep=1).pack() + frame)
    pair.link.close()
    pair.link.connect("{}")
    replica = pair.replica(1)
    assert replica is not None
    assert replica.damaged_block() is None


def test_a_holder_that_hangs_is_given_up_at_the_deadline_and_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = silent.getsockname()
        link = ReplicaLink(ME, OWNER, 7, address, timeout_s=0.2, low_class=False, send_buffer_bytes=65536)
        link._sock = socket.create_connection(address)
        set_deadline(link._sock, 0.2)
        with pytest.raises(TransportError, match=r"rank 1, replica on rank 7.*deadline"):
            link.commit(1)
        with pytest.raises(TransportError, match="rank 7: the link is down"):
            link.commit(1)


def test_a_holder_that_is_gone_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = gone.getsockname()
    link = ReplicaLink(ME, OWNER, 7, address, timeout_s=0.2, low_class=False, send_buffer_bytes=65536)
    with pytest.raises(TransportError, match=r"rank 1 cannot link to rank 7 at 127\.0\.0\.1"):
        link.connect("{}")


def test_closing_a_holder_ends_the_threads_of_silent_unauthenticated_connections(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    connections = [socket.create_connection(pair.server.address) for _ in range(8)]
    for each in connections:
        receive(each, 16)  # the holder has begun to greet each
    pair.close()
    assert_threads_end()
    for each in connections:
        each.close()


def test_an_owner_may_be_silent_for_longer_than_the_deadline_between_two_checkpoints(tmp_path: Path) -> None:
    pair = Pair(tmp_path, timeout_s=0.1)
    pair.link.connect("{}")
    threading.Event().wait(0.5)
    pair.replicate(pair.staged(1), 1)
    assert pair.replica(1) is not None
    pair.close()


class Sudden(BaseException):
    """An end that no handler of errors expects."""


@pytest.mark.parametrize("failure", [KeyError("no"), MemoryError("no"), StoreError("no room"), Sudden("no")])
def test_whatever_ends_a_replica_at_the_holder_ends_the_owners_wait_and_is_told_with_its_cause(
    pair: Pair, failure: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(*arguments: object) -> Slot:
        raise failure

    pair.link.connect("{}")
    slot = pair.staged(1)
    with monkeypatch.context() as patched:
        patched.setattr(pair.holder_store, "begin", begin)
        with pytest.raises(TransportError, match="rank 1, replica on rank 0: the connection"):
            pair.replicate(slot, 1)
        for _ in polls(5.0):
            if told := pair.server.take_failures():
                break
    assert told[0].startswith(f"the replica of rank {OWNER} failed on rank {HOLDER}: ")
    assert str(failure) in told[0]
    assert pair.server.take_failures() == []
    pair.replicate(slot, 1)
    assert pair.replica(1) is not None


def test_a_holder_that_accepts_nobody_any_more_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def admit(sock: socket.socket) -> None:
        raise Sudden("no")

    pair = Pair(tmp_path)
    pair.server.check()
    monkeypatch.setattr(pair.server, "_admit", admit)
    with socket.create_connection(pair.server.address):
        pair.server._acceptor.join(5.0)
    with pytest.raises(CapricornError, match="capricorn-accept has ended: Sudden: no"):
        pair.server.check()
    pair.close()


@pytest.mark.parametrize("keep", [None, 0, 1, 5, MAX_ITERATION])
@pytest.mark.parametrize("iteration", [0, 1, MAX_ITERATION])
def test_a_frame_carries_every_iteration_and_whether_one_is_to_be_kept(iteration: int, keep: int | None) -> None:
    frame = Frame.unpack(Frame.begin(iteration, keep).pack())
    assert (frame.kind, frame.iteration, frame.keep) == (FrameKind.BEGIN, iteration, keep)


def test_iteration_0_is_kept_at_the_holder_while_the_next_ones_come(pair: Pair) -> None:
    pair.link.connect("{}")
    pair.replicate(pair.staged(0, keep=None), 0, keep=None)
    for iteration in (1, 2):
        pair.replicate(pair.staged(iteration, keep=0), iteration, keep=0)
        assert pair.replica(0) is not None


def test_a_replica_of_an_iteration_that_no_rank_could_agree_on_is_refused(pair: Pair) -> None:
    pair.link.connect("{}")
    pair.link._send(Frame(FrameKind.BEGIN, MAX_ITERATION + 1))
    with pytest.raises(TransportError):
        pair.link.commit(MAX_ITERATION + 1)
    assert pair.holder_store.iterations(OWNER) == []


@pytest.mark.parametrize("timeout_s", [1e-9, 1e-7, 4e-7])
def test_a_deadline_below_the_kernels_resolution_is_short_and_not_without_end(timeout_s: float) -> None:
    first, second = socket.socketpair()
    with first, second:
        set_deadline(first, timeout_s)
        with pytest.raises(TransportError, match="deadline"):
            receive(first, 1)
