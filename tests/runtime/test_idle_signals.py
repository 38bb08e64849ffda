"""Datagrams between ranks: what is heard, what is ignored, and what time it is elsewhere."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from capricorn.runtime.comm import idle_signals as signals
from capricorn.runtime.comm.idle_signals import IdleSignals, SignalKind

SECRET, LOCAL = b"secret", "127.0.0.1"
DEADLINE_S = 20.0


class Ends:
    """Rank 0 tells rank 1, which asks it for the time; rank 2 is a socket that keeps what it is told."""

    def __init__(self) -> None:
        self.first, self.second = IdleSignals(0, LOCAL, SECRET, 2), IdleSignals(1, LOCAL, SECRET, 2)
        self.third = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.third.bind((LOCAL, 0))
        self.third.settimeout(DEADLINE_S)
        self.heard: SimpleQueue[tuple[int, int]] = SimpleQueue()
        self.addresses = [self.first.address, self.second.address, self.third.getsockname()]

    def start(self, on_idle: Callable[[int, int], None] | None = None) -> None:
        self.first.start(self.addresses, [1, 2], [], lambda holder, number: None)
        self.second.start(self.addresses, [], [0], on_idle or (lambda holder, number: self.heard.put((holder, number))))

    def send(self, message: bytes) -> None:
        """To rank 1, from a socket that nobody knows."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unauthenticated:
            unauthenticated.sendto(message, self.second.address)

    def next(self) -> tuple[int, int]:
        return self.heard.get(timeout=DEADLINE_S)

    def close(self) -> None:
        self.first.close()
        self.second.close()
        self.third.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    before = set(threading.enumerate())
    ends = Ends()
    yield ends
    ends.close()
    assert set(threading.enumerate()) <= before


def message(speaker: int = 0, hearer: int = 1, *, claims: int | None = None, secret: bytes = SECRET) -> bytes:
    """That span 66 has begun, by one rank to another, in the name of the rank it `claims` to be."""
    speaking = IdleSignals(speaker, LOCAL, secret, speaker + 1)
    token = speaking._token(speaker, hearer)
    speaking.close()
    return signals._MESSAGE.pack(token, SignalKind.IDLE, speaker if claims is None else claims, 66, 0.0, 0.0)


def eventually(is_so: Callable[[], bool]) -> bool:
    end = time.monotonic() + DEADLINE_S
    while not is_so() and time.monotonic() < end:
        time.sleep(0.001)
    return is_so()


def test_an_idle_span_is_heard_with_its_number_by_those_who_are_told(ends: Ends) -> None:
    ends.start()
    for number in (1, 2, 3, (1 << 32) - 1):
        ends.first.tell(number)
    assert [ends.next() for _ in range(4)] == [(0, 1), (0, 2), (0, 3), (0, (1 << 32) - 1)]


def test_the_datagrams_made_up_here_are_like_the_real_ones(ends: Ends) -> None:
    ends.start()
    ends.first.tell(66)
    assert ends.third.recv(1000) == message(hearer=2)
    ends.send(message())
    assert [ends.next(), ends.next()] == [(0, 66), (0, 66)]


@pytest.mark.parametrize(
    "foreign",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"?" * 33, id="noise"),
        pytest.param(message()[:-1], id="too short"),
        pytest.param(message() + b"\0", id="too long"),
        pytest.param(message() * 100, id="much too long"),
        pytest.param(bytes(8) + message()[8:], id="with a wrong token"),
        pytest.param(message(secret=b"other"), id="with a secret of another attempt"),
        pytest.param(message(hearer=2), id="meant for another rank"),
        pytest.param(message(speaker=2), id="of a rank that is no holder"),
        pytest.param(message(speaker=2, claims=0), id="of a rank in the name of another"),
        pytest.param(message(claims=2), id="in the name of another"),
        pytest.param(message(claims=(1 << 32) - 1), id="in the name of no rank"),
        pytest.param(message()[:8] + b"\xff" + message()[9:], id="of no kind"),
    ],
)
def test_a_datagram_is_ignored(ends: Ends, foreign: bytes) -> None:
    ends.start()
    ends.send(foreign)
    ends.first.tell(7)
    assert ends.next() == (0, 7)
    assert ends.heard.empty()


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=40), max_size=5))
def test_noise_does_no_harm(ends: Ends, noise: list[bytes]) -> None:
    if ends.second._thread.ident is None:
        ends.start()
    for datagram in noise:
        ends.send(datagram)
    ends.first.tell(8)
    assert ends.next() == (0, 8)
    assert ends.second.offset_s() is None


class Times:
    """Time that stands still; rank 0 is ahead, and what comes to rank 1 is read `delay_s` late."""

    def __init__(self, ends: Ends, ahead_s: float) -> None:
        self._ends, self._ahead_s = ends, ahead_s
        self.delay_s = 0.0
        self.num_read = 0

    def perf_counter(self) -> float:
        thread = threading.current_thread()
        if thread is self._ends.first._thread:
            return 1000.0 + self._ahead_s
        if thread is self._ends.second._thread:
            delay_s, self.num_read = self.delay_s, self.num_read + 1
            return 1000.0 + delay_s
        return 1000.0


