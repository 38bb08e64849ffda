"""How much of this machine's CPU a run takes, and how much others take meanwhile."""

from __future__ import annotations

import os
import time
from typing import Any

import psutil

from capricorn.records.samples import CpuSample
from capricorn.units import Seconds

INTERVAL_S: Seconds = 1.0
"""Between two looks; what a process does after the last look at it is counted as that of others."""


class CpuMeter:
    """Sums the CPU time of this process and all its descendants, and that of the machine, while a run trains."""

    def __init__(self) -> None:
        self._looked_at_s = 0.0
        self._duration_s = self._ours_s = self._busy_s = 0.0
        self._processes: dict[int, Seconds] = {}
        self._machine_s: Seconds | None = None

    def tick(self, *, is_training: bool) -> None:
        """Looks when it is time to."""
        now = time.monotonic()
        if not is_training or now - self._looked_at_s < INTERVAL_S:
            return
        processes, machine_s = _processes(), _busy()
        if self._machine_s is not None:
            self._duration_s += now - self._looked_at_s
            self._busy_s += machine_s - self._machine_s
            self._ours_s += sum(used_s - self._processes.get(pid, 0.0) for pid, used_s in processes.items())
        self._looked_at_s, self._processes, self._machine_s = now, processes, machine_s

    def sample(self) -> CpuSample:
        """Returns what was seen so far."""
        others_s = max(0.0, self._busy_s - self._ours_s)
        return CpuSample(duration_s=self._duration_s, ours_s=self._ours_s, others_s=others_s)


def _processes() -> dict[int, Seconds]:
    """Returns the CPU time of this process and its descendants, by pid."""
    used = {}
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        used[process.pid] = times.user + times.system
    return used


def _busy() -> Seconds:
    """Returns the CPU time that the cores we may use have spent on anything."""
    cores = psutil.cpu_times(percpu=True)
    return float(sum(map(_used, (core for number, core in enumerate(cores) if number in os.sched_getaffinity(0)))))


def _used(times: Any) -> Seconds:
    idle: Seconds = times.idle + times.iowait + getattr(times, "guest", 0.0) + getattr(times, "steal", 0.0)
    return float(sum(times)) - idle
