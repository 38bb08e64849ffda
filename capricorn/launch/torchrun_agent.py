"""One node's torchrun agent, tied to the life of the launcher. Takes the pid of the launcher and then torchrun's own
arguments; the module that torchrun runs gets the pid of the agent as its last argument.
"""

from __future__ import annotations

import os
import signal
import sys

from capricorn.launch.interrupts import are_heard
from capricorn.process import die_with_parent


def main() -> None:
    """Runs torchrun until its workers are done."""
    die_with_parent(int(sys.argv[1]))
    from torch.distributed.run import main as torchrun

    # Of itself it also hears a signal that was ignored on purpose; SIGTERM is how the launcher ends it.
    heard = [signal.SIGTERM, *are_heard(signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)]
    names = ",".join(number.name for number in heard)
    torchrun(["--signals-to-handle", names, *sys.argv[2:], str(os.getpid())])


if __name__ == "__main__":
    main()
