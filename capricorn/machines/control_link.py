"""The connection between two machines: proven by a secret, then messages of one JSON object each, whole and in order.

The proof is that of replicas, `runtime.comm.handshake`. The secret is `CAPRICORN_SECRET` in the environment of both;
without one, whoever reaches the endpoint can join.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Mapping
from typing import Final

from capricorn.config.fields import FrozenModel
from capricorn.errors import TransportError
from capricorn.runtime.comm.handshake import Identity
from capricorn.units import MIB, Bytes, Seconds

SECRET: Final = "CAPRICORN_SECRET"
"""The variable of the environment that holds what only the machines of a job know."""
SEND_TIMEOUT_S: Final[Seconds] = 10.0
"""How long a machine that is alive may take to receive a message."""
MAX_MESSAGE_BYTES: Final[Bytes] = 64 * MIB
MAX_MACHINES: Final = 1 << 16
CONDUCTOR: Final = 0
"""The number of the machine that conducts."""
_READ_BYTES: Final[Bytes] = MIB
_LENGTH: Final = struct.Struct("!I")
_KEEP_ALIVE: Final[Mapping[int, int]] = {
    socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 5, socket.TCP_USER_TIMEOUT: 15_000,
}  # fmt: skip
"""A machine that is gone without a word, as by a power cut, is noticed within 15 s also where nothing is to be said."""


def control_identity(job: str) -> Identity:
    """Returns who the machines of that job are to each other."""
    return Identity(job, 0, os.environ.get(SECRET, "").encode())


def has_secret() -> bool:
    """Returns whether the machines have a secret."""
    return bool(os.environ.get(SECRET))


class ControlLink:
    """One end of the connection."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes over a connected socket whose handshake is done."""
        self._sock, self._read = sock, bytearray()
        self._left: deque[bytes] = deque()
        """Messages that have come and were not asked for yet."""
        sock.settimeout(SEND_TIMEOUT_S)
        if sock.family != socket.AF_UNIX:
            prepare(sock)

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def address(self) -> str:
        """The numeric address of this end."""
        return str(self._sock.getsockname()[0])

    def send(self, message: FrozenModel) -> None:
        """Sends a message.

        Raises:
            TransportError: the other end is gone, or does not receive.
        """
        data = message.model_dump_json().encode()
        try:
            self._sock.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise TransportError(f"the connection broke: {error.strerror or error}") from None

    def receive(self) -> list[bytes]:
        """Returns the messages that are complete by now; does not wait.

        Raises:
            TransportError: the other end is gone, or sends what is no message.
        """
        left = list(self._left)
        self._left.clear()
        return left or self._read_more()

    def next(self, timeout_s: Seconds) -> bytes:
        """Returns the next message.

        Raises:
            TransportError: the other end is gone, sends what is no message, or says nothing within that time.
        """
        end_s = time.monotonic() + timeout_s
        while not self._left:
            if not select.select([self._sock], [], [], max(0.0, end_s - time.monotonic()))[0]:
                raise TransportError(f"nothing came within {timeout_s:g} s")
            self._left.extend(self._read_more())
        return self._left.popleft()

    def _read_more(self) -> list[bytes]:
        ready, _, _ = select.select([self._sock], [], [], 0)
        if not ready:  # with a timeout Python would wait for it, whatever the flags
            return []
        try:
            data = self._sock.recv(_READ_BYTES)
        except OSError as error:
            raise TransportError(f"the connection broke: {error.strerror or error}") from None
        if not data:
            raise TransportError("the connection was closed")
        self._read += data
        return list(self._messages())

    def _messages(self) -> list[bytes]:
        found = []
        while len(self._read) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._read)
            if size > MAX_MESSAGE_BYTES:
                raise TransportError(f"a message of {size} bytes was announced; none is that long")
            if len(self._read) < _LENGTH.size + size:
                break
            found.append(bytes(self._read[_LENGTH.size : _LENGTH.size + size]))
            del self._read[: _LENGTH.size + size]
        return found

    def close(self) -> None:
        self._sock.close()


def prepare(sock: socket.socket) -> None:
    """Has the kernel notice an end that is gone, and send small messages at once."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in _KEEP_ALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
