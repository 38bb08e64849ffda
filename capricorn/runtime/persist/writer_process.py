"""The process that writes one rank's part of the persistent tier: takes an iteration a line, and answers with a line.

It outlives no trainer, and takes only the CPU time that training leaves. Its lines go over descriptors of their own,
as libraries may print. Knows what it is told, and no training.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TextIO

from capricorn.errors import in_words
from capricorn.process import die_with_parent
from capricorn.runtime.comm.idle_priority import use_idle_priority
from capricorn.runtime.persist.messages import Answer, Order, WriterTask


def main() -> None:
    """Carries out the task in argv[1], by orders over the descriptor argv[2], answered over argv[3].

    argv[4] is the process of the trainer.
    """
    orders, answers, parent = map(int, sys.argv[2:5])
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # that of a terminal is for the trainer
    use_idle_priority()
    with os.fdopen(orders) as incoming, os.fdopen(answers, "w") as outgoing:
        _serve(WriterTask.model_validate_json(sys.argv[1]), incoming, outgoing)


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
    main()
