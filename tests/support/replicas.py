"""An owner and its holder in one process, each with a store, and what must be true of them whatever was sent."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from random import Random

from capricorn.runtime.comm.handshake import Identity
from capricorn.runtime.comm.replica_link import ReplicaLink
from capricorn.runtime.comm.replica_server import ReplicaServer
from capricorn.runtime.store.node_store import NodeStore
from capricorn.runtime.store.slot import COMPLETE, Layout, Slot, checksum, read_header
from capricorn.systems.interface import PacedRoute
from capricorn.topology import Topology

LAYOUT = Layout(payload_bytes=300_000, block_bytes=65536, digest=3)
ME = Identity("run", 0, b"secret")
OWNER, HOLDER = 1, 0


class Pair:
    """An owner and its holder, each with a store of its own."""

    def __init__(
        self, folder: Path, timeout_s: float = 5.0, layout: Layout = LAYOUT, address: str = "127.0.0.1"
    ) -> None:
        self.layout = layout
        topology = Topology(2, 1)
        self.holder_store = NodeStore.create(folder / "node0", "run", 0, topology)
        self.owner_store = NodeStore.create(folder / "node1", "run", 1, topology)
        self.holder_store.open_slots(OWNER, layout)
        self.owner_store.open_slots(OWNER, layout)
        self.server = ReplicaServer(ME, HOLDER, address, self.holder_store, timeout_s=timeout_s, idle_priority=False)
        self.server.start({OWNER: layout})
        self.link = self.make_link(timeout_s=timeout_s)

    def make_link(
        self, me: Identity = ME, timeout_s: float = 5.0, owner: int = OWNER, route: PacedRoute | None = None
    ) -> ReplicaLink:
        return ReplicaLink(
            me,
            owner,
            HOLDER,
            self.server.address,
            timeout_s=timeout_s,
            low_class=True,
            send_buffer_bytes=65536,
            route=route,
        )

    def staged(self, iteration: int, keep: int | None = 0) -> Slot:
        """A complete local copy of random bytes."""
        slot = self.owner_store.begin(OWNER, iteration, keep)
        fill(slot, os.urandom(self.layout.payload_bytes))
        slot.commit()
        return slot

    def replicate(self, slot: Slot, iteration: int, keep: int | None = 0, link: ReplicaLink | None = None) -> None:
        link = link or self.link
        link.begin(iteration, keep)
        link.send_range(iteration, slot, 0, self.layout.payload_bytes)
        link.commit(iteration)

    def replica(self, iteration: int) -> Slot | None:
        return self.holder_store.read(OWNER, iteration)

    def close(self) -> None:
        self.link.close()
        self.server.close()


def fill(slot: Slot, payload: bytes) -> None:
    """Puts a payload and its checksums into a slot that has begun."""
    for index in range(slot.layout.num_blocks):
        place = slot.payload[slot.layout.block(index)]
        place[:] = payload[slot.layout.block(index)]
        slot.table[index] = checksum(place)


def payload_of(owner: int, iteration: int, layout: Layout) -> bytes:
    """What an owner's state is after that iteration, in tests that compare what is found with it."""
    return Random(f"{owner} {iteration}").randbytes(layout.payload_bytes)


def complete_copies(store: NodeStore) -> set[tuple[int, int]]:
    """Owner and iteration of every complete copy, each of which must verify and be exactly that owner's state."""
    found = set()
    for copy in store.inventory():
        if copy.state == COMPLETE:
            where = f"owner {copy.owner}, iteration {copy.iteration} in {copy.path}"
            assert store.verify(copy), f"{where} does not verify"
            header = read_header(copy.path)
            assert header is not None
            start, size = header.layout.payload_offset, header.layout.payload_bytes
            held = copy.path.read_bytes()[start : start + size]
            assert held == payload_of(copy.owner, copy.iteration, header.layout), f"{where} is another state"
            found.add((copy.owner, copy.iteration))
    return found


def assert_threads_end() -> None:
    """No thread of ours outlives a close; one that has done its work may still be on its last instruction."""
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("capricorn")]
    for thread in ours:
        thread.join(1.0)
    assert not [thread.name for thread in ours if thread.is_alive()]
