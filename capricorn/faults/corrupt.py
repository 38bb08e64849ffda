"""Damages what a checkpoint is restored from: copies in memory stores, files of the slow tier, a block on the wire.

Always the same bit for the same failure, so that a run can be repeated.
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
"""What makes a folder of the slow tier a checkpoint."""


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


class Wire:
    """Damages one piece, and only one, of what this rank sends to its peers, once it was told to."""

    def __init__(self) -> None:
        self._fault: FaultSpec | None = None

    def damage_next(self, fault: FaultSpec) -> None:
        """The next piece that leaves has a bit flipped."""
        self._fault = fault

    def routes(self, routes: Mapping[int, PacedRoute], peers: list[int]) -> dict[int, PacedRoute]:
        """By rank the way there that it may be damaged on; where there was no model of one it takes no time."""
        return {peer: _Damaging(self, routes.get(peer)) for peer in peers}

    def take(self, piece: memoryview) -> memoryview:
        """The piece, or a damaged copy of it."""
        fault, self._fault = self._fault, None
        if fault is None or not len(piece):
            return piece
        damaged, random = bytearray(piece), _random(fault)
        damaged[random.randrange(len(damaged))] ^= 1 << random.randrange(8)
        return memoryview(damaged)


class _Damaging:
    """A route that may damage what passes."""

    def __init__(self, wire: Wire, route: PacedRoute | None) -> None:
        self._wire, self._route = wire, route

    def pieces(self, view: memoryview, *, low: bool = False) -> Iterator[memoryview]:
        pieces = iter((view,)) if self._route is None else self._route.pieces(view, low=low)
        return map(self._wire.take, pieces)
