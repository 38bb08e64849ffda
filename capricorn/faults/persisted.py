"""What a run has on its persistent tier, as its folders show it; and a wait for it, by which what a fault leaves does
not hang on the speed of the machine. Reads no checkpoint.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from capricorn.config.fault_spec import FaultSpec
from capricorn.config.scenario import Scenario
from capricorn.records.job_file import Job
from capricorn.systems.registry import find
from capricorn.units import Seconds

MANIFESTS: Final = ("commit.json", "capricorn.json")
"""What makes a folder of the persistent tier a checkpoint."""
PATIENCE_S, MOST_S = 15.0, 45.0
"""How long a run is held up at most before an iteration, and all in all: each time less than ranks wait for others."""
POLL_S: Final[Seconds] = 0.02
_NAME = re.compile(r"iteration-(\d+)")


def persistent_folders(job: Job) -> list[Path]:
    """Returns the folders whose files outlive the memory of the nodes."""
    return [folder for folder in (job.persist_dir, job.files_dir) if folder is not None]


def checkpoints_in(folder: Path) -> list[Path]:
    """Returns the folders of the checkpoints that are complete there, the newest last."""
    found = {path: int(match[1]) for path in folder.glob("iteration-*") if (match := _NAME.fullmatch(path.name))}
    return sorted((path for path in found if any((path / name).exists() for name in MANIFESTS)), key=found.__getitem__)


def persisted_in(job: Job) -> tuple[int, ...]:
    """Returns the iterations that are complete on the persistent tier, ascending."""
    paths = (path for folder in persistent_folders(job) for path in checkpoints_in(folder))
    return tuple(sorted(int(path.name.rpartition("-")[2]) for path in paths))


def num_due(scenario: Scenario, iteration: int) -> int:
    """Returns how many checkpoints are persisted when that iteration begins, if each is written before the next."""
    done, every, persist_every = iteration - 1, scenario.system.every, scenario.persist.every
    if every and find(scenario.system.name).writes_files:
        return max(0, done // every - 1)
    return max(0, (done - every) // persist_every - 1) if every and persist_every else 0


class PersistedWait:
    """Holds a run up, for a while, until as much is persisted as faults that are to come need."""

    def __init__(
        self,
        job: Job,
        faults: Iterable[FaultSpec],
        clock: Callable[[], Seconds] = time.monotonic,
        sleep: Callable[[Seconds], object] = time.sleep,
    ) -> None:
        """Waits for nothing yet.

        Args:
            job: whose persistent tier it is.
            faults: that are to come.
            clock: tells the time.
            sleep: waits.
        """
        self._job, self._clock, self._sleep = job, clock, sleep
        self._faults = [fault for fault in faults if fault.num_persisted]
        self._left_s: Seconds = MOST_S

    def before(self, iteration: int) -> None:
        """Returns when enough is persisted for that iteration to begin, or no more patience is left."""
        coming = (fault.num_persisted for fault in self._faults if fault.iteration >= iteration)
        needed = min(max(coming, default=0), num_due(self._job.scenario, iteration))
        if not needed:
            return
        begin_s = self._clock()
        end_s = begin_s + min(PATIENCE_S, self._left_s)
        while len(persisted_in(self._job)) < needed and self._clock() < end_s:
            self._sleep(POLL_S)
        self._left_s -= self._clock() - begin_s
