"""Staging against a plain copy of the same bytes between warm buffers."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.timing import interleaved, ratio
from capricorn.runtime.save.staging import CpuStager, payload_of
from capricorn.runtime.store.slot import Layout, Slot, checksum
from capricorn.systems.flat_state import FlatState
from capricorn.units import MIB

SHARD_BYTES = 90 * MIB
NUM_TENSORS = 60


def main() -> None:
    """Prints staging's rate as a fraction of the plain copy's, without and with checksums."""
    torch.set_num_threads(1)
    size = SHARD_BYTES // NUM_TENSORS // 4
    state = FlatState({f"t{index}": torch.randn(size) for index in range(NUM_TENSORS)})
    source, plain = torch.randn(SHARD_BYTES // 4), torch.empty(SHARD_BYTES // 4).fill_(0)
    with TemporaryDirectory(dir="/dev/shm") as folder:
        slot = Slot(Path(folder) / "slot", 0, Layout(state.num_bytes, MIB, state.digest))
        stager = CpuStager(state, [slot])

        def stage() -> None:
            for _ in stager.copy(slot):
                pass

        def stage_and_check() -> None:
            for index in stager.copy(slot):
                slot.table[index] = checksum(slot.payload[slot.layout.block(index)])

        durations = interleaved({"plain": lambda: plain.copy_(source), "staged": stage, "checked": stage_and_check})
        print(f"staging rate / plain copy rate: {ratio(durations['plain'], durations['staged'])}")
        print(f"the same with checksums:        {ratio(durations['plain'], durations['checked'])}")
        rate = payload_of(slot).numel() / min(durations["plain"])
        print(f"(plain copy at best: {rate / 1e9:.1f} GB/s)")
        stager.close()
