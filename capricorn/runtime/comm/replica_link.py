"""The owner's end of replication over TCP: a link to each holder, to send replicas and to fetch them back.

Pieces go from the mapped slot of the owner, or from buffers of its live state, straight into the mapped slot of the
holder; a replica counts when the holder has verified and acknowledged it. Knows no tensor and no training.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import sys
import termios
from collections.abc import Iterator
from typing import Protocol

from capricorn.config.endpoint import Endpoint
from capricorn.errors import TransportError
from capricorn.runtime.comm.addresses import family_of
from capricorn.runtime.comm.handshake import HANDSHAKE_TIMEOUT_S, Identity, greet
from capricorn.runtime.comm.wire import (
    FRAME_BYTES,
    LOW_CLASS_TOS,
    TRAFFIC_CLASS,
    Frame,
    FrameKind,
    receive,
    receive_block,
    send,
    set_deadline,
    shut,
)
from capricorn.runtime.store.slot import Layout, Slot
from capricorn.systems.interface import PacedRoute
from capricorn.units import Bytes, Seconds


class Source(Protocol):
    """The memory that a replica is sent from: a slot, or the live state."""

    layout: Layout

    def view(self, start: int, stop: int) -> memoryview:
        """Returns these bytes of the shard, which lie in one block."""
        ...

    def checksum(self, index: int) -> int:
        """Returns the checksum of a block."""
        ...


class ReplicaLink:
    """Sends the state of an owner to one holder, and fetches it back. Used by one thread at a time."""

    def __init__(
        self,
        me: Identity,
        owner: int,
        holder: int,
        address: tuple[str, int],
        *,
        timeout_s: Seconds,
        low_class: bool,
        send_buffer_bytes: Bytes,
        route: PacedRoute | None = None,
    ) -> None:
        """Describes the link; `connect` opens it.

        Args:
            me: run, attempt and secret of this rank.
            owner: this rank.
            holder: the rank at the other end.
            address: where the holder's replica server listens.
            timeout_s: deadline of each wait for the holder.
            low_class: whether packets are marked with the low traffic class.
            send_buffer_bytes: size of the socket's send buffer.
            route: the way to the holder over modelled links, if they are modelled.
        """
        self.holder, self._route = holder, route
        self.sent_bytes: Bytes = 0
        self._me, self._owner, self._address = me, owner, address
        self._timeout_s, self._low_class, self._send_buffer_bytes = timeout_s, low_class, send_buffer_bytes
        self._sock: socket.socket | None = None
        self._manifest = b"{}"

    def connect(self, manifest: str) -> None:
        """Opens the link and gives the holder the layout of what will come.

        Raises:
            TransportError: the holder cannot be reached or refuses us.
        """
        self._manifest = manifest.encode()
        self._open()

    def begin(self, iteration: int, keep: int | None) -> None:
        """Starts a replica of `iteration`; the holder keeps `keep`, if any. Opens the link again if it had broken.

        Raises:
            TransportError: the holder cannot be reached or refuses us.
        """
        if self._sock is None:
            self._open()
        self._send(Frame.begin(iteration, keep))

    def send_range(self, iteration: int, source: Source, start: int, stop: int) -> None:
        """Sends a range of a shard; returns when the kernel has taken it, which is not yet delivery.

        The ranges of a replica follow each other. The header of a block goes in front of its first byte.

        Args:
            iteration: of the replica.
            source: the memory it is sent from.
            start: first byte of the range.
            stop: the byte after the last one.

        Raises:
            TransportError: the link broke or the deadline passed.
        """
        size = source.layout.block_bytes
        with self._blame() as sock:
            for index in range(start // size, -(-stop // size)):
                block = source.layout.block(index)
                payload = source.view(max(start, block.start), min(stop, block.stop))
                if start <= block.start:
                    frame = Frame(FrameKind.BLOCK, iteration, index, block.stop - block.start, source.checksum(index))
                    send_block(sock, frame, payload, self._route, low=self._low_class)
                else:
                    send_payload(sock, payload, self._route, low=self._low_class)
        self.sent_bytes += stop - start

    @property
    def in_flight_bytes(self) -> Bytes:
        """Bytes that the kernel has taken and the holder has not acknowledged."""
        sock = self._sock
        if sock is None:
            return 0
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile
            return int.from_bytes(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
        return 0

    def commit(self, iteration: int) -> None:
        """Returns when the holder has verified and committed the replica.

        Raises:
            TransportError: it did not, or not before the deadline.
        """
        self._send(Frame(FrameKind.COMMIT, iteration))
        answer = self._receive()
        if answer.kind is not FrameKind.DONE or answer.iteration != iteration:
            raise TransportError(f"rank {self.holder} refused the replica of iteration {iteration}: it arrived damaged")

    def fetch(self, iteration: int, slot: Slot) -> None:
        """Receives the holder's copy into a begun slot and commits it.

        Raises:
            TransportError: the holder has no such copy, or it arrived damaged.
        """
        self._send(Frame(FrameKind.FETCH, iteration))
        with self._blame() as sock:
            if not receive_copy(sock, iteration, slot):
                raise TransportError(f"the copy of iteration {iteration} on rank {self.holder} is damaged")
        slot.commit()

    def close(self) -> None:
        """Ends the link; wakes a thread that waits in it."""
        if self._sock is not None:
            shut(self._sock)
            self._sock = None

    def _open(self) -> None:
        sock = socket.socket(family_of(self._address[0]), socket.SOCK_STREAM)
        try:
            if self._route is None:
                # With a route what is not sent yet waits there, and a small buffer on loopback waits for late ACKs.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._send_buffer_bytes)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._low_class:
                sock.setsockopt(*TRAFFIC_CLASS[sock.family], LOW_CLASS_TOS)
            set_deadline(sock, HANDSHAKE_TIMEOUT_S)
            sock.connect(self._address)
            greet(sock, self._me, self._owner, self.holder)
            set_deadline(sock, self._timeout_s)
            send(sock, Frame(FrameKind.MANIFEST, size=len(self._manifest)).pack(), self._manifest)
        except (OSError, TransportError) as error:
            sock.close()
            where = Endpoint(*self._address)
            raise TransportError(f"rank {self._owner} cannot link to rank {self.holder} at {where}: {error}") from None
        self._sock = sock

    def _send(self, frame: Frame) -> None:
        with self._blame() as sock:
            send(sock, frame.pack())

    def _receive(self) -> Frame:
        with self._blame() as sock:
            return Frame.unpack(receive(sock, FRAME_BYTES))

    @contextlib.contextmanager
    def _blame(self) -> Iterator[socket.socket]:
        """Yields the open link; an error on it names the rank waited for, and ends the link."""
        try:
            if (sock := self._sock) is None:  # also when another thread has just closed it
                raise TransportError("the link is down")
            yield sock
        except TransportError as error:
            self.close()
            raise TransportError(f"rank {self._owner}, replica on rank {self.holder}: {error}") from None


def send_block(sock: socket.socket, frame: Frame, payload: memoryview, route: PacedRoute | None, *, low: bool) -> None:
    """Sends a frame and its payload, or the first part of it, through the modelled links if there are any.

    Args:
        sock: the connection.
        frame: says what follows.
        payload: the bytes that follow.
        route: the way over modelled links, None if they are not modelled.
        low: whether the bytes travel in the low traffic class of a modelled link.

    Raises:
        TransportError: the connection ended or the deadline passed first.
    """
    if route is None:
        send(sock, frame.pack(), payload)
        return
    send(sock, frame.pack())
    send_payload(sock, payload, route, low=low)


def send_payload(sock: socket.socket, payload: memoryview, route: PacedRoute | None, *, low: bool) -> None:
    """Sends bytes of a payload, through the modelled links if there are any.

    Args:
        sock: the connection.
        payload: the bytes.
        route: the way over modelled links, None if they are not modelled.
        low: whether the bytes travel in the low traffic class of a modelled link.

    Raises:
        TransportError: the connection ended or the deadline passed first.
    """
    for piece in (payload,) if route is None else route.pieces(payload, low=low):
        send(sock, piece)


def receive_copy(sock: socket.socket, iteration: int, slot: Slot) -> bool:
    """Receives blocks into a slot until COMMIT; returns whether all of them came and match their checksums.

    Raises:
        TransportError: the connection ended, or a frame does not fit the slot.
    """
    missing = set(range(slot.layout.num_blocks))
    intact = True
    while True:
        frame = Frame.unpack(receive(sock, FRAME_BYTES))
        if frame.kind is FrameKind.FAILED:
            return False
        if frame.kind is FrameKind.COMMIT and frame.iteration == iteration:
            return intact and not missing
        place = slot.payload[slot.layout.block(frame.index)] if frame.index < slot.layout.num_blocks else None
        if (
            frame.kind is not FrameKind.BLOCK
            or frame.iteration != iteration
            or place is None
            or len(place) != frame.size
        ):
            raise TransportError(f"a frame {frame.kind.name} of {frame.size} bytes does not belong here")
        intact = receive_block(sock, place) == frame.checksum and intact
        slot.table[frame.index] = frame.checksum
        missing.discard(frame.index)
