"""Which processes run the ranks: each worker writes down itself and its node's agent, for faults that hit others."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import NamedTuple, Self

import psutil

from capricorn.process import start_ticks
from capricorn.records.job_file import WORKERS


class ProcessName(NamedTuple):
    """A process as long as it lives: its id may be given to somebody else later.

    Written as `PID TICKS`, and holds whatever happens to the clock of the machine.
    """

    pid: int
    ticks: int
    """When it started, as `start_ticks` says."""

    def __str__(self) -> str:
        return f"{self.pid} {self.ticks}"

    @classmethod
    def of(cls, pid: int) -> Self:
        return cls(pid, start_ticks(pid))

    def find(self) -> psutil.Process | None:
        """Returns the process, or None once it has ended."""
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            process = psutil.Process(self.pid)
            return process if start_ticks(self.pid) == self.ticks else None
        return None

    def parent(self) -> ProcessName | None:
        """Returns the process that it comes from, or None once either has ended."""
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if (process := self.find()) is not None:
                return ProcessName.of(process.ppid())
        return None

    def send(self, number: signal.Signals) -> None:
        """Sends the signal, if the process is still there."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if (process := self.find()) is not None:
                process.send_signal(number)


class Registered(NamedTuple):
    """The processes of a rank."""

    worker: ProcessName
    agent: ProcessName


def register_worker(run_dir: Path, rank: int) -> None:
    """Notes this process as the one that runs `rank`, and its parent as the agent of its node."""
    folder = run_dir / WORKERS
    folder.mkdir(exist_ok=True)
    names = ProcessName.of(os.getpid()), ProcessName.of(os.getppid())
    unfinished = folder / f".{rank}"  # whoever reads it meanwhile finds the one before or this one, never a part
    unfinished.write_text(" ".join(map(str, names)))
    unfinished.replace(folder / str(rank))


def registered(run_dir: Path, rank: int) -> Registered | None:
    """Returns the newest processes of that rank; None if it never started."""
    try:
        numbers = map(int, (run_dir / WORKERS / str(rank)).read_text().split())
    except FileNotFoundError:
        return None
    worker, worker_ticks, agent, agent_ticks = numbers
    return Registered(ProcessName(worker, worker_ticks), ProcessName(agent, agent_ticks))


def processes_below(pid: int) -> list[ProcessName]:
    """Returns all processes that come from that one, except this process."""
    names = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):  # it has just ended
            names.append(ProcessName.of(process.pid))
    return [name for name in names if name.pid != os.getpid()]
