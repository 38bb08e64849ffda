"""Another run on the same machine: its stores come and go as fast as they can, or it trains beside the one under test.

Run as `python -m capricorn.faults.neighbour LOCK stores|job ROOT RUNS`: the launcher's lock, the folder of the memory
stores, and a folder for the records of a second job.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Final

from capricorn.faults.launcher_watch import LauncherWatch
from capricorn.process import PYTHON, end_child
from capricorn.runtime.store.node_store import NodeStore, RunLock
from capricorn.topology import Topology
from capricorn.units import Seconds

RUNS: Final = "neighbour"
"""Of a run folder: where a second job leaves its records."""
POLL_S: Final = 0.02
PAUSE_S: Final = 0.002
"""Between two stores, so that one core is not all theirs."""
TRAINS_TIMEOUT_S: Final[Seconds] = 20.0
"""How long a second job may take to begin: less than a rank waits for another one."""
END_TIMEOUT_S: Final[Seconds] = 4.0
JOB: Final = (
    "run", "--model", "mixtral-tiny", "--device", "cpu", "--iterations", "400", "--warmup", "0", "--quiet",
)  # fmt: skip


def main() -> None:
    """Is a neighbour until it is told to end, or the launcher is gone."""
    lock, place, root, runs = sys.argv[1:]
    NEIGHBOURS[place](LauncherWatch(lock), Path(root), Path(runs))


def _ready() -> None:
    print("ready", flush=True)


def _churn(watch: LauncherWatch, root: Path, runs: Path) -> None:
    """Makes the stores of one run after the other, each of two nodes, and removes them at once."""
    for number in count():
        run_id = f"neighbour-{os.getpid()}-{number}"
        lock = RunLock(root, run_id)
        for node in range(2):
            NodeStore.create(lock.folder / f"node{node}", run_id, node, Topology(2, 1))
        lock.release(keep=False)
        if not number:
            _ready()
        if not watch.goes_on():
            return
        time.sleep(PAUSE_S)


def _train(watch: LauncherWatch, root: Path, runs: Path) -> None:
    """Runs a second job, and is ready once it trains."""
    command = [*PYTHON, "capricorn", *JOB, "--out", str(runs), "--set", f"store.root={root}"]
    silent = subprocess.DEVNULL
    job = subprocess.Popen(command, stdin=silent, stdout=silent, stderr=silent)
    end_s = time.monotonic() + TRAINS_TIMEOUT_S
    while job.poll() is None and time.monotonic() < end_s and not any(runs.glob("*/iterations.jsonl")):
        time.sleep(POLL_S)
    _ready()
    while watch.goes_on():
        time.sleep(POLL_S)
    job.terminate()
    end_child(job, job.pid, END_TIMEOUT_S, "the neighbour's job")


NEIGHBOURS: Final[Mapping[str, Callable[[LauncherWatch, Path, Path], None]]] = MappingProxyType({
    "stores": _churn, "job": _train,
})  # fmt: skip


if __name__ == "__main__":
    main()
