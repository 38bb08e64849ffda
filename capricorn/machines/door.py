"""Where other machines come in: each proves itself and says what it was told to run, however slow others are."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple

from pydantic import ValidationError

from capricorn.errors import TransportError, in_words, note_once
from capricorn.machines.control_link import CONDUCTOR, MAX_MACHINES, ControlLink
from capricorn.machines.control_messages import AskClock, ClockReading, Join, follower_message
from capricorn.runtime.comm.handshake import HANDSHAKE_TIMEOUT_S, Identity, welcome
from capricorn.runtime.comm.wire import wake
from capricorn.units import Seconds

MAX_UNPROVEN: Final = 64
"""Connections whose proof is awaited; the oldest is dropped first, since a machine proves itself at once."""
MAX_TOLD: Final = 8
"""Connections that were turned away of which a line is said; whoever makes more has that line be another each time."""
CLOCK_ROUNDS: Final = 8
"""Times that the clock of a machine is asked for; the fastest answer counts."""


class Arrival(NamedTuple):
    """A machine that has proved itself."""

    link: ControlLink
    join: Join
    clock_ahead_s: Seconds
    """How far the monotonic clock of this machine is ahead of that one's."""


class Door:
    """Listens, in threads of its own; readable, as a file is, when a machine has come."""

    def __init__(self, listener: socket.socket, me: Identity) -> None:
        """Takes over a listening socket."""
        self._listener, self._me = listener, me
        self._arrived: SimpleQueue[Arrival] = SimpleQueue()
        self._bell, self._rope = socket.socketpair()
        self._lock = threading.Lock()
        self._unproven: dict[socket.socket, None] = {}
        """In the order in which they came."""
        self._num_told = 0
        threading.Thread(target=self._accept, name="capricorn-door", daemon=True).start()

    def fileno(self) -> int:
        return self._bell.fileno()

    def arrivals(self) -> list[Arrival]:
        """Returns the machines that have come since the last call."""
        found: list[Arrival] = []
        with contextlib.suppress(Empty, BlockingIOError):
            self._bell.recv(MAX_UNPROVEN, socket.MSG_DONTWAIT)
            while True:
                found.append(self._arrived.get_nowait())
        return found

    def close(self) -> None:
        """Lets nobody in any more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # the thread that accepts hears of it
        self._listener.close()
        for end in (self._bell, self._rope):
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except ConnectionError:
                continue  # it went before it was accepted
            except OSError as error:
                if self._listener.fileno() < 0 or not error.errno:
                    return
                time.sleep(0.1)  # out of descriptors, which others may give back
                if self._is_shut():
                    return
                continue
            self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        with self._lock:
            for oldest in list(self._unproven)[: max(0, len(self._unproven) - MAX_UNPROVEN + 1)]:
                wake(oldest)
                del self._unproven[oldest]
            self._unproven[sock] = None
        try:
            threading.Thread(target=self._greet, args=(sock,), name="capricorn-greet", daemon=True).start()
        except RuntimeError:  # the system gives us no more threads
            self._is_proven(sock)
            sock.close()

    def _is_shut(self) -> bool:
        try:
            return not self._listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        except OSError:
            return True

    def _greet(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(HANDSHAKE_TIMEOUT_S)
            number = welcome(sock, self._me, CONDUCTOR, range(1, MAX_MACHINES))
            self._is_proven(sock)
            self._arrived.put(introduced(ControlLink(sock), number))
            self._rope.send(b"!")
        except (TransportError, ValidationError, OSError) as error:
            self._is_proven(sock)
            sock.close()
            self._tell(in_words(error))

    def _is_proven(self, sock: socket.socket) -> None:
        """Has a connection no longer be among those that may be dropped."""
        with self._lock:
            self._unproven.pop(sock, None)

    def _tell(self, why: str) -> None:
        with self._lock:
            self._num_told += 1
            is_told = self._num_told <= MAX_TOLD
        if is_told:
            note_once(f"a connection was turned away: {why}")


def introduced(link: ControlLink, number: int) -> Arrival:
    """Returns who is at the other end of a connection that was proven by that machine, and how its clock goes.

    Raises:
        TransportError: it says something else, or nothing, or that it is another machine.
        ValidationError: what it says is no message.
    """
    join = follower_message(link.next(HANDSHAKE_TIMEOUT_S))
    if not isinstance(join, Join):
        raise TransportError(f"the other machine says {join.says} before it has joined")
    if join.machine != number:
        raise TransportError(f"machine {number} says that it is machine {join.machine}")
    rounds = [_ask_clock(link) for _ in range(CLOCK_ROUNDS)]
    return Arrival(link, join, min(rounds)[1])


def _ask_clock(link: ControlLink) -> tuple[Seconds, Seconds]:
    """Returns how long the answer took, and how far our clock is then ahead of the other one."""
    begin_s = time.monotonic()
    link.send(AskClock())
    answer = follower_message(link.next(HANDSHAKE_TIMEOUT_S))
    end_s = time.monotonic()
    if not isinstance(answer, ClockReading):
        raise TransportError(f"the other machine says {answer.says} and not what time it is")
    return end_s - begin_s, (begin_s + end_s) / 2 - answer.at_s
