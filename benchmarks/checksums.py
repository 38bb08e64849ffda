"""What checksums cost: seconds of one core per gigabyte."""

from __future__ import annotations

import os
from statistics import median

from benchmarks.timing import interleaved
from capricorn.runtime.store.slot import checksum
from capricorn.units import MIB

SIZE = 256 * MIB


def main() -> None:
    """Prints the cost for blocks that are cold and for one that is in the cache."""
    data = memoryview(bytearray(os.urandom(MIB)) * (SIZE // MIB))

    def cold() -> None:
        for offset in range(0, SIZE, MIB):
            checksum(data[offset : offset + MIB])

    def warm() -> None:
        for _ in range(0, SIZE, MIB):
            checksum(data[:MIB])

    for name, durations in interleaved({"from memory": cold, "from cache": warm}).items():
        print(f"xxh3 of 1 MiB blocks {name}: {median(durations) / SIZE * 1e9:.3f} s of one core per GB")
