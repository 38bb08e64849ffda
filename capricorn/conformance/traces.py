"""What a process holds besides what it had before: threads, child processes, sockets, files of a temporary kind."""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

from capricorn.process import AwakeClock
from capricorn.units import Seconds

INTERVAL_S: Final[Seconds] = 0.02
MAX_GAP_S: Final[Seconds] = 1.0


def polls(deadline_s: Seconds) -> Iterator[None]:
    """Yields again and again until the deadline, by a clock that stands still while this process does."""
    awake = AwakeClock(MAX_GAP_S)
    while awake() < deadline_s:
        yield
        time.sleep(INTERVAL_S)


@dataclass
class Traces:
    """Remembers what this process has when this is made, and finds what has been added since."""

    num_threads: int = field(default_factory=lambda: len(os.listdir("/proc/self/task")))
    children: frozenset[psutil.Process] = field(default_factory=lambda: frozenset(children_of(os.getpid())))
    sockets: frozenset[str] = field(default_factory=lambda: _sockets())
    files: frozenset[Path] = field(default_factory=lambda: _temporary_files())

    def left(self, deadline_s: Seconds) -> list[str]:
        """Says what has been added and does not go away by itself, each in words."""
        gc.collect()  # what waits only for the collector is not left
        for _ in polls(deadline_s):
            if not (found := self._found()):
                break
        return found

    def _found(self) -> list[str]:
        more = len(os.listdir("/proc/self/task")) - self.num_threads
        names = ", ".join(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
        threads = [f"{more} more threads (Python's: {names or 'none'})"] if more > 0 else []
        sockets = [f"an open {name}" for name in sorted(_sockets() - self.sockets)]
        children = list(map(describe, {*children_of(os.getpid())} - self.children))
        files = [f"file {path}" for path in sorted(_temporary_files() - self.files)]
        return [*threads, *sockets, *children, *files]


def children_of(pid: int) -> list[psutil.Process]:
    """Living descendants of a process; Python's tracker of shared memory, which ends with it, is none."""
    return [
        child
        for child in psutil.Process(pid).children(recursive=True)
        if (command := _command(child)) and "resource_tracker" not in command
    ]


def describe(process: psutil.Process) -> str:
    """Says which process it is."""
    return f"process {process.pid}: {_command(process)}"


def _command(process: psutil.Process) -> str:
    """Its command line; empty if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def _sockets() -> frozenset[str]:
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return frozenset(name for name in found if name.startswith("socket:"))


def _temporary_files() -> frozenset[Path]:
    shared = (path for path in Path("/dev/shm").iterdir() if str(os.getpid()) in path.name)
    return frozenset([*shared, *files_in(Path(tempfile.gettempdir()))])


def files_in(folder: Path) -> list[Path]:
    """What lies in a folder for temporary files, but for what an import of torch and Python's own sockets need."""
    return [path for path in folder.iterdir() if not path.name.startswith(("torchin", "pymp"))]
