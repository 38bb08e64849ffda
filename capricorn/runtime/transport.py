"""Replicas over TCP: a link from each owner to each of its hosts, and the host's side that receives into the store.

Pieces go straight from the mapped slot of the owner into the mapped slot of the host; a replica counts when the host
has verified and acknowledged it. Knows no tensor and no training.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

from capricorn.errors import CapricornError, TransportError
from capricorn.runtime.slot import Layout, Slot
from capricorn.runtime.store import NodeStore
from capricorn.runtime.wire import (
    FRAME_BYTES,
    LOW_CLASS_TOS,
    MANIFEST_LIMIT,
    Frame,
    Identity,
    Kind,
    greet,
    receive,
    receive_block,
    send,
    set_deadline,
    welcome,
)
from capricorn.units import Bytes, Seconds

HANDSHAKE_TIMEOUT_S = 5.0


class ReplicaLink:
    """The owner's end: sends its state to one host, and fetches it back. Used by one thread at a time."""

    def __init__(
        self,
        me: Identity,
        owner: int,
        host: int,
        address: tuple[str, int],
        *,
        timeout_s: Seconds,
        low_class: bool,
        send_buffer_bytes: Bytes,
    ) -> None:
        self.host = host
        self.sent_bytes: Bytes = 0
        self._me, self._owner, self._address = me, owner, address
        self._timeout_s, self._low_class, self._send_buffer_bytes = timeout_s, low_class, send_buffer_bytes
        self._sock: socket.socket | None = None
        self._manifest = b"{}"

    def connect(self, manifest: str) -> None:
        """Opens the link and gives the host the layout of what will come.

        Raises:
            TransportError: the host cannot be reached or refuses us.
        """
        self._manifest = manifest.encode()
        self._open()

    def begin(self, iteration: int, keep: int) -> None:
        """Starts a replica of `iteration`; the host keeps `keep`. Opens the link again if it had broken."""
        if self._sock is None:
            self._open()
        self._send(Frame(Kind.BEGIN, iteration, size=keep))

    def send_block(self, iteration: int, index: int, payload: memoryview, check: int) -> None:
        """Sends one block; returns when the kernel has taken it, which is not yet delivery."""
        self._send(Frame(Kind.BLOCK, iteration, index, len(payload), check), payload)
        self.sent_bytes += len(payload)

    def commit(self, iteration: int) -> None:
        """Returns when the host has verified and committed the replica.

        Raises:
            TransportError: it did not, or not before the deadline.
        """
        self._send(Frame(Kind.COMMIT, iteration))
        answer = self._receive()
        if answer.kind is not Kind.DONE or answer.iteration != iteration:
            raise TransportError(f"rank {self.host} refused the replica of iteration {iteration}: it arrived damaged")

    def fetch(self, iteration: int, slot: Slot) -> None:
        """Receives the host's copy into a begun slot and commits it.

        Raises:
            TransportError: the host has no such copy, or it arrived damaged.
        """
        self._send(Frame(Kind.FETCH, iteration))
        with self._blame() as sock:
            if not _receive_blocks(sock, iteration, slot):
                raise TransportError(f"the copy of iteration {iteration} on rank {self.host} is damaged")
        slot.commit()

    def close(self) -> None:
        """Ends the link; wakes a thread that waits in it."""
        if self._sock is not None:
            _shut(self._sock)
            self._sock = None

    def _open(self) -> None:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._send_buffer_bytes)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._low_class:
                sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, LOW_CLASS_TOS)
            set_deadline(sock, HANDSHAKE_TIMEOUT_S)
            sock.connect(self._address)
            greet(sock, self._me, self._owner, self.host)
            set_deadline(sock, self._timeout_s)
            send(sock, Frame(Kind.MANIFEST, size=len(self._manifest)).pack(), self._manifest)
        except (OSError, TransportError) as error:
            sock.close()
            where = "{}:{}".format(*self._address)
            raise TransportError(f"rank {self._owner} cannot link to rank {self.host} at {where}: {error}") from None
        self._sock = sock

    def _send(self, frame: Frame, *payload: memoryview) -> None:
        with self._blame() as sock:
            send(sock, frame.pack(), *payload)

    def _receive(self) -> Frame:
        with self._blame() as sock:
            return Frame.unpack(receive(sock, FRAME_BYTES))

    @contextlib.contextmanager
    def _blame(self) -> Iterator[socket.socket]:
        """The open link; what goes wrong with it is told with the rank waited for, and ends it."""
        try:
            if (sock := self._sock) is None:  # also when another thread has just closed it
                raise TransportError("the link is down")
            yield sock
        except TransportError as error:
            self.close()
            raise TransportError(f"rank {self._owner}, replica on rank {self.host}: {error}") from None


