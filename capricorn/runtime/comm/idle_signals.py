"""Datagrams of a few bytes past all queues: a rank tells that its link is idle, and asks what time it is on rank 0.

They may be lost: then a span stays unused, or a clock is less exact. Those that are not authentic are ignored.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum

from capricorn.runtime.comm.addresses import family_of
from capricorn.runtime.watched_thread import WatchedThread
from capricorn.units import Seconds

_TOKEN_BYTES = 8
_MESSAGE = struct.Struct(f"<{_TOKEN_BYTES}sBIIdd")
"""Token, kind, rank that speaks, number of the span, two times: with all headers no longer than an acknowledgement."""
JOIN_TIMEOUT_S: Seconds = 5.0
REMEMBERED = 64
"""Number of answers of rank 0 of which the fastest is believed: a delayed datagram falsifies the time it tells."""
FRESH_S: Seconds = 60.0
"""How long an answer is preferred to older ones, since clocks drift apart."""


class SignalKind(IntEnum):
    """The kind of a datagram, which says what its fields mean."""

    IDLE = 1  # span `number` has begun here
    ASK = 2  # it is `sent_s` here; what time is it with you?
    ANSWER = 3  # when it was `sent_s` with you, more or less, it was `now_s` here


class IdleSignals:
    """The end of one rank: tells its owners, hears its holders, and sets its clock by that of rank 0."""

    def __init__(self, rank: int, address: str, secret: bytes, world_size: int) -> None:
        """Opens the socket; nothing is heard before `start`.

        Args:
            rank: this rank.
            address: of this node's own interface.
            secret: known to the ranks of this attempt alone; it shows who speaks, not that a message is new.
            world_size: number of ranks.
        """
        self._rank, self._secret, self._world_size = rank, secret, world_size
        self._sock = socket.socket(family_of(address), socket.SOCK_DGRAM)
        self._sock.bind((address, 0))
        self._owners: Mapping[int, tuple[str, int]] = {}
        self._first: tuple[str, int] | None = None
        self._holders: Sequence[int] = ()
        self._on_idle: Callable[[int, int], None] = lambda holder, number: None
        self._tokens: dict[tuple[int, int], bytes] = {}
        self._answers: deque[tuple[Seconds, Seconds, Seconds]] = deque(maxlen=REMEMBERED)
        """Each: how long it took, what it says is to be added here, and when it came."""
        self._is_closed = False
        self._thread = WatchedThread(target=self._hear, name="capricorn-hear", daemon=True)

    @property
    def address(self) -> tuple[str, int]:
        hostname, port = self._sock.getsockname()[:2]
        return str(hostname), int(port)

    def start(
        self,
        addresses: Sequence[tuple[str, int]],
        owners: Sequence[int],
        holders: Sequence[int],
        on_idle: Callable[[int, int], None],
    ) -> None:
        """Starts to listen.

        Args:
            addresses: by rank, where its datagrams are received.
            owners: the ranks to tell of idle spans that begin here.
            holders: the ranks whose idle spans are of interest.
            on_idle: called with holder and number of each idle span that a holder tells of.
        """
        self._owners = {owner: addresses[owner] for owner in owners}
        self._first = addresses[0] if self._rank else None
        self._holders, self._on_idle = holders, on_idle
        self._thread.start()

    def check(self) -> None:
        """Tells whether anything is still heard; else idle spans of holders would be waited for in vain.

        Raises:
            CapricornError: the thread that hears has ended, and why.
        """
        self._thread.check()

    def tell(self, number: int) -> None:
        """Tells the owners that idle span `number` has begun here."""
        for owner, address in self._owners.items():
            self._send(SignalKind.IDLE, owner, address, number)

    def ask_time(self) -> None:
        """Asks rank 0 what time it is."""
        if self._first is not None:
            self._send(SignalKind.ASK, 0, self._first, sent_s=time.perf_counter())

    def offset_s(self) -> Seconds | None:
        """Returns what to add to the time here to get that on rank 0; None if it is unknown.

        It is as good as half the fastest round trip.
        """
        if self._first is None:
            return 0.0
        answers = list(self._answers)
        since_s = time.perf_counter() - FRESH_S
        fresh = [answer for answer in answers if answer[2] >= since_s]
        return min(fresh or answers)[1] if answers else None

    def close(self) -> None:
        """Ends the thread."""
        self._is_closed = True
        # A datagram to ourselves, since closing does not wake a receiver.
        with contextlib.suppress(OSError):
            self._sock.sendto(b"", self.address)
        if self._thread.ident is not None:
            self._thread.join(JOIN_TIMEOUT_S)
        self._sock.close()

    def _send(
        self,
        kind: SignalKind,
        to: int,
        address: tuple[str, int],
        number: int = 0,
        sent_s: Seconds = 0.0,
        now_s: Seconds = 0.0,
    ) -> None:
        message = _MESSAGE.pack(self._token(self._rank, to), kind, self._rank, number, sent_s, now_s)
        # A full socket or an absent rank: it is a hint, and the next one follows.
        with contextlib.suppress(OSError):
            self._sock.sendto(message, socket.MSG_DONTWAIT, address)

    def _hear(self) -> None:
        while True:
            try:
                message, sender = self._sock.recvfrom(_MESSAGE.size + 1)
            except OSError:
                if self._sock.fileno() < 0:
                    return
                continue  # a rank that is gone answered with a refusal
            if self._is_closed:
                return
            if len(message) == _MESSAGE.size:
                self._take(message, sender)

    def _take(self, message: bytes, sender: tuple[str, int]) -> None:
        now_s = time.perf_counter()
        token, kind, rank, number, sent_s, there_s = _MESSAGE.unpack(message)
        if rank >= self._world_size or not hmac.compare_digest(token, self._token(rank, self._rank)):
            return
        if kind == SignalKind.IDLE and rank in self._holders:
            self._on_idle(rank, number)
        elif kind == SignalKind.ASK:
            self._send(SignalKind.ANSWER, rank, sender, sent_s=sent_s, now_s=now_s)
        elif kind == SignalKind.ANSWER and rank == 0:
            self._answers.append((now_s - sent_s, there_s - (sent_s + now_s) / 2, now_s))

    def _token(self, speaker: int, hearer: int) -> bytes:
        key = (speaker, hearer)
        if key not in self._tokens:
            self._tokens[key] = hmac.digest(self._secret, b"%d to %d" % key, "sha256")[:_TOKEN_BYTES]
        return self._tokens[key]
