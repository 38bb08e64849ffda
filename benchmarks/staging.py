"""Staging against a plain copy of the same bytes between warm buffers, and two staging threads against one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from benchmarks.timing import interleaved, ratio
from capricorn.runtime.deadline import Deadline
from capricorn.runtime.save.staging import CpuStager, Piece, payload_of
from capricorn.runtime.save.staging_team import StagingTeam
from capricorn.runtime.store.slot import Layout, Slot, checksum
from capricorn.systems.flat_state import FlatState
from capricorn.units import KIB, MIB

SHARD_BYTES = 90 * MIB
NUM_TENSORS = 60
LARGE_SHARD_BYTES = 1024 * MIB
BLOCK_BYTES = 256 * KIB


def main() -> None:
    """Prints staging's rate as a fraction of the plain copy's, without and with checksums, and what threads add."""
    torch.set_num_threads(1)
    with TemporaryDirectory(dir="/dev/shm") as folder:
        _against_plain_copy(_Staging(Path(folder) / "slot", SHARD_BYTES, MIB))
    with TemporaryDirectory(dir="/dev/shm") as folder:
        _by_threads(_Staging(Path(folder) / "slot", LARGE_SHARD_BYTES, BLOCK_BYTES))


class _Staging:
    """A state and a slot for it."""

    def __init__(self, path: Path, num_bytes: int, block_bytes: int) -> None:
        size = num_bytes // NUM_TENSORS // 4
        state = FlatState({f"t{index}": torch.randn(size) for index in range(NUM_TENSORS)})
        self.slot = Slot(path, 0, Layout(state.num_bytes, block_bytes, state.digest))
        self.stager = CpuStager(state, [self.slot])

    def copy(self, pieces: Iterator[Piece]) -> None:
        for _ in self.stager.copy(pieces):
            pass

    def copy_and_check(self, pieces: Iterator[Piece]) -> None:
        slot = self.slot
        for index in self.stager.copy(pieces):
            slot.table[index] = checksum(slot.payload[slot.layout.block(index)])

    def check(self, pieces: Iterator[Piece]) -> None:
        slot = self.slot
        for index in (index for piece in pieces for index in piece.blocks):
            slot.table[index] = checksum(slot.payload[slot.layout.block(index)])

    def by(self, team: StagingTeam, work: Callable[[Iterator[Piece]], None]) -> Callable[[], None]:
        """Returns what stages the state once, by a team."""

        def stage() -> None:
            pieces = self.stager.pieces(self.slot)
            team.run(lambda: work(pieces))

        return stage

    def close(self) -> None:
        self.stager.close()
        self.slot.close()


def _against_plain_copy(staging: _Staging) -> None:
    source, plain = torch.randn(SHARD_BYTES // 4), torch.empty(SHARD_BYTES // 4).fill_(0)
    alone = StagingTeam(1)
    durations = interleaved(
        {
            "plain": lambda: plain.copy_(source),
            "staged": staging.by(alone, staging.copy),
            "checked": staging.by(alone, staging.copy_and_check),
        }
    )
    print(f"staging rate / plain copy rate: {ratio(durations['plain'], durations['staged'])}")
    print(f"the same with checksums:        {ratio(durations['plain'], durations['checked'])}")
    rate = payload_of(staging.slot).numel() / min(durations["plain"])
    print(f"(plain copy at best: {rate / 1e9:.1f} GB/s)")
    staging.close()


def _by_threads(staging: _Staging) -> None:
    """Prints what a second thread adds to staging, and to each half of it alone."""
    one, two = StagingTeam(1), StagingTeam(2)
    works = {"staging": staging.copy_and_check, "copies alone": staging.copy, "checksums alone": staging.check}
    teams = {"one": one, "two": two}
    durations = interleaved(
        {f"{name} {count}": staging.by(team, work) for name, work in works.items() for count, team in teams.items()}
    )
    rates = [LARGE_SHARD_BYTES / median(durations[f"staging {count}"]) / 1e9 for count in teams]
    print(f"1 GiB staged with checksums by one thread: {rates[0]:.1f} GB/s, by two: {rates[1]:.1f} GB/s")
    for name in works:
        print(f"two threads / one, {name}: {ratio(durations[f'{name} one'], durations[f'{name} two'])}")
    two.close(Deadline(10.0))
    staging.close()
