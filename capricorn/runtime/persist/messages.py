"""The messages between the training thread, the writer process of the persistent tier, and what forks writers.

Each is a line of JSON.
"""

from __future__ import annotations

from pathlib import Path

from capricorn.config.fields import FrozenModel
from capricorn.units import Bytes, Seconds


class WriterTask(FrozenModel):
    """The task that a writer is started with: whose state it writes, and where."""

    run_id: str
    attempt: int
    rank: int
    num_nodes: int
    ranks_per_node: int
    model: str
    root: Path
    """The folder of the persistent tier."""
    layout: Path
    """The file with the layout of the state in a slot."""
    keep: int
    timeout_s: Seconds
    """How long it waits for the writers of other ranks."""

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.ranks_per_node


class ForkerRequest(FrozenModel):
    """Asks for a writer to be forked for a task, or to be reaped after its end: one of the two."""

    task: WriterTask | None = None
    """Two descriptors come with it, see `writer_process.run_writer`."""
    reap: int = 0


class ForkerAnswer(FrozenModel):
    """The pid of the new writer, or the exit code of the one that has ended, negative for a signal."""

    number: int


class Order(FrozenModel):
    """One line to a writer: the slot that holds an iteration, and stays as it is until the answer."""

    iteration: int
    slot: Path


class Answer(FrozenModel):
    """One line from a writer: whether the checkpoint is complete in the persistent tier."""

    iteration: int
    failure: str = ""
    num_bytes: Bytes = 0
