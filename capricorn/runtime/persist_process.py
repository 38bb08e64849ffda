"""The process that writes one rank's part of the persistent tier: takes an iteration a line, and answers with a line.

It outlives no trainer, and takes only the CPU time that training leaves. Knows what it is told, and no training.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from capricorn.process import die_with_parent
from capricorn.runtime.priority import give_way
from capricorn.units import Bytes, Seconds
from capricorn.values import Frozen


class Work(Frozen):
    """What a writer is started with: who it writes for, and where."""

    run_id: str
    attempt: int
    rank: int
    num_nodes: int
    ranks_per_node: int
    model: str
    root: Path
    """The folder of the persistent tier."""
    layout: Path
    """The file that says what lies where in a slot."""
    keep: int
    timeout_s: Seconds
    """How long it waits for the writers of other ranks."""

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.ranks_per_node


class Order(Frozen):
    """One line to a writer: the slot that holds an iteration, and stays as it is until the answer."""

    iteration: int
    slot: Path


class Answer(Frozen):
    """One line from a writer: whether the checkpoint is complete on disk."""

    iteration: int
    failure: str = ""
    num_bytes: Bytes = 0


def main() -> None:
    """Carries out orders until there are no more."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # that of a terminal is for the trainer
    give_way()
    work = Work.model_validate_json(sys.argv[1])
    # Not before, so that importing torch gives way to training too.
    from capricorn.runtime.persist_writer import write_checkpoint

    for line in sys.stdin:
        answer = write_checkpoint(work, Order.model_validate_json(line))
        print(answer.model_dump_json(), flush=True)


if __name__ == "__main__":
    main()
