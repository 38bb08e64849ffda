"""What the launcher hands to each worker: a file in the run folder, read by every start of every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from capricorn.config.fields import FrozenModel
from capricorn.config.scenario import Scenario

JOB: Final = "job.json"
FATAL: Final = "fatal.txt"
"""A worker writes here why starting again cannot help; the launcher then ends the run."""
ATTEMPT: Final = "attempt"
WORKERS: Final = "workers"
FAULTS: Final = "faults"


class Job(FrozenModel):
    """One run on one machine: what, and where its files are."""

    run_id: str
    scenario: Scenario
    run_dir: Path
    store_dir: Path
    """The folder that holds node<k>/ of each node on this machine."""
    tokens: Path
    addresses: tuple[str, ...] = ()
    """Of the emulated nodes, by node."""
    links_dir: Path | None = None
    """Where the links are that are paced in user space, if they are."""
    storage_dir: Path | None = None
    """Where the clocks of the modelled storage are, if it is modelled."""
    persist_dir: Path | None = None
    """The folder of the persistent tier, all nodes alike; stays after the run."""
    files_dir: Path | None = None
    """Where systems that write files put them, all nodes alike; gone with the run."""

    def write(self) -> Path:
        path = self.run_dir / JOB
        path.write_text(self.model_dump_json(indent=2), encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: Path) -> Job:
        return cls.model_validate_json(path.read_text(encoding="utf-8"))

    def node_dir(self, node: int) -> Path:
        """Where that node's part of the store lies."""
        return self.store_dir / f"node{node}"
