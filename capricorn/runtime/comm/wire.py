"""Frames of a fixed size that travel between nodes, some followed by one block of payload.

Nothing is unpickled and no size is believed before it is checked. Knows sockets, but no store and no torch.
"""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import time
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import xxhash

from capricorn.errors import TransportError
from capricorn.runtime.store.slot import checksum
from capricorn.units import Bytes, Seconds

LOW_CLASS_TOS: Final = 0x20
"""DSCP CS1, the scavenger class. Source: RFC 3662, RFC 8622."""
TRAFFIC_CLASS: Final = {
    socket.AF_INET: (socket.IPPROTO_IP, socket.IP_TOS), socket.AF_INET6: (socket.IPPROTO_IPV6, socket.IPV6_TCLASS),
}  # fmt: skip
"""By family of the address: the socket option that marks packets with a traffic class."""
MANIFEST_LIMIT: Final = 64 << 20
PIECE_BYTES: Final = 256 << 10
"""Bytes received and hashed at a time; they fit the second-level cache of a core."""
_FRAME = struct.Struct("<HIQQQ")
_CHECK = struct.Struct("<Q")
FRAME_BYTES: Final = _FRAME.size + _CHECK.size


class FrameKind(IntEnum):
    """The kind of a frame, which says what its fields mean."""

    MANIFEST = 1  # size: bytes of JSON that follow
    BEGIN = 2  # iteration; size: 1 + newest complete iteration, which is to be kept, or 0 if there is none
    BLOCK = 3  # index, size and checksum of the payload that follows
    COMMIT = 4  # iteration: all blocks were sent; answered by DONE or FAILED
    FETCH = 5  # iteration: send me my copy of it; answered by blocks and COMMIT, or FAILED
    DONE = 6
    FAILED = 7


@dataclass(frozen=True, slots=True)
class Frame:
    """One message; what its numbers mean is said at its kind."""

    kind: FrameKind
    iteration: int = 0
    index: int = 0
    size: Bytes = 0
    checksum: int = 0

    @classmethod
    def begin(cls, iteration: int, keep: int | None) -> Frame:
        """Returns the message that a replica of `iteration` follows, and which one is to be kept, if there is one."""
        return cls(FrameKind.BEGIN, iteration, size=0 if keep is None else 1 + keep)

    @property
    def keep(self) -> int | None:
        """The iteration that a BEGIN asks to keep."""
        return self.size - 1 if self.size else None

    def pack(self) -> bytes:
        fields = _FRAME.pack(self.kind, self.index, self.iteration, self.size, self.checksum)
        return fields + _CHECK.pack(checksum(fields))

    @classmethod
    def unpack(cls, data: bytes) -> Frame:
        """Returns the frame in these bytes.

        Raises:
            TransportError: they are none, or were damaged on the way.
        """
        fields = data[: _FRAME.size]
        if _CHECK.unpack(data[_FRAME.size :])[0] != checksum(fields):
            raise TransportError("a frame arrived damaged; the connection is given up")
        kind, index, iteration, size, check = _FRAME.unpack(fields)
        try:
            return cls(FrameKind(kind), iteration, index, size, check)
        except ValueError:
            raise TransportError(f"a frame of unknown kind {kind} arrived; the connection is given up") from None


def set_deadline(sock: socket.socket, timeout_s: Seconds) -> None:
    """Bounds every later send and receive of a blocking socket, in the kernel, without a poll before each call."""
    whole, part_us = divmod(max(1, round(timeout_s * 1e6)), 1_000_000)  # 0 would be without end
    value = struct.pack("ll", whole, part_us)
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def receive(sock: socket.socket, num_bytes: int, *, until_s: Seconds = math.inf) -> bytes:
    """Returns exactly so many bytes.

    Raises:
        TransportError: the connection ended or the deadline passed first.
    """
    data = bytearray(num_bytes)
    receive_into(sock, memoryview(data), until_s=until_s)
    return bytes(data)


def receive_text(sock: socket.socket, num_bytes: int) -> str:
    """Returns so many bytes of UTF-8 as text; takes no more memory than what has come, whatever size was claimed.

    Raises:
        TransportError: it is no such text, the connection ended or the deadline passed first.
    """
    sizes = (min(PIECE_BYTES, num_bytes - start) for start in range(0, num_bytes, PIECE_BYTES))
    try:
        return b"".join([receive(sock, size) for size in sizes]).decode()
    except UnicodeDecodeError:
        raise TransportError(f"{num_bytes} bytes that are no text arrived; the connection is given up") from None


def receive_block(sock: socket.socket, place: memoryview) -> int:
    """Fills `place` and returns its checksum, taken piece by piece while each is still in the cache.

    Raises:
        TransportError: the connection ended or the deadline passed first.
    """
    hasher = xxhash.xxh3_64()
    for start in range(0, len(place), PIECE_BYTES):
        piece = place[start : start + PIECE_BYTES]
        receive_into(sock, piece)
        hasher.update(piece)
    return hasher.intdigest()


def receive_into(sock: socket.socket, place: memoryview, *, until_s: Seconds = math.inf) -> None:
    """Fills `place`, in as few system calls as the kernel allows.

    The deadline of the socket is that of each call, so who sends a byte now and then never misses it; `until_s`, by
    `time.monotonic`, bounds the whole.

    Raises:
        TransportError: the connection ended or the deadline passed first.
    """
    filled = 0
    while filled < len(place):
        try:
            count = sock.recv_into(place[filled:], 0, socket.MSG_WAITALL)
        except BlockingIOError:
            raise TransportError("no data came before the deadline") from None
        except OSError as error:
            raise TransportError(f"the connection broke: {error.strerror}") from None
        if count == 0:
            raise TransportError("the connection was closed")
        filled += count
        if filled < len(place) and time.monotonic() > until_s:
            raise TransportError("not all data came before the deadline")


def send(sock: socket.socket, *parts: bytes | memoryview) -> None:
    """Sends all parts, one after the other.

    Raises:
        TransportError: the connection ended or the deadline passed first.
    """
    try:
        for part in parts[:-1]:
            # A short header must not travel, and wake the receiver, on its own.
            sock.sendall(part, socket.MSG_MORE)
        sock.sendall(parts[-1])
    except BlockingIOError:
        raise TransportError("data could not be sent before the deadline") from None
    except OSError as error:
        raise TransportError(f"the connection broke: {error.strerror}") from None


def wake(sock: socket.socket) -> None:
    """Ends a connection, or listening, so that a thread blocked in a call on it goes on; that thread closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def shut(sock: socket.socket) -> None:
    """Closes a socket and wakes a thread that is blocked in a call on it, which close alone does not."""
    wake(sock)
    sock.close()
