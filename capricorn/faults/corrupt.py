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

from capricorn.config.fault_spec import FaultSpec
from capricorn.records.job_file import Job
from capricorn.runtime.store.node_store import NodeStore
from capricorn.runtime.store.slot import COMPLETE, read_header
from capricorn.systems.interface import PacedRoute

MANIFESTS: Final = ("commit.json", "capricorn.json")
"""What makes a folder of the persistent tier a checkpoint."""


def damage_copies(fault: FaultSpec, job: Job, rank: int) -> None:
    """Damages the newest complete copy of the rank's state: its own node's, or that of each other node that has one."""
    topology = job.scenario.topology
    own = topology.node_of(rank)
    for node in range(topology.num_nodes):
        path = _newest_copy(job.node_dir(node), rank) if (node == own) == (fault.where == "slot") else None
        header = read_header(path) if path is not None else None
        if path is not None and header is not None:
            layout = header.layout
            _DAMAGES[fault.kind](
                path, range(layout.payload_offset, layout.payload_offset + layout.payload_bytes), fault
            )


def damage_files(fault: FaultSpec, folder: Path) -> None:
    """Damages the largest file of the newest complete checkpoint there, in its middle."""
    complete = [path for path in folder.glob("iteration-*") if any((path / name).exists() for name in MANIFESTS)]
    newest = max(complete, default=folder)
    files = [path for path in newest.rglob("*") if newest != folder and path.is_file()]
    if files:
        largest = max(files, key=lambda path: path.stat().st_size)
        middle = largest.stat().st_size // 2
        _DAMAGES[fault.kind](largest, range(middle, middle + 1), fault)


def _newest_copy(folder: Path, owner: int) -> Path | None:
    copies = [copy for copy in NodeStore.open(folder).inventory() if copy.owner == owner and copy.state == COMPLETE]
    return max(copies, key=lambda copy: copy.iteration).path if copies else None


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
