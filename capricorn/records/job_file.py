"""The job file: what the launcher hands to every rank, read at each start. And the names of the files beside it."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Final

from pydantic import Field

from capricorn.config.fields import FrozenModel
from capricorn.config.scenario import Scenario
from capricorn.errors import CapricornError
from capricorn.files import write_text
from capricorn.records.record_file import parse_record, read_json
from capricorn.units import Seconds

JOB: Final = "job.json"
FATAL: Final = "fatal.json"
"""The file in which a rank says why starting again cannot help; the launcher then ends the run."""
ATTEMPT: Final = "attempt"
"""The file that holds the number of the attempt where torchrun starts the ranks."""
WORKERS: Final = "workers"
"""The folder of the ranks' processes, a file for each rank."""
FAULTS: Final = "faults"
"""The folder of the marks of failures that were injected."""


class Fatal(FrozenModel):
    """Why starting again cannot help."""

    why: str
    is_users_mistake: bool = False
    """As opposed to a failure of the run."""


class Job(FrozenModel):
    """One run on one machine: what is run, and where its files are."""

    run_id: str
    scenario: Scenario
    run_dir: Path
    store_dir: Path
    """The folder of the memory store, with node<k>/ of each node on this machine."""
    tokens: Path
    """The file of the training data."""
    addresses: tuple[str, ...] = ()
    """The address of each node on this machine."""
    links_dir: Path | None = None
    """The folder of the links that are paced in user space; None where links are not."""
    storage_dir: Path | None = None
    """The folder of the clocks of modelled storage; None where storage is not modelled."""
    persist_dir: Path | None = None
    """The folder of the persistent tier, the same for all nodes; it stays after the run."""
    files_dir: Path | None = None
    """The folder for systems that write files, the same for all nodes; it goes with the run."""
    epoch_s: Seconds = Field(default_factory=lambda: time.time() - time.monotonic())
    """The begin of this machine's monotonic clock in seconds since the epoch, as the wall clock had it at the start."""
    launcher: int = 0
    """The process of the launcher, from which all others come; 0 is not known."""

    def write(self) -> Path:
        path = self.run_dir / JOB
        write_text(path, self.model_dump_json(indent=2))
        return path

    @classmethod
    def read(cls, path: Path) -> Job:
        """Returns the job in that file.

        Raises:
            ConfigError: there is none, it is damaged, or a newer version has written what this one cannot read.
        """
        return parse_record(path, cls, read_json(path, "job"))

    def now_s(self) -> Seconds:
        """Returns the seconds since the epoch, on a clock that is set once in a run and that nobody sets later.

        All processes of this machine have the same, so that the time between two records is never negative. Time in
        which the machine is suspended does not pass.
        """
        return self.epoch_s + time.monotonic()

    def say_fatal(self, fatal: Fatal) -> None:
        """Says why starting again cannot help, for the launcher; beside the store where the disk of records is full."""
        for folder in (self.run_dir, self.store_dir):
            with contextlib.suppress(CapricornError):  # without a word the launcher gives up later, and says less
                write_text(folder / FATAL, fatal.model_dump_json())
                return

    def fatal(self) -> Fatal | None:
        """Returns what a rank said so; None if none did."""
        files = (folder / FATAL for folder in (self.run_dir, self.store_dir))
        texts = (file.read_text(encoding="utf-8") for file in files if file.is_file())
        return next((Fatal.model_validate_json(text) for text in texts if text), None)

    def node_dir(self, node: int) -> Path:
        """Returns the folder of a node's part of the store."""
        return self.store_dir / f"node{node}"