@pytest.mark.parametrize("ahead_s", [500.0, -500.0])
def test_the_answer_that_came_back_fastest_sets_the_clock(ends: Ends, ahead_s: float) -> None:
    times = Times(ends, ahead_s)
    ends.start()
    assert ends.second.offset_s() is None
    offsets_s = []
    with patch("capricorn.runtime.comm.idle_signals.time", SimpleNamespace(perf_counter=times.perf_counter)):
        for count, times.delay_s in enumerate((8.0, 2.0, 6.0), 1):
            ends.second.ask_time()
            assert eventually(lambda count=count: times.num_read == 2 * count - 1)  # type: ignore[misc]
            ends.first.tell(count)  # once it is heard the answer before it was taken
            assert ends.next() == (0, count)
            offsets_s.append(ends.second.offset_s())
    assert offsets_s == [ahead_s - 4.0, ahead_s - 1.0, ahead_s - 1.0]


def test_old_answers_are_forgotten(ends: Ends) -> None:
    times = Times(ends, 500.0)
    ends.start()
    with patch("capricorn.runtime.comm.idle_signals.time", SimpleNamespace(perf_counter=times.perf_counter)):
        for count in range(signals.REMEMBERED + 1):
            times.delay_s = 2.0 * min(count, 1)
            ends.second.ask_time()
            assert eventually(lambda count=count: times.num_read == count + 1)  # type: ignore[misc]
        assert eventually(lambda: ends.second.offset_s() == 499.0)


def test_the_offset_of_a_real_clock_is_within_half_a_round_trip(ends: Ends) -> None:
    ends.start()
    begin_s = time.perf_counter()
    ends.second.ask_time()
    assert eventually(lambda: ends.second.offset_s() is not None)
    offset_s = ends.second.offset_s()
    assert offset_s is not None
    assert abs(offset_s) <= (time.perf_counter() - begin_s) / 2


def test_rank_0_has_the_time_and_asks_nobody(ends: Ends) -> None:
    ends.start()
    ends.first.ask_time()
    assert ends.first.offset_s() == 0.0


def test_nobody_but_rank_0_is_asked_or_believed(ends: Ends) -> None:
    ends.start()
    answer = bytearray(message(speaker=2))
    answer[8] = SignalKind.ANSWER
    ends.send(bytes(answer))
    ends.first.tell(1)
    assert ends.next() == (0, 1)
    assert ends.second.offset_s() is None


def test_an_empty_datagram_that_comes_as_if_it_came_from_the_rank_itself_ends_nothing(ends: Ends) -> None:
    ends.start()
    ends.second._sock.sendto(b"", ends.second.address)
    ends.first.tell(7)
    assert ends.next() == (0, 7)


@pytest.mark.parametrize("place", range(9))
def test_a_datagram_with_any_byte_of_its_token_or_kind_changed_is_ignored(ends: Ends, place: int) -> None:
    ends.start()
    changed = bytearray(message())
    changed[place] ^= 0x10
    ends.send(bytes(changed))
    ends.first.tell(7)
    assert ends.next() == (0, 7)


def test_lost_peers_do_no_harm(ends: Ends) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as gone:
        gone.bind((LOCAL, 0))
        lost = gone.getsockname()
    ends.first.start([ends.first.address, lost, lost], [1, 2], [], lambda holder, number: None)
    ends.second.start([lost, lost, lost], [0], [0], lambda holder, number: ends.heard.put((holder, number)))
    for number in range(20):
        ends.first.tell(number)
        ends.second.tell(number)
        ends.second.ask_time()
    assert ends.second.offset_s() is None
    ends.send(message())
    assert ends.next() == (0, 66)


def test_before_the_start_and_after_the_end_nothing_is_told_and_nothing_raised() -> None:
    end = IdleSignals(1, LOCAL, SECRET, 2)
    end.tell(1)
    end.ask_time()
    end.close()
    end.close()
    started = IdleSignals(1, LOCAL, SECRET, 2)
    started.start([started.address] * 2, [0], [0], lambda holder, number: None)
    started.close()
    started.close()
    started.tell(1)
    started.ask_time()
    assert not started._thread.is_alive()


def test_the_thread_ends_also_if_it_was_too_busy_to_hear_of_the_close(ends: Ends) -> None:
    is_hearing, may_go_on = threading.Event(), threading.Event()

    def on_idle(holder: int, number: int) -> None:
        is_hearing.set()
        may_go_on.wait(DEADLINE_S)

    ends.start(on_idle)
    ends.first.tell(1)
    assert is_hearing.wait(DEADLINE_S)
    with patch("capricorn.runtime.comm.idle_signals.JOIN_TIMEOUT_S", 0.01):
        ends.second.close()
    may_go_on.set()
    thread = ends.second._thread
    thread.join(1.0)
    has_ended = not thread.is_alive()
    if not has_ended:  # or it would spin for the rest of the session
        ends.second._sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        ends.second._sock.bind((LOCAL, 0))
        ends.second._sock.sendto(b"", ends.second.address)
        thread.join(DEADLINE_S)
    assert has_ended


def test_unauthenticated_datagrams_cannot_make_a_rank_remember_more_and_more(ends: Ends) -> None:
    ends.start()
    before = len(ends.second._tokens)
    for rank in range(100):
        ends.send(message(claims=1000 + rank))
    ends.first.tell(1)
    assert ends.next() == (0, 1)
    assert len(ends.second._tokens) <= before + 3
