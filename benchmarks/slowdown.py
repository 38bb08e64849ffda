"""The slowdown of `capricorn` against `none` on mixtral-small, live, next to what the bytes cost the CPU at least."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import threading
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch

from benchmarks.timing import ratio
from capricorn.process import PYTHON
from capricorn.runtime.store.slot import checksum
from capricorn.units import MIB

ROUNDS = 6
ITERATIONS = 30
SETTINGS = ("--model", "mixtral-small", "--iterations", str(ITERATIONS), "--warmup", "8", "--json")


def _run(system: str, out: str) -> dict[str, Any]:
    command = [*PYTHON, "capricorn.cli", "run", "--system", system, "--out", out, *SETTINGS]
    record: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    summary: dict[str, Any] = record["summary"]
    return summary


def _cpu_seconds_per_byte() -> float:
    """CPU time to copy, checksum, send, receive and checksum each byte once, in the blocks the runtime uses."""
    size = 256 * MIB
    source, place = torch.zeros(size, dtype=torch.uint8).fill_(1), bytearray(size)
    staged = torch.frombuffer(place, dtype=torch.uint8)
    received = memoryview(bytearray(size))
    listener = socket.create_server(("127.0.0.1", 0))
    sender = socket.create_connection(listener.getsockname())
    receiver, _ = listener.accept()

    def receive() -> None:
        for offset in range(0, size, MIB):
            block = received[offset : offset + MIB]
            filled = 0
            while filled < MIB:
                filled += receiver.recv_into(block[filled:], 0, socket.MSG_WAITALL)
            checksum(block)

    def once() -> float:
        begin = resource.getrusage(resource.RUSAGE_SELF)
        thread = threading.Thread(target=receive)
        thread.start()
        for offset in range(0, size, MIB):
            staged[offset : offset + MIB].copy_(source[offset : offset + MIB])
            block = memoryview(place)[offset : offset + MIB]
            checksum(block)
            sender.sendall(block)
        thread.join()
        end = resource.getrusage(resource.RUSAGE_SELF)
        return end.ru_utime - begin.ru_utime + end.ru_stime - begin.ru_stime

    cost_s = median([once() for _ in range(5)][1:]) / size
    for sock in (sender, receiver, listener):
        sock.close()
    return cost_s


def main() -> None:
    """Prints slowdown, stall and the floor."""
    torch.set_num_threads(1)
    times: dict[str, list[float]] = {"none": [], "capricorn": []}
    stalls, sent_bytes = [], 0
    with TemporaryDirectory() as out:
        for count in range(ROUNDS):
            for system in ("none", "capricorn") if count % 2 else ("capricorn", "none"):
                summary = _run(system, out)
                times[system].append(summary["iteration_s_p50"])
                if system == "capricorn":
                    stalls.append(summary["stall_s_p50"])
                    sent_bytes = summary["sent_bytes"]
        assert len(list(Path(out).iterdir())) == 2 * ROUNDS
    none_s = median(times["none"])
    floor_s = sent_bytes / ITERATIONS * _cpu_seconds_per_byte() / (psutil.cpu_count() or 1)
    print(f"iteration time capricorn / none: {ratio(times['capricorn'], times['none'])} over {ROUNDS} rounds")
    print(f"none {none_s * 1e3:.0f} ms; stall p50 {median(stalls) * 1e3:.2f} ms")
    print(f"CPU floor, were no core ever idle: {1 + floor_s / none_s:.3f} ({floor_s * 1e3:.0f} ms an iteration)")
