"""The messages between the training thread and the writer process of the persistent tier, one line of JSON each."""

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


class Order(FrozenModel):
    """One line to a writer: the slot that holds an iteration, and stays as it is until the answer."""

    iteration: int
    slot: Path


class Answer(FrozenModel):
    """One line from a writer: whether the checkpoint is complete in the persistent tier."""

    iteration: int
    failure: str = ""
    num_bytes: Bytes = 0
