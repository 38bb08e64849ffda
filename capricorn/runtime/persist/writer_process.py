"""The process that writes one rank's part of the persistent tier: takes an iteration a line, and answers with a line.

It outlives no trainer, and takes only the CPU time that training leaves. Its lines go over descriptors of their own,
as libraries may print. Knows what it is told, and no training.

It is started afresh, by `spawn_writer`, or forked with all imported, by `writer_forker`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Final, TextIO, TypeAlias

from capricorn.errors import in_words
from capricorn.process import PYTHON, PolledChild, die_with_parent, name_process
from capricorn.runtime.comm.idle_priority import use_idle_priority
from capricorn.runtime.persist.messages import Answer, Order, WriterTask

WRITER_NAME: Final = "persist-writer"
"""The name of the process, as `ps` and `top` show it."""


WriterStarter: TypeAlias = Callable[[WriterTask, Sequence[int]], PolledChild]
"""Starts a writer with two descriptors, see `run_writer`; raises OSError if the machine starts no process more."""


def spawn_writer(task: WriterTask, ends: Sequence[int]) -> subprocess.Popen[bytes]:
    """Starts a writer afresh, which has to import torch first; see `WriterStarter`."""
    arguments = [*map(str, ends), str(os.getpid())]
    return subprocess.Popen(
        [*PYTHON, "capricorn.runtime.persist.writer_process", task.model_dump_json(), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=ends,
    )


def run_writer(task: WriterTask, orders: int, answers: int, parent: int) -> None:
    """Turns this process into a writer, and returns when there are no more orders.

    Args:
        task: what it writes, and where.
        orders: the descriptor from which it reads orders.
        answers: the descriptor to which it writes answers.
        parent: the process that has started it, with which it ends.
    """
    die_with_parent(parent)
    name_process(WRITER_NAME)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # that of a terminal is for the trainer
    use_idle_priority()
    with os.fdopen(orders) as incoming, os.fdopen(answers, "w") as outgoing:
        _serve(task, incoming, outgoing)


def _serve(task: WriterTask, orders: TextIO, answers: TextIO) -> None:
    """Carries out orders until there are no more."""
    failure = ""
    try:
        # Not before, so that importing torch gives way to training too.
        from capricorn.runtime.persist.writer import write_checkpoint
    except Exception as error:  # noqa: BLE001 - whatever it is, the trainer is to hear of it
        failure = f"the writer cannot start: {in_words(error)}"
    for line in orders:
        order = Order.model_validate_json(line)
        answer = Answer(iteration=order.iteration, failure=failure) if failure else write_checkpoint(task, order)
        print(answer.model_dump_json(), file=answers, flush=True)
        if failure:
            return


if __name__ == "__main__":
    run_writer(WriterTask.model_validate_json(sys.argv[1]), *map(int, sys.argv[2:5]))
