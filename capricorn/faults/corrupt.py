"""Damages what a checkpoint is restored from: copies in memory, files of the persistent tier, a block on the wire.

Always the same bit for the same fault, so that a run can be repeated.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Final

from capricorn.config.fault_kinds import PREVIOUS
from capricorn.config.fault_spec import FaultSpec
from capricorn.faults.persisted import checkpoints_in
from capricorn.records.job_file import Job
from capricorn.runtime.store.node_store import NodeStore
from capricorn.runtime.store.slot import COMPLETE, read_header
from capricorn.systems.interface import PacedRoute


def damage_copies(fault: FaultSpec, job: Job, rank: int) -> None:
    """Damages the newest complete copy of the rank's state: its own node's, or that of each other node that has one.

    Of the second-newest on its own node, the newer one is lost.
    """
    topology = job.scenario.topology
    own = topology.node_of(rank)
    is_local = fault.where != "replica"
    for node in range(topology.num_nodes):
        copies = _copies(job.node_dir(node), rank) if (node == own) == is_local else []
        if fault.where == PREVIOUS and copies:
            _cut_short(copies.pop(), range(0), fault)
        if copies and (header := read_header(copies[-1])) is not None:
            first = header.layout.payload_offset
            _DAMAGES[fault.kind](copies[-1], range(first, first + header.layout.payload_bytes), fault)


def damage_files(fault: FaultSpec, folder: Path) -> None:
    """Damages the largest file of the newest complete checkpoint there, in its middle."""
    for newest in checkpoints_in(folder)[-1:]:
        files = [path for path in newest.rglob("*") if path.is_file()]
        largest = max(files, key=lambda path: path.stat().st_size)
        middle = largest.stat().st_size // 2
        _DAMAGES[fault.kind](largest, range(middle, middle + 1), fault)


def _copies(folder: Path, owner: int) -> list[Path]:
    """Returns the complete copies of an owner's state there, the newest last."""
    copies = [copy for copy in NodeStore.open(folder).inventory() if copy.owner == owner and copy.state == COMPLETE]
    return [copy.path for copy in sorted(copies, key=lambda copy: copy.iteration)]


def _flip_bit(path: Path, places: range, fault: FaultSpec) -> None:
    place = _random(fault).choice(places)
    with path.open("r+b", buffering=0) as file:
        (byte,) = os.pread(file.fileno(), 1, place)
        os.pwrite(file.fileno(), bytes([byte ^ 1 << _random(fault).randrange(8)]), place)


def _cut_short(path: Path, places: range, fault: FaultSpec) -> None:
    os.truncate(path, path.stat().st_size // 2)


_DAMAGES: Final[Mapping[str, Callable[[Path, range, FaultSpec], None]]] = MappingProxyType({
    "corrupt": _flip_bit, "truncate": _cut_short,
})  # fmt: skip


def _random(fault: FaultSpec) -> Random:
    return Random(f"{fault.kind}-{fault.where}-{fault.rank}-{fault.iteration}")


class LossyRoutes:
    """Damages one piece, and only one, of what this rank sends to its peers, once it was told to."""

    def __init__(self) -> None:
        self._fault: FaultSpec | None = None

    def damage_next(self, fault: FaultSpec) -> None:
        """Lets the next piece that leaves have a bit flipped."""
        self._fault = fault

    def routes(self, routes: Mapping[int, PacedRoute], peers: list[int]) -> dict[int, PacedRoute]:
        """Returns by rank the way there on which a piece may be damaged; one without a model takes no time."""
        return {peer: LossyRoute(self, routes.get(peer)) for peer in peers}

    def take(self, piece: memoryview) -> memoryview:
        """Returns the piece, or a damaged copy of it."""
        fault, self._fault = self._fault, None
        if fault is None or not len(piece):
            return piece
        damaged, random = bytearray(piece), _random(fault)
        damaged[random.randrange(len(damaged))] ^= 1 << random.randrange(8)
        return memoryview(damaged)


class LossyRoute:
    """A route that may damage what passes."""

    def __init__(self, all_routes: LossyRoutes, route: PacedRoute | None) -> None:
        self._all_routes, self._route = all_routes, route

    def pieces(self, view: memoryview, *, low: bool = False) -> Iterator[memoryview]:
        pieces = iter((view,)) if self._route is None else self._route.pieces(view, low=low)
        return map(self._all_routes.take, pieces)
