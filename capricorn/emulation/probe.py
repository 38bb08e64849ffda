"""One node's part in measuring the links: sends to the next node of a ring, receives from the one before.

Must not know how links are made, and imports no torch: it is to start fast.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from capricorn.process import die_with_parent
from capricorn.units import KIB, BytesPerSecond, Seconds

TIMEOUT_S: Seconds = 10.0
"""The timeout of each wait for another node."""
SETTLE_S: Seconds = 0.2
"""Left out at the start of a transfer: what the burst lets through, and the sender finding its speed."""
WINDOW_S: Seconds = 0.5
SEND_S: Seconds = SETTLE_S + WINDOW_S + 0.1
"""Longer than is measured, so that no link falls idle while another is still measured."""
NUM_PINGS, PING_BYTES = 200, 64
BULK_BYTES: Final = 256 * KIB


class RingProbe:
    """Two connections of a node: to the next, and from the one before, whose pings it sends back."""

    def __init__(self, node: int, num_nodes: int, address: str, links: Path | None) -> None:
        self._listener = socket.create_server((address, 0))
        self._listener.settimeout(TIMEOUT_S)
        self._pieces_to_next = _pieces(links, node, (node + 1) % num_nodes)
        self._pieces_back = _pieces(links, node, (node - 1) % num_nodes)
        self._thread = ThreadPoolExecutor(1)

    def listen(self) -> int:
        """Returns the port for the node before."""
        port: int = self._listener.getsockname()[1]
        return port

    def connect(self, address: str, port: str) -> int:
        """Connects to the next node and then waits for the one before."""
        self._outgoing = _prepare(socket.create_connection((address, int(port)), TIMEOUT_S))
        self._incoming = _prepare(self._listener.accept()[0])
        self._arrived = self._thread.submit(self._serve)
        return 0

    def round_trip(self) -> Seconds:
        """Returns the median of the pings."""
        ping = memoryview(bytearray(PING_BYTES))
        seconds = []
        for _ in range(NUM_PINGS):
            start_s = time.perf_counter()
            _send(self._outgoing, self._pieces_to_next(ping))
            _receive(self._outgoing, ping)
            seconds.append(time.perf_counter() - start_s)
        return sorted(seconds)[NUM_PINGS // 2]

    def bulk(self) -> BytesPerSecond:
        """Sends for a while; returns the rate at which the bytes of the node before arrived."""
        end_s = time.monotonic() + SEND_S
        payload = memoryview(bytes(BULK_BYTES))
        # The receiver need not take the rest: a full buffer ends sending, too.
        with contextlib.suppress(TimeoutError):
            while (remaining_s := end_s - time.monotonic()) > 0:
                self._outgoing.settimeout(remaining_s)
                _send(self._outgoing, self._pieces_to_next(payload))
        self._outgoing.shutdown(socket.SHUT_WR)
        return self._arrived.result(TIMEOUT_S)

    def _serve(self) -> BytesPerSecond:
        ping = memoryview(bytearray(PING_BYTES))
        for _ in range(NUM_PINGS):
            _receive(self._incoming, ping)
            _send(self._incoming, self._pieces_back(ping))
        return _arrival_rate(self._incoming)


def _pieces(links: Path | None, source: int, target: int) -> Callable[[memoryview], Iterable[memoryview]]:
    """Returns a function that yields the parts of a payload, each when it may be sent."""
    if links is not None:
        # Costs the import of what only these links need.
        from capricorn.emulation.route import Links

        if route := Links(links).route(source, target):
            return route.pieces
    return lambda view: (view,)


def _prepare(connection: socket.socket) -> socket.socket:
    connection.settimeout(TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # What has not left when we end is dropped: the run that follows must find its links idle.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return connection


def _send(connection: socket.socket, pieces: Iterable[memoryview]) -> None:
    for piece in pieces:
        connection.sendall(piece)


def _receive(connection: socket.socket, view: memoryview) -> None:
    """Fills the view.

    Raises:
        ConnectionError: the other end closed before.
    """
    while view:
        count = connection.recv_into(view)
        if count == 0:
            raise ConnectionError("the other node has gone")
        view = view[count:]


def _arrival_rate(connection: socket.socket) -> BytesPerSecond:
    """Returns bytes a second by the receiver's clock, between the first arrivals after `SETTLE_S` and after the window.

    Raises:
        TimeoutError: hardly anything arrived.
    """
    buffer = memoryview(bytearray(BULK_BYTES))
    num_bytes = connection.recv_into(buffer)  # from here on: the sender may begin long after the last ping
    start_s = time.monotonic()
    arrivals = []  # (when, how many bytes by then)
    while count := connection.recv_into(buffer):
        elapsed_s = time.monotonic() - start_s
        num_bytes += count
        if elapsed_s >= SETTLE_S:
            arrivals.append((elapsed_s, num_bytes))
        if elapsed_s >= SETTLE_S + WINDOW_S:
            break
    if len(arrivals) < 2:
        raise TimeoutError("got too little to tell a rate")
    (first_s, before), (last_s, after) = arrivals[0], arrivals[-1]
    return (after - before) / (last_s - first_s)


def main() -> None:
    """Answers each question on standard input, a method of `RingProbe` and its arguments, with one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("parent", type=int)
    parser.add_argument("node", type=int)
    parser.add_argument("num_nodes", type=int)
    parser.add_argument("address")
    parser.add_argument("--links", type=Path)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    probe = RingProbe(arguments.node, arguments.num_nodes, arguments.address, arguments.links)
    for line in sys.stdin:
        question, *rest = line.split()
        print(json.dumps(getattr(probe, question)(*rest)), flush=True)


if __name__ == "__main__":
    main()
