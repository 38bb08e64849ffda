"""The replica transport against a bare loop of sendall and recv_into with the same buffers, in two processes."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.timing import interleaved, ratio
from capricorn.runtime.comm.handshake import Identity
from capricorn.runtime.comm.replica_link import ReplicaLink
from capricorn.runtime.comm.replica_server import ReplicaServer
from capricorn.runtime.comm.wire import receive_into, set_deadline
from capricorn.runtime.store.node_store import NodeStore
from capricorn.runtime.store.slot import Layout, Slot, checksum
from capricorn.topology import Topology
from capricorn.units import MIB

LAYOUT = Layout(90 * MIB, MIB, 0)
ME = Identity("bench", 0, b"secret")
SEND_BUFFER_BYTES = 512 * 1024


def _serve(folder: str, pipe: Connection) -> None:
    """Runs in the receiving process: a replica server, and a bare receiver that answers with one byte."""
    store = NodeStore.create(Path(folder) / "node0", "bench", 0, Topology(2, 1))
    slots = store.open_slots(1, LAYOUT)
    server = ReplicaServer(ME, 0, "127.0.0.1", store, timeout_s=30, idle_priority=False)
    server.start({1: LAYOUT})
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send((server.address, listener.getsockname()))
        bare, _ = listener.accept()
    with bare:
        set_deadline(bare, 60)
        while pipe.recv():
            for index in range(LAYOUT.num_blocks):
                receive_into(bare, slots[0].payload[LAYOUT.block(index)])
            bare.sendall(b"k")
    server.close()


def _alternatives(folder: str, pipe: Connection) -> dict[str, Callable[[], None]]:
    replica_address, bare_address = pipe.recv()
    slot = _filled_slot(folder)
    bare = socket.socket()
    bare.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    bare.connect(bare_address)
    link = ReplicaLink(ME, 1, 0, replica_address, timeout_s=30, low_class=True, send_buffer_bytes=SEND_BUFFER_BYTES)
    link.connect("{}")

    def send_bare() -> None:
        pipe.send(True)
        for index in range(LAYOUT.num_blocks):
            bare.sendall(slot.payload[LAYOUT.block(index)])
        bare.recv(1)

    def send_replica() -> None:
        link.begin(1, 0)
        for index in range(LAYOUT.num_blocks):
            block = LAYOUT.block(index)
            link.send_range(1, slot, block.start, block.stop)
        link.commit(1)

    return {"bare": send_bare, "replica": send_replica}


def _filled_slot(folder: str) -> Slot:
    slot = Slot(Path(folder) / "slot", 1, LAYOUT)
    for index in range(LAYOUT.num_blocks):
        place = slot.payload[LAYOUT.block(index)]
        place[:] = os.urandom(len(place))
        slot.table[index] = checksum(place)
    return slot


def main() -> None:
    """Prints the transport's rate as a fraction of the bare loop's, verification and acknowledgement included."""
    ours, theirs = multiprocessing.Pipe()
    with TemporaryDirectory(dir="/dev/shm") as folder:
        server = multiprocessing.get_context("spawn").Process(target=_serve, args=(folder, theirs))
        server.start()
        durations = interleaved(_alternatives(folder, ours))
        ours.send(False)
        server.join()
    print(f"transport rate / bare socket rate: {ratio(durations['bare'], durations['replica'])}")
    print(f"(bare loop: {LAYOUT.payload_bytes / median(durations['bare']) / 1e9:.1f} GB/s)")
