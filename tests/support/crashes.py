"""Stores whose writers are killed right before any one of their changes:

`python -m tests.support.crashes SUBJECT EVERY`.

Each crash point is a child process that ends by SIGKILL there; then what it left is judged, and written on. All in a
process that has not imported torch, as forking it takes a millisecond. Prints the number of points and the complaints.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from capricorn.errors import TransportError
from capricorn.runtime.comm.handshake import Identity
from capricorn.runtime.comm.replica_link import ReplicaLink
from capricorn.runtime.comm.replica_server import ReplicaServer
from capricorn.runtime.store.node_store import NodeStore
from capricorn.runtime.store.slot import Slot
from tests.support.crashing import (
    HEADER_BYTES,
    HOLDER,
    LAYOUT,
    OWNER,
    OWNERS,
    Ground,
    Report,
    complaint,
    crash_point,
    ends_killed,
    fill,
    fresh,
    killed_at,
    start,
    stop,
    tear_at,
)
from tests.support.replicas import complete_copies

LAST, ABORTED, ROLLED_BACK = 6, (OWNER, 3), 4
ME = Identity("run", 0, b"secret")

# --- one process that writes the slots of two owners


def write(folder: Path, report: Report, last: int = LAST) -> None:
    """What a rank does from its start on: goes on from the newest iteration that all owners have."""
    with closing(NodeStore.open(folder)) as store:
        for owner in OWNERS:
            store.open_slots(owner, LAYOUT)
            store.write_manifest(owner, "{}")
        keep = max([0, *set.intersection(*(set(store.iterations(owner)) for owner in OWNERS))])
        store.forget_after(keep)
        for iteration in range(keep + 1, last + 1):
            if sum(save(store, owner, iteration, keep) for owner in OWNERS) == len(OWNERS):
                keep = iteration
                report(keep)
            if iteration == ROLLED_BACK:  # and one owner is further by then
                save(store, HOLDER, iteration + 1, keep)
                store.forget_after(keep)


def save(store: NodeStore, owner: int, iteration: int, keep: int) -> bool:
    """Whether it became complete."""
    slot = store.begin(owner, iteration, keep)
    fill(slot, owner, iteration)
    if (owner, iteration) == ABORTED:
        store.abort(slot)
    else:
        store.commit(slot)
    return (owner, iteration) != ABORTED


def judge_store(ground: Ground) -> None:
    """All that is complete is exact, what was reported is there, and a new writer goes on."""
    with closing(NodeStore.open(ground.nodes[0])) as store:
        held = complete_copies(store)
    reported = ground.reported
    missing = {(owner, reported) for owner in OWNERS if reported} - held
    assert not missing, f"iteration {reported} was complete everywhere; lost: {missing}"
    write(ground.nodes[0], ground.report, last=max(reported, ABORTED[1]) + 2)
    assert ground.reported == max(reported, ABORTED[1]) + 2
    with closing(NodeStore.open(ground.nodes[0])) as store:
        assert {(owner, ground.reported) for owner in OWNERS} <= complete_copies(store)


def write_torn(ground: Ground, number: int, cut: int) -> None:
    tear_at(number, cut)
    write(ground.nodes[0], ground.report)


def killed_writers(root: Path, every: int) -> Iterator[str]:
    """A writer that is killed before any of its changes."""
    for number in count(0, every):
        ground = Ground(fresh(root))
        is_killed = ends_killed(start(killed_at, number, write, ground.nodes[0], ground.report))
        yield complaint(f"killed before call {number}", judge_store, ground)
        if not is_killed:
            return


def torn_headers(root: Path, every: int) -> Iterator[str]:
    """A writer that is killed within any header, at any byte."""
    point = 0
    for number in count():
        for cut in range(1, HEADER_BYTES + 1):
            point += 1
            if point % every:
                continue
            ground = Ground(fresh(root))
            is_killed = ends_killed(start(write_torn, ground, number, cut))
            yield complaint(f"header {number} torn at byte {cut}", judge_store, ground)
            if not is_killed:
                return


# --- an owner and its holder, each a process of its own


def serve(folder: Path, port: int) -> None:
    """A holder, until it is killed; writes its port into the descriptor."""
    store = NodeStore.open(folder)
    store.open_slots(OWNER, LAYOUT)
    server = ReplicaServer(ME, HOLDER, "127.0.0.1", store, timeout_s=5.0, idle_priority=False)
    server.start({OWNER: LAYOUT})
    os.write(port, f"{server.address[1]}".encode())
    signal.pause()


def start_holder(folder: Path, number: int | None = None) -> tuple[int, int | None]:
    """The process and the port on which it listens, unless it was killed before; with a number at that crash point."""
    reading, writing = os.pipe()
    child = start(serve, folder, writing) if number is None else start(killed_at, number, serve, folder, writing)
    os.close(writing)
    port = os.read(reading, 100)
    os.close(reading)
    return child, int(port) if port else None


def link_to(port: int) -> ReplicaLink:
    address = ("127.0.0.1", port)
    return ReplicaLink(ME, OWNER, HOLDER, address, timeout_s=5.0, low_class=False, send_buffer_bytes=65536)


def settle(port: int) -> None:
    """Returns once the holder has done with what a killed owner had said: it ends one connection to begin another."""
    with closing(link_to(port)) as link:
        link.connect("{}")
        with suppress(TransportError):  # it answers what makes no sense by ending this one, too
            link.commit(0)


def replicate(ground: Ground, port: int, last: int) -> None:
    """What an owner does from its start on; a save that fails ends neither it nor those that follow."""
    link = link_to(port)
    with closing(NodeStore.open(ground.nodes[OWNER])) as store, closing(link):
        store.open_slots(OWNER, LAYOUT)
        store.write_manifest(OWNER, "{}")
        link.connect("{}")
        keep = newest(ground)
        if keep and store.read(OWNER, keep) is None:
            link.fetch(keep, store.begin(OWNER, keep, keep=0))
        store.forget_after(keep)
        for iteration in range(keep + 1, last + 1):
            slot = store.begin(OWNER, iteration, keep)
            fill(slot, OWNER, iteration)
            store.commit(slot)
            try:
                send(link, slot, iteration, keep)
            except TransportError:
                continue
            keep = iteration
            ground.report(keep)


def send(link: ReplicaLink, slot: Slot, iteration: int, keep: int) -> None:
    crash_point("send")
    link.begin(iteration, keep)
    for start_ in range(0, LAYOUT.payload_bytes, 100):
        crash_point("send")
        link.send_range(iteration, slot, start_, start_ + 100)
    crash_point("send")
    link.commit(iteration)


def newest(ground: Ground) -> int:
    """The newest iteration of which a copy of the owner survives, on either node."""
    return max([0, *(iteration for owner, iteration in held_on(ground, HOLDER) | held_on(ground, OWNER))])


def held_on(ground: Ground, node: int) -> set[tuple[int, int]]:
    with closing(NodeStore.open(ground.nodes[node])) as store:
        return complete_copies(store)


def judge_pair(ground: Ground, holder: tuple[int, int | None], *, is_lost: bool) -> None:
    """Both copies of what was reported are there; the owner starts again, also on an empty node, and goes on."""
    child, port = holder
    assert port is not None
    try:
        settle(port)
        reported = ground.reported
        for node in OWNERS:
            held = held_on(ground, node)
            assert not reported or (OWNER, reported) in held, f"node {node} lost iteration {reported}, it has {held}"
        if is_lost:
            ground.make(OWNER)
        last = newest(ground) + 2
        assert not ends_killed(start(replicate, ground, port, last))
    finally:
        stop(child)
    assert ground.reported == last
    for node in OWNERS:
        assert (OWNER, last) in held_on(ground, node)


def killed_owners(root: Path, every: int, *, is_lost: bool) -> Iterator[str]:
    """An owner that is killed before any of its changes or sends, while its holder lives on."""
    for number in count(0, every):
        ground = Ground(fresh(root))
        holder = start_holder(ground.nodes[HOLDER])
        assert holder[1] is not None
        is_killed = ends_killed(start(killed_at, number, replicate, ground, holder[1], LAST))
        yield complaint(f"owner killed before call {number}", judge_pair, ground, holder, is_lost=is_lost)
        if not is_killed:
            return


def killed_holders(root: Path, every: int) -> Iterator[str]:
    """A holder that is killed before any of its changes, while the owner lives on."""
    for number in count(0, every):
        ground = Ground(fresh(root))
        child, port = start_holder(ground.nodes[HOLDER], number)
        if port is not None:
            assert not ends_killed(start(survive, ground, port))
        was_there = stop(child)
        again = start_holder(ground.nodes[HOLDER])
        yield complaint(f"holder killed before call {number}", judge_pair, ground, again, is_lost=False)
        if was_there:
            return


def survive(ground: Ground, port: int) -> None:
    """An owner whose holder may be gone from the very start."""
    try:
        replicate(ground, port, LAST)
    except TransportError:
        return


# --- all of them


SUBJECTS: dict[str, Callable[[Path, int], Iterator[str]]] = {
    "writers": killed_writers,
    "headers": torn_headers,
    "owners": lambda root, every: killed_owners(root, every, is_lost=False),
    "lost-owners": lambda root, every: killed_owners(root, every, is_lost=True),
    "holders": killed_holders,
}


def main() -> None:
    """Judges every so many-th crash point of a subject."""
    with TemporaryDirectory(dir="/dev/shm", prefix="crashes-") as root:
        verdicts = list(SUBJECTS[sys.argv[1]](Path(root), int(sys.argv[2])))
    print(json.dumps({"points": len(verdicts), "complaints": [verdict for verdict in verdicts if verdict]}))


if __name__ == "__main__":
    main()
