"""The holder's end of replication: accepts the owners whose replicas this node keeps, and receives into the store.

Its threads only wait in system calls and checksum. Knows no tensor and no training.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Final, NamedTuple

from capricorn.errors import TransportError, in_words
from capricorn.runtime.comm.addresses import family_of
from capricorn.runtime.comm.handshake import HANDSHAKE_TIMEOUT_S, Identity, welcome
from capricorn.runtime.comm.idle_priority import use_idle_priority
from capricorn.runtime.comm.replica_link import receive_copy, send_block
from capricorn.runtime.comm.wire import (
    FRAME_BYTES,
    MANIFEST_LIMIT,
    Frame,
    FrameKind,
    receive,
    receive_text,
    send,
    set_deadline,
    shut,
    wake,
)
from capricorn.runtime.deadline import Deadline
from capricorn.runtime.store.node_store import NodeStore
from capricorn.runtime.store.slot import Layout
from capricorn.runtime.watched_thread import WatchedThread
from capricorn.systems.interface import PacedRoute
from capricorn.systems.iteration_order import MAX_ITERATION
from capricorn.units import Seconds

MAX_UNAUTHENTICATED: Final = 64
"""Unauthenticated connections at once; the oldest is dropped first, since an owner proves itself at once."""
MAX_FAILURES: Final = 100
"""Failures that are remembered until they are taken."""
BREATH_S: Final[Seconds] = 0.02
"""Time between two attempts to accept while this process has no descriptor left."""


class _Served(NamedTuple):
    """The connection of an owner; the higher of two numbers came later."""

    number: int
    sock: socket.socket
    thread: threading.Thread


class ReplicaServer:
    """Listens on this node's own interface; one thread accepts and one serves each connection."""

    def __init__(
        self,
        me: Identity,
        rank: int,
        address: str,
        store: NodeStore,
        *,
        timeout_s: Seconds,
        idle_priority: bool,
        routes: Mapping[int, PacedRoute] | None = None,
    ) -> None:
        """Opens the listening socket; nobody is accepted before `start`.

        Args:
            me: run, attempt and secret of this rank.
            rank: this rank.
            address: of this node's own interface.
            store: receives the replicas.
            timeout_s: deadline of each wait within a replica.
            idle_priority: whether the receiving threads run at SCHED_IDLE.
            routes: by owner, the way there over modelled links, for copies that are fetched back.
        """
        self._me, self._rank, self._store, self._timeout_s = me, rank, store, timeout_s
        self._has_idle_priority, self._routes = idle_priority, routes or {}
        self._layouts: dict[int, Layout] = {}
        self._served: dict[int, _Served] = {}
        self._turns: dict[int, threading.Lock] = {}
        self._pending: dict[socket.socket, threading.Thread] = {}
        self._numbers = count()
        self._failures: deque[str] = deque(maxlen=MAX_FAILURES)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._listener = socket.create_server((address, 0), family=family_of(address), backlog=256)
        self._acceptor = WatchedThread(target=self._accept, name="capricorn-accept", daemon=True)

    @property
    def address(self) -> tuple[str, int]:
        hostname, port = self._listener.getsockname()[:2]
        return str(hostname), int(port)

    def start(self, layouts: dict[int, Layout]) -> None:
        """Begins to accept the owners with these layouts, whose slots are open in the store already."""
        self._layouts = layouts
        self._turns = {owner: threading.Lock() for owner in layouts}
        self._acceptor.start()

    def check(self) -> None:
        """Tells whether owners are still accepted.

        Raises:
            CapricornError: the thread that accepts them has ended, and why.
        """
        self._acceptor.check()

    def take_failures(self) -> list[str]:
        """Returns in words the replicas that failed here since the last call, for a reason that no owner can know."""
        return [self._failures.popleft() for _ in range(len(self._failures))]

    def close(self) -> None:
        """Ends all threads and connections."""
        with self._lock:
            self._closing.set()
            sockets = [*self._pending, *(served.sock for served in self._served.values())]
            threads = [*self._pending.values(), *(served.thread for served in self._served.values())]
        for sock in [self._listener, *sockets]:
            wake(sock)
        deadline = Deadline(HANDSHAKE_TIMEOUT_S)
        for thread in [self._acceptor, *threads]:
            if thread.ident is not None:
                thread.join(deadline.left_s)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:  # closed, or a connection that went away, or no descriptor is left
                self._drop_unauthenticated(at_most=MAX_UNAUTHENTICATED // 2)
                self._closing.wait(BREATH_S)
            else:
                self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        self._drop_unauthenticated(at_most=MAX_UNAUTHENTICATED - 1)
        arguments = (sock, next(self._numbers))
        thread = threading.Thread(target=self._serve, args=arguments, name="capricorn-serve", daemon=True)
        with self._lock:
            if self._closing.is_set():
                sock.close()
                return
            try:
                thread.start()
            except RuntimeError:  # the system gives us no more threads
                sock.close()
                return
            self._pending[sock] = thread

    def _drop_unauthenticated(self, at_most: int) -> None:
        """Ends the oldest unauthenticated connections until at most so many are left."""
        with self._lock:
            for sock in list(self._pending)[: max(0, len(self._pending) - at_most)]:
                wake(sock)
                del self._pending[sock]

    def _serve(self, sock: socket.socket, number: int) -> None:
        owner: int | None = None
        try:
            if self._has_idle_priority:
                use_idle_priority()
            set_deadline(sock, HANDSHAKE_TIMEOUT_S)
            owner = welcome(sock, self._me, self._rank, self._layouts)
            with self._turn(owner, _Served(number, sock, threading.current_thread())):
                set_deadline(sock, self._timeout_s)
                layout, route = self._layouts[owner], self._routes.get(owner)
                _Session(sock, self._store, owner, layout, self._me.attempt, route).run()
        except (TransportError, OSError):
            # The owner sees its link end, counts the save as failed and says so; an unauthenticated one just ends.
            return
        except BaseException as error:  # noqa: BLE001 - whatever it is, this rank alone knows why
            who = "a connection" if owner is None else f"the replica of rank {owner}"
            self._failures.append(f"{who} failed on rank {self._rank}: {in_words(error)}")
        finally:
            shut(sock)
            with self._lock:
                self._pending.pop(sock, None)

    @contextlib.contextmanager
    def _turn(self, owner: int, mine: _Served) -> Iterator[None]:
        # An owner that comes again has lost its first connection; two writers must never share its slots.
        with self._lock:
            before = self._served.get(owner)
            if before is not None and before.number > mine.number:
                raise TransportError(f"rank {owner} has come again meanwhile")
            self._served[owner] = mine
            self._pending.pop(mine.sock, None)
        if before is not None:
            wake(before.sock)
        if not self._turns[owner].acquire(timeout=HANDSHAKE_TIMEOUT_S):
            raise TransportError(f"rank {owner} came again, and its first connection does not end")
        try:
            yield
        finally:
            self._turns[owner].release()


class _Session:
    """One connection of one owner, whose messages are acted upon."""

    def __init__(
        self,
        sock: socket.socket,
        store: NodeStore,
        owner: int,
        layout: Layout,
        attempt: int,
        route: PacedRoute | None,
    ) -> None:
        """Takes over an authenticated connection.

        Args:
            sock: the connection.
            store: of this node.
            owner: who connected.
            layout: of the owner's state.
            attempt: counts the starts of the job.
            route: the way back over modelled links, None if they are not modelled.
        """
        self._sock, self._store, self._owner, self._layout = sock, store, owner, layout
        self._attempt, self._route = attempt, route

    def run(self) -> None:
        """Serves until the owner closes the connection.

        Raises:
            TransportError: the connection ended, or something came that makes no sense.
        """
        actions: dict[FrameKind, Callable[[Frame], None]] = {
            FrameKind.MANIFEST: self._manifest,
            FrameKind.BEGIN: self._receive_replica,
            FrameKind.FETCH: self._send_copy,
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
        manifest = receive_text(self._sock, frame.size)
        try:
            is_table = isinstance(json.loads(manifest), dict)
        except (ValueError, RecursionError):
            is_table = False
        if not is_table:
            raise TransportError(f"a manifest that is no table arrived from rank {self._owner}")
        self._store.write_manifest(self._owner, manifest)

    def _receive_replica(self, frame: Frame) -> None:
        if frame.iteration > MAX_ITERATION:
            raise TransportError(f"a replica of iteration {frame.iteration} is refused: there is no such iteration")
        slot = self._store.begin(self._owner, frame.iteration, frame.keep, self._attempt)
        intact = receive_copy(self._sock, frame.iteration, slot)
        if intact:
            self._store.commit(slot)
        else:
            self._store.abort(slot)
        send(self._sock, Frame(FrameKind.DONE if intact else FrameKind.FAILED, frame.iteration).pack())

    def _send_copy(self, frame: Frame) -> None:
        slot = self._store.read(self._owner, frame.iteration)
        if slot is None:
            send(self._sock, Frame(FrameKind.FAILED, frame.iteration).pack())
            return
        for index in range(self._layout.num_blocks):
            payload = slot.payload[self._layout.block(index)]
            block = Frame(FrameKind.BLOCK, frame.iteration, index, len(payload), slot.table[index])
            send_block(self._sock, block, payload, self._route, low=False)
        send(self._sock, Frame(FrameKind.COMMIT, frame.iteration).pack())
