"""What only a GPU shows: staging from its memory, its copies beside kernels, times by events, sums that repeat."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from benchmarks.timing import interleaved, ratio
from capricorn.config.scenario import CUDA_BLOCK_BYTES
from capricorn.runtime.deadline import Deadline
from capricorn.runtime.save.staging import make_stager, payload_of
from capricorn.runtime.save.staging_team import StagingTeam
from capricorn.runtime.schedule.op_clock import CudaClock
from capricorn.runtime.store.slot import Layout, Slot, checksum
from capricorn.systems.flat_state import FlatState
from capricorn.trainer.device_setup import set_up_device
from capricorn.units import GIB

SHARD_BYTES, NUM_TENSORS, ROUNDS = 2 * GIB, 64, 5
THREADS = (1, 2, 4)
SIZE = 8192
"""Rows and columns of the matrices that keep the GPU busy."""


def main() -> None:
    """Prints a line for each figure; ends the process with a message where there is no GPU."""
    if not torch.cuda.is_available():
        sys.exit("error: this benchmark needs a GPU, and torch finds none here; run it on a machine with one")
    device = set_up_device("cuda", 0)
    _clock(device)
    _sums(device)
    with TemporaryDirectory(dir="/dev/shm") as folder:
        _staging(Path(folder) / "slot", device)


def _busy(matrix: torch.Tensor) -> torch.Tensor:
    for _ in range(8):
        matrix = matrix @ matrix
    return matrix


def _clock(device: torch.device) -> None:
    """Prints when products are launched and when they have run."""
    matrix, times, clock = torch.randn(SIZE, SIZE, device=device) / SIZE, dict[str, float](), CudaClock(device)
    _busy(matrix)
    torch.cuda.synchronize()
    begin_s = time.perf_counter()
    clock.at(lambda now_s: times.__setitem__("begin", now_s))
    _busy(matrix)
    launched_s = time.perf_counter() - begin_s
    clock.at(lambda now_s: times.__setitem__("end", now_s))
    clock.settle()
    clock.close()
    ran_s = times["end"] - begin_s
    print(f"eight products of {SIZE}: launched in {launched_s * 1e3:.2f} ms, done by events in {ran_s * 1e3:.2f} ms")


def _sums(device: torch.device) -> None:
    """Prints whether products and scattered sums repeat bit for bit."""
    torch.manual_seed(0)
    a, index = torch.randn(4096, 4096, device=device), torch.randint(0, 512, (4096,), device=device)
    results = [(a @ a, torch.zeros(512, 4096, device=device).index_add_(0, index, a)) for _ in range(5)]
    repeats = all(torch.equal(x, y) for result in results for x, y in zip(result, results[0], strict=True))
    print(f"products and scattered sums repeat bit for bit: {'yes' if repeats else 'NO'}")


def _staging(path: Path, device: torch.device) -> None:
    """Prints the rate of staging with checksums, by threads, and what it costs kernels that run beside it."""
    size = SHARD_BYTES // NUM_TENSORS // 4
    state = FlatState({f"t{index}": torch.randn(size, device=device) for index in range(NUM_TENSORS)})
    begin_s = time.perf_counter()
    slot = Slot(path, 0, Layout(state.num_bytes, CUDA_BLOCK_BYTES, state.digest))
    made_s = time.perf_counter()
    stager = make_stager(state, [slot], device)
    pinned_s = time.perf_counter()
    rates = [SHARD_BYTES / duration_s / 1e9 for duration_s in (made_s - begin_s, pinned_s - made_s)]
    print(f"a slot of 2 GiB: made at {rates[0]:.1f} GB/s, pinned at {rates[1]:.1f} GB/s")
    teams = {count: StagingTeam(count) for count in THREADS}

    def stage(count: int, *, checked: bool = True) -> None:
        stager.mark()
        pieces = stager.pieces(slot)

        def work() -> None:
            for index in stager.copy(pieces):
                if checked:
                    slot.table[index] = checksum(slot.payload[slot.layout.block(index)])

        teams[count].run(work)

    works = {f"{count} threads": lambda count=count: stage(count) for count in THREADS}
    durations = interleaved(works | {"copies alone": lambda: stage(1, checked=False)}, ROUNDS)
    for name, durations_s in durations.items():
        print(f"staging 2 GiB, {name}: {SHARD_BYTES / median(durations_s) / 1e9:.1f} GB/s")
    matrix = torch.randn(SIZE, SIZE, device=device) / SIZE

    def kernels() -> None:
        _busy(matrix)
        torch.cuda.synchronize()

    def beside() -> None:
        _busy(matrix)
        stage(1)
        torch.cuda.synchronize()

    both = interleaved({"kernels": kernels, "beside": beside, "staging": lambda: stage(1)}, ROUNDS)
    alone_s = [max(pair) for pair in zip(both["kernels"], both["staging"], strict=True)]
    print(f"kernels and staging at once / the longer of them alone: {ratio(both['beside'], alone_s)}")
    payload_B = payload_of(slot)
    equal = all(torch.equal(run.view(payload_B), run.source.cpu()) for run in state.runs)
    print(f"what was staged is what the GPU holds: {'yes' if equal else 'NO'}")
    for team in teams.values():
        team.close(Deadline(10.0))
    stager.close()
    slot.close()
