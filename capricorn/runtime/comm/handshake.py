"""Who may speak with whom: a mutual proof of the secret of this attempt, before anything else is read or written."""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from capricorn.errors import TransportError
from capricorn.runtime.comm.wire import receive, send
from capricorn.units import Seconds

HANDSHAKE_TIMEOUT_S: Final[Seconds] = 5.0
"""Deadline of the whole handshake, even if bytes trickle in."""
_MAGIC = b"CPRN"
_VERSION = 2
_NONCE = 16
_MAC = hashlib.sha256().digest_size
_HELLO = struct.Struct(f"<4sHIII32s{_NONCE}s")


@dataclass(frozen=True, slots=True)
class Identity:
    """The run and attempt of a rank; a peer of another run or attempt is refused."""

    run_id: str
    attempt: int
    secret: bytes
    """Drawn anew in every attempt and never sent."""

    def hello(self, owner: int, holder: int, nonce: bytes) -> bytes:
        """Returns the message by which `owner` introduces itself to `holder`."""
        run = hashlib.sha256(self.run_id.encode()).digest()
        return _HELLO.pack(_MAGIC, _VERSION, self.attempt, owner, holder, run, nonce)

    def mac(self, role: bytes, *parts: bytes) -> bytes:
        """Returns the proof that the sender, in that role, knows the secret."""
        return hmac.digest(self.secret, role + b"".join(parts), "sha256")


def greet(sock: socket.socket, me: Identity, owner: int, holder: int) -> None:
    """Proves to the holder who connects, and has the holder prove itself: the connecting side of the handshake.

    Args:
        sock: connected to the holder.
        me: run, attempt and secret of this rank.
        owner: this rank.
        holder: the rank that is meant to answer.

    Raises:
        TransportError: the holder refused us or could not prove that it knows the secret.
    """
    nonce, until_s = os.urandom(_NONCE), time.monotonic() + HANDSHAKE_TIMEOUT_S
    challenge = receive(sock, _NONCE, until_s=until_s)
    hello = me.hello(owner, holder, nonce)
    send(sock, hello + me.mac(b"owner", challenge, hello))
    if not hmac.compare_digest(receive(sock, _MAC, until_s=until_s), me.mac(b"host", nonce, hello)):
        raise TransportError(f"rank {holder} could not prove that it belongs to run {me.run_id}")


def welcome(sock: socket.socket, me: Identity, holder: int, owners: Collection[int]) -> int:
    """Returns the owner that connected, once it has proved itself: the accepting side of the handshake.

    Args:
        sock: the accepted connection.
        me: run, attempt and secret of this rank.
        holder: this rank.
        owners: the ranks that may connect.

    Raises:
        TransportError: it does not know the secret, is of another run or an older attempt, is none of `owners`, or
            meant
            another rank.
    """
    challenge, until_s = os.urandom(_NONCE), time.monotonic() + HANDSHAKE_TIMEOUT_S
    send(sock, challenge)
    message = receive(sock, _HELLO.size + _MAC, until_s=until_s)
    hello, proof = message[: _HELLO.size], message[_HELLO.size :]
    magic, version, attempt, owner, to, _, nonce = _HELLO.unpack(hello)
    if magic != _MAGIC or version != _VERSION:
        raise TransportError("an unauthenticated connection was refused")
    if not hmac.compare_digest(proof, me.mac(b"owner", challenge, hello)) or hello != me.hello(owner, holder, nonce):
        raise TransportError(f"a connection for rank {to}, attempt {attempt}, was refused: not of this run and attempt")
    if owner not in owners:
        raise TransportError(f"rank {owner} keeps no replica on rank {holder}")
    send(sock, me.mac(b"host", nonce, hello))
    return int(owner)
