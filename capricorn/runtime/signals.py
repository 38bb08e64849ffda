"""How a host tells the owners it serves that its link is idle: datagrams, a few bytes for each idle span.

They may be lost: then a span stays unused. A stranger's are ignored. Knows nothing of spans but their number.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence

from capricorn.units import Seconds

_TOKEN_BYTES = 8
_MESSAGE = struct.Struct(f"<{_TOKEN_BYTES}sII")
"""Token, rank that speaks, number of the span: with its headers as small as a bare acknowledgement."""
JOIN_TIMEOUT_S: Seconds = 5.0


class IdleSignals:
    """One rank's end: tells its owners, hears its hosts."""

    def __init__(self, rank: int, address: str, secret: bytes) -> None:
        """`secret` is known to the ranks of this attempt alone; it shows who speaks, not that a message is new."""
        self._rank, self._secret = rank, secret
        self._sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._sock.bind((address, 0))
        self._messages: list[tuple[bytes, tuple[str, int]]] = []
        self._tokens: dict[int, bytes] = {}
        self._on_idle: Callable[[int, int], None] = lambda host, number: None
        self._thread = threading.Thread(target=self._hear, name="capricorn-hear", daemon=True)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._sock.getsockname()[:2]
        return str(host), int(port)

    def start(
        self, owners: Mapping[int, tuple[str, int]], hosts: Sequence[int], on_idle: Callable[[int, int], None]
    ) -> None:
        """Tells `owners`, by rank, at their addresses; calls `on_idle` with host and number for what `hosts` tell."""
        self._messages = [(self._token(self._rank, owner), address) for owner, address in owners.items()]
        self._tokens = {host: self._token(host, self._rank) for host in hosts}
        self._on_idle = on_idle
        self._thread.start()

    def tell(self, number: int) -> None:
        """Idle span `number` has begun here."""
        for token, address in self._messages:
            # A full socket or an absent owner: it is a hint, and the next one follows.
            with contextlib.suppress(OSError):
                self._sock.sendto(_MESSAGE.pack(token, self._rank, number), socket.MSG_DONTWAIT, address)

    def close(self) -> None:
        """Ends the thread."""
        # A datagram to ourselves, since closing does not wake a receiver.
        with contextlib.suppress(OSError):
            self._sock.sendto(b"", self.address)
        if self._thread.ident is not None:
            self._thread.join(JOIN_TIMEOUT_S)
        self._sock.close()

    def _hear(self) -> None:
        while True:
            try:
                message, sender = self._sock.recvfrom(_MESSAGE.size + 1)
            except OSError:
                continue  # an owner that is gone answered with a refusal
            if not message and sender == self.address:
                return
            if len(message) != _MESSAGE.size:
                continue
            token, host, number = _MESSAGE.unpack(message)
            if host in self._tokens and hmac.compare_digest(token, self._tokens[host]):
                self._on_idle(host, number)

    def _token(self, speaker: int, hearer: int) -> bytes:
        return hmac.digest(self._secret, f"idle {speaker} {hearer}".encode(), "sha256")[:_TOKEN_BYTES]
