"""Whatever a holder or an owner is told, at whatever point of the protocol: no harm is done, and others are served."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from itertools import count
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from capricorn.errors import TransportError
from capricorn.runtime.comm import handshake, replica_server
from capricorn.runtime.comm.handshake import Identity, greet, welcome
from capricorn.runtime.comm.replica_server import MAX_UNAUTHENTICATED
from capricorn.runtime.comm.wire import FRAME_BYTES, MANIFEST_LIMIT, Frame, FrameKind, receive, set_deadline
from capricorn.runtime.store.slot import Layout
from tests.support.replicas import HOLDER, ME, OWNER, Pair, assert_threads_end, complete_copies, fill, payload_of

SMALL = Layout(payload_bytes=10_000, block_bytes=4096, digest=3)
CHALLENGE_BYTES, HELLO_BYTES = 16, 98
DEADLINE_S = 10.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """One for all: it must be none the worse after whatever the tests before have sent."""
    pair = Pair(tmp_path_factory.mktemp("fuzz"), layout=SMALL)
    yield pair
    pair.close()
    assert_threads_end()


def save(pair: Pair, iteration: int, keep: int) -> None:
    """One iteration of the real owner, both copies."""
    slot = pair.owner_store.begin(OWNER, iteration, keep)
    fill(slot, payload_of(OWNER, iteration, SMALL))
    slot.commit()
    pair.replicate(slot, iteration, keep)


def assert_serves(pair: Pair) -> None:
    """Every complete copy is what it says, and the real owner connects and replicates."""
    complete_copies(pair.holder_store)
    pair.link.close()
    pair.link.connect("{}")
    newest = max([0, *pair.holder_store.iterations(OWNER)])
    save(pair, newest + 1, keep=newest)
    assert (OWNER, newest + 1) in complete_copies(pair.holder_store)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def eventually(is_so: Callable[[], bool]) -> bool:
    end = time.monotonic() + DEADLINE_S
    while not is_so() and time.monotonic() < end:
        time.sleep(0.002)
    return is_so()


def connect(pair: Pair) -> socket.socket:
    sock = socket.create_connection(pair.server.address, DEADLINE_S)
    set_deadline(sock, DEADLINE_S)
    return sock


def say(sock: socket.socket, message: bytes) -> bytes:
    """What comes back until the other side ends the connection, which it must."""
    answer = bytearray()
    with suppress(ConnectionError):
        sock.sendall(message)
        with suppress(OSError):  # ended already
            sock.shutdown(socket.SHUT_WR)
        while piece := sock.recv(1 << 16):
            answer += piece
    return bytes(answer)


# --- before and during the handshake


def hello(challenge: bytes, me: Identity = ME) -> bytes:
    """What the real owner answers."""
    greeting = me.hello(OWNER, HOLDER, b"n" * CHALLENGE_BYTES)
    return greeting + me.mac(b"owner", challenge, greeting)


def test_the_greeting_made_up_here_is_like_the_real_one(pair: Pair) -> None:
    with connect(pair) as sock:
        assert len(say(sock, hello(receive(sock, CHALLENGE_BYTES)))) == 32


def test_a_greeting_with_any_byte_changed_is_refused(pair: Pair) -> None:
    for place in range(HELLO_BYTES):
        with connect(pair) as sock:
            message = bytearray(hello(receive(sock, CHALLENGE_BYTES)))
            message[place] ^= 1 << place % 8
            assert say(sock, bytes(message)) == b"", f"byte {place}"
    assert_serves(pair)


def test_a_greeting_that_ends_at_any_byte_is_refused(pair: Pair) -> None:
    before = descriptors()
    for size in range(HELLO_BYTES):
        with connect(pair) as sock:
            assert say(sock, hello(receive(sock, CHALLENGE_BYTES))[:size]) == b"", f"{size} bytes"
    assert eventually(lambda: descriptors() <= before)
    assert_serves(pair)


def test_one_who_says_a_byte_now_and_then_is_dropped_at_the_deadline_of_the_whole_handshake(pair: Pair) -> None:
    patches = [patch.object(module, "HANDSHAKE_TIMEOUT_S", 0.3) for module in (handshake, replica_server)]
    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        sock = stack.enter_context(connect(pair))
        message = hello(receive(sock, CHALLENGE_BYTES))
        num_said = 0
        with suppress(ConnectionError):
            for byte in message:
                sock.sendall(bytes([byte]))
                num_said += 1
                time.sleep(0.05)
    assert num_said < HELLO_BYTES
    assert_serves(pair)


def test_a_holder_that_says_a_byte_now_and_then_is_given_up() -> None:
    owner, slow = socket.socketpair()
    stop = threading.Event()

    def trickle() -> None:
        while not stop.wait(0.05):
            slow.sendall(b"?")

    thread = threading.Thread(target=trickle)
    with owner, slow, patch.object(handshake, "HANDSHAKE_TIMEOUT_S", 0.2):
        set_deadline(owner, 0.2)
        thread.start()
        with pytest.raises(TransportError, match="deadline"):
            greet(owner, ME, OWNER, HOLDER)
        stop.set()
        thread.join()


def test_of_many_unauthenticated_connections_at_once_the_oldest_go_and_the_owner_comes_in(pair: Pair) -> None:
    before, num_threads = descriptors(), threading.active_count()
    with ExitStack() as stack:
        for number in range(200):
            sock = stack.enter_context(connect(pair))
            sock.sendall(bytes(number % HELLO_BYTES))
        assert_serves(pair)
        # Those that were dropped may be on their last instruction.
        assert eventually(lambda: threading.active_count() <= num_threads + MAX_UNAUTHENTICATED + 1)
    assert eventually(lambda: threading.active_count() <= num_threads + 1)
    assert eventually(lambda: descriptors() <= before + 2)


def test_a_holder_without_a_free_descriptor_accepts_again_once_there_is_one(pair: Pair) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as unauthenticated, ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() + 8, limit[1]))
        try:
            with suppress(OSError):
                while True:
                    stack.callback(os.close, os.dup(0))
            unauthenticated.connect(pair.server.address)
            time.sleep(0.1)  # it cannot be told from outside that accepting has failed
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert_serves(pair)


# --- after it


def recorded(pair: Pair) -> list[bytes]:
    """All that the real owner says after the handshake, call by call: a layout, three iterations, a fetch."""
    said = [Frame(FrameKind.MANIFEST, size=2).pack(), b"{}"]

    class Recording(socket.socket):
        def sendall(self, data: bytes, flags: int = 0) -> None:  # type: ignore[override]
            said.append(bytes(data))
            super().sendall(data, flags)

    pair.link.close()
    pair.link.connect("{}")
    assert pair.link._sock is not None
    pair.link._sock = Recording(fileno=pair.link._sock.detach())
    pair.link._sock.settimeout(None)
    for iteration in (1, 2, 3):
        save(pair, iteration, keep=iteration - 1)
    lost = pair.owner_store.begin(OWNER, 3, keep=2)
    pair.link.fetch(3, lost)
    pair.link.close()
    return said


@pytest.fixture(scope="module")
def session(pair: Pair) -> list[bytes]:
    return recorded(pair)


def say_as_owner(pair: Pair, message: bytes) -> None:
    with connect(pair) as sock:
        greet(sock, ME, OWNER, HOLDER)
        say(sock, message)


def test_a_recorded_session_is_understood(pair: Pair, session: list[bytes]) -> None:
    for slot in pair.holder_store.open_slots(OWNER, SMALL):
        slot.abort()
    say_as_owner(pair, b"".join(session))
    assert complete_copies(pair.holder_store) == {(OWNER, 2), (OWNER, 3)}


def mutate(random: Random, said: list[bytes]) -> bytes:
    """The session with one to three things wrong in it, among its calls or its bytes."""
    calls = list(said)
    for _ in range(random.randint(0, 2)):
        one, other = random.randrange(len(calls)), random.randrange(len(calls))
        match random.randrange(4):
            case 0:
                calls[one], calls[other] = calls[other], calls[one]
            case 1:
                calls.insert(one, calls[other])
            case 2:
                del calls[one : one + random.randint(1, 3)]
                calls = calls or [b"?"]
            case _:
                calls[one] = random.randbytes(random.randint(0, 80))
    data = bytearray(b"".join(calls))
    start, stop = sorted(random.choices(range(len(data) + 1), k=2))
    match random.randrange(5):
        case 0:
            del data[start:]
        case 1:
            del data[start : min(stop, start + 100)]
        case 2:
            data[start:start] = data[start:stop][:5000]
        case 3 if data:
            data[start % len(data)] ^= 1 << random.randrange(8)
        case _:
            data[start:start] = random.randbytes(random.randint(1, 64))
    return bytes(data)


def assert_withstands(pair: Pair, session: list[bytes], seed: int, num_sessions: int) -> None:
    random = Random(seed)
    before, num_threads = descriptors(), threading.active_count()
    for _ in range(num_sessions):
        say_as_owner(pair, mutate(random, session))
        complete_copies(pair.holder_store)
    assert eventually(lambda: (descriptors(), threading.active_count()) <= (before, num_threads))
    assert_serves(pair)


def test_sessions_that_are_flipped_cut_repeated_reordered_or_spliced_leave_only_whole_copies(
    pair: Pair, session: list[bytes]
) -> None:
    assert_withstands(pair, session, seed=1, num_sessions=150)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 10))
def test_many_more_of_them_do_neither(pair: Pair, session: list[bytes], seed: int) -> None:
    assert_withstands(pair, session, seed, num_sessions=2000)


frames = st.builds(
    Frame,
    st.sampled_from(FrameKind),
    st.sampled_from([0, 1, 2, 3, 1 << 63, (1 << 64) - 1]),
    st.sampled_from([0, 1, 2, 3, (1 << 32) - 1]),
    st.sampled_from([0, 1, 2, 1808, 4096, 10_000, MANIFEST_LIMIT, MANIFEST_LIMIT + 1, (1 << 64) - 1]),
).map(Frame.pack)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(frames, st.binary(max_size=60), st.just(b"{}")), max_size=8).map(b"".join))
def test_frames_in_any_order_with_any_numbers_leave_only_whole_copies(pair: Pair, message: bytes) -> None:
    say_as_owner(pair, message)
    complete_copies(pair.holder_store)


def test_a_size_that_is_only_claimed_takes_no_memory(pair: Pair) -> None:
    for size in (MANIFEST_LIMIT, MANIFEST_LIMIT + 1, 1 << 60):
        tracemalloc.start()
        try:
            say_as_owner(pair, Frame(FrameKind.MANIFEST, size=size).pack() + b"{" * 1000)
            assert tracemalloc.get_traced_memory()[1] < 4 << 20
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize(
    "manifest",
    [b"[]", b"{", b"", b"\xff\xfe{}", b"[" * 200_000, b'{"a":' * 200_000, b"1" * 10_000, b"\x80\x04}q\x00."],
    ids=["no table", "cut", "empty", "no text", "deep", "deep tables", "a huge number", "a pickle"],
)
def test_a_manifest_that_is_no_table_is_not_kept(pair: Pair, manifest: bytes) -> None:
    assert_serves(pair)
    say_as_owner(pair, Frame(FrameKind.MANIFEST, size=len(manifest)).pack() + manifest)
    assert (pair.holder_store.folder / f"owner{OWNER}.json").read_text() == "{}"


def test_an_owner_that_stops_in_the_middle_of_a_block_is_given_up_and_may_come_again(tmp_path: Path) -> None:
    with closing(Pair(tmp_path, timeout_s=0.2, layout=SMALL)) as pair:
        pair.link.connect("{}")
        save(pair, 1, keep=0)
        with connect(pair) as stuck:
            greet(stuck, ME, OWNER, HOLDER)
            block = Frame(FrameKind.BLOCK, 2, 0, SMALL.block_bytes)
            stuck.sendall(Frame.begin(2, keep=1).pack() + block.pack() + bytes(100))
            assert stuck.recv(1) == b""  # dropped at its deadline
            assert complete_copies(pair.holder_store) == {(OWNER, 1)}
            assert_serves(pair)


def test_an_owner_that_comes_again_ends_the_connection_it_had(pair: Pair) -> None:
    with connect(pair) as first:
        greet(first, ME, OWNER, HOLDER)
        first.sendall(Frame.begin(99, keep=max(pair.holder_store.iterations(OWNER))).pack())
        assert_serves(pair)
        assert first.recv(1) == b""


def test_a_connection_that_comes_late_to_its_turn_does_not_end_a_newer_one(pair: Pair) -> None:
    may_go_on, calls = threading.Event(), count()

    def held_up(*arguments: Any) -> int:
        owner, is_first = welcome(*arguments), next(calls) == 0
        if is_first:
            may_go_on.wait(DEADLINE_S)
        return owner

    with patch.object(replica_server, "welcome", held_up), connect(pair) as first:
        greet(first, ME, OWNER, HOLDER)
        assert_serves(pair)
        may_go_on.set()
        assert first.recv(1) == b""
        newest = max(pair.holder_store.iterations(OWNER))
        save(pair, newest + 1, keep=newest)


# --- the owner's side


def answer_of(pair: Pair, iteration: int) -> bytes:
    """What a real holder sends when asked for that copy."""
    with connect(pair) as sock:
        greet(sock, ME, OWNER, HOLDER)
        return say(sock, Frame(FrameKind.FETCH, iteration).pack())


def test_whatever_a_holder_answers_nothing_but_the_state_itself_is_taken_for_it(pair: Pair) -> None:
    assert_serves(pair)
    iteration = max(pair.holder_store.iterations(OWNER))
    answer = answer_of(pair, iteration)
    random = Random(7)
    answers = [answer, *(mutate(random, [answer[at : at + 2000] for at in range(0, 10_000, 2000)]) for _ in range(80))]
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for each in answers:
                with server.accept()[0] as sock:
                    welcome(sock, ME, HOLDER, [OWNER])
                    receive(sock, 2 * FRAME_BYTES + len("{}"))
                    with suppress(OSError):
                        sock.sendall(each)

        thread = threading.Thread(target=serve)
        thread.start()
        num_taken = 0
        for _ in answers:
            slot = pair.owner_store.begin(OWNER, iteration, keep=0)
            with closing(pair.make_link()) as link:
                link._address = server.getsockname()
                with suppress(TransportError):
                    link.connect("{}")
                    link.fetch(iteration, slot)
                    num_taken += 1
            complete_copies(pair.owner_store)
            assert slot.holds(iteration) or not slot.is_complete
        thread.join()
    assert 1 <= num_taken < len(answers)