class ReplicaHost:
    """The host's end: accepts the owners whose replicas are kept here and receives into the store.

    One thread accepts and one serves each connection; they only wait in system calls and checksums.
    """

    def __init__(self, me: Identity, rank: int, address: str, store: NodeStore, *, timeout_s: Seconds) -> None:
        self._me, self._rank, self._store, self._timeout_s = me, rank, store, timeout_s
        self._layouts: dict[int, Layout] = {}
        self._served: dict[int, tuple[socket.socket, threading.Thread]] = {}
        self._pending: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._listener = socket.create_server((address, 0), backlog=64)
        self._acceptor = threading.Thread(target=self._accept, name="capricorn-accept", daemon=True)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    def start(self, layouts: dict[int, Layout]) -> None:
        """Begins to accept the owners with these layouts, whose slots the store hosts already."""
        self._layouts = layouts
        self._acceptor.start()

    def close(self) -> None:
        """Ends all threads and connections."""
        with self._lock:
            self._closed = True
            sockets = [*self._pending, *(sock for sock, _ in self._served.values())]
            threads = [thread for _, thread in self._served.values()]
        _shut(self._listener)
        for sock in sockets:
            _shut(sock)
        for thread in [self._acceptor, *threads]:
            if thread.ident is not None:
                thread.join(timeout=HANDSHAKE_TIMEOUT_S)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if self._closed:
                    sock.close()
                    return
                self._pending.add(sock)
            threading.Thread(target=self._serve, args=(sock,), name="capricorn-host", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            set_deadline(sock, HANDSHAKE_TIMEOUT_S)
            owner = welcome(sock, self._me, self._rank, self._layouts)
            self._take_over(owner, sock)
            set_deadline(sock, self._timeout_s)
            _Session(sock, self._store, owner, self._layouts[owner], self._me.attempt).run()
        except (CapricornError, OSError):
            # The owner sees its link end, counts the save as failed and says so; a stranger just ends.
            return
        finally:
            with self._lock:
                self._pending.discard(sock)
            _shut(sock)

    def _take_over(self, owner: int, sock: socket.socket) -> None:
        # An owner that comes again has lost its first connection; two writers must never share its slots.
        with self._lock:
            before = self._served.get(owner)
            self._served[owner] = (sock, threading.current_thread())
            self._pending.discard(sock)
        if before is not None:
            _shut(before[0])
            before[1].join()


class _Session:
    """What one owner says on one connection, acted upon."""

    def __init__(self, sock: socket.socket, store: NodeStore, owner: int, layout: Layout, attempt: int) -> None:
        self._sock, self._store, self._owner, self._layout, self._attempt = sock, store, owner, layout, attempt

    def run(self) -> None:
        """Serves until the owner closes the connection.

        Raises:
            TransportError: the connection ended, or something came that makes no sense.
        """
        actions: dict[Kind, Callable[[Frame], None]] = {
            Kind.MANIFEST: self._manifest,
            Kind.BEGIN: self._receive_replica,
            Kind.FETCH: self._send_copy,
        }
        while True:
            frame = self._next()
            if frame.kind not in actions:
                raise TransportError(f"{frame.kind.name} came out of turn")
            actions[frame.kind](frame)

    def _next(self) -> Frame:
        # Between two checkpoints an owner may be silent for as long as it likes; within one the deadline holds.
        while True:
            try:
                first = self._sock.recv(1)
            except BlockingIOError:
                continue
            except OSError as error:
                raise TransportError(f"the connection broke: {error.strerror}") from None
            if not first:
                raise TransportError("the connection was closed")
            return Frame.unpack(first + receive(self._sock, FRAME_BYTES - 1))

    def _manifest(self, frame: Frame) -> None:
        if frame.size > MANIFEST_LIMIT:
            raise TransportError(f"a manifest of {frame.size} bytes is refused")
        self._store.write_manifest(self._owner, receive(self._sock, frame.size).decode(errors="replace"))

    def _receive_replica(self, frame: Frame) -> None:
        slot = self._store.begin(self._owner, frame.iteration, frame.size, self._attempt)
        intact = _receive_blocks(self._sock, frame.iteration, slot)
        if intact:
            self._store.commit(slot)
        else:
            self._store.abort(slot)
        send(self._sock, Frame(Kind.DONE if intact else Kind.FAILED, frame.iteration).pack())

    def _send_copy(self, frame: Frame) -> None:
        slot = self._store.read(self._owner, frame.iteration)
        if slot is None:
            send(self._sock, Frame(Kind.FAILED, frame.iteration).pack())
            return
        for index in range(self._layout.num_blocks):
            payload = slot.payload[self._layout.block(index)]
            send(self._sock, Frame(Kind.BLOCK, frame.iteration, index, len(payload), slot.table[index]).pack(), payload)
        send(self._sock, Frame(Kind.COMMIT, frame.iteration).pack())


def _receive_blocks(sock: socket.socket, iteration: int, slot: Slot) -> bool:
    """Receives blocks into a slot until COMMIT; whether all of them came and match their checksums.

    Raises:
        TransportError: the connection ended, or a frame does not fit the slot.
    """
    missing = set(range(slot.layout.num_blocks))
    intact = True
    while True:
        frame = Frame.unpack(receive(sock, FRAME_BYTES))
        if frame.kind is Kind.FAILED:
            return False
        if frame.kind is Kind.COMMIT and frame.iteration == iteration:
            return intact and not missing
        place = slot.payload[slot.layout.block(frame.index)] if frame.index < slot.layout.num_blocks else None
        if frame.kind is not Kind.BLOCK or frame.iteration != iteration or place is None or len(place) != frame.size:
            raise TransportError(f"a frame {frame.kind.name} of {frame.size} bytes does not belong here")
        intact = receive_block(sock, place) == frame.check and intact
        slot.table[frame.index] = frame.check
        missing.discard(frame.index)


def _shut(sock: socket.socket) -> None:
    # shutdown wakes a thread blocked in a call on the socket, close alone does not.
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
