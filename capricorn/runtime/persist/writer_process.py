"""The process that writes one rank's part of the persistent tier: takes an iteration a line, and answers with a line.

It outlives no trainer, and takes only the CPU time that training leaves. Knows what it is told, and no training.
"""

from __future__ import annotations

import signal
import sys

from capricorn.process import die_with_parent
from capricorn.runtime.comm.idle_priority import use_idle_priority
from capricorn.runtime.persist.messages import Order, WriterTask


def main() -> None:
    """Carries out orders for the task argv[1] until there are no more; argv[2] is the trainer."""
    die_with_parent(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # that of a terminal is for the trainer
    use_idle_priority()
    task = WriterTask.model_validate_json(sys.argv[1])
    # Not before, so that importing torch gives way to training too.
    from capricorn.runtime.persist.writer import write_checkpoint

    for line in sys.stdin:
        answer = write_checkpoint(task, Order.model_validate_json(line))
        print(answer.model_dump_json(), flush=True)


if __name__ == "__main__":
    main()
