"""One node's torchrun agent, tied to the life of the launcher. Takes the pid of the launcher and then torchrun's own
arguments; the module that torchrun runs gets the pid of the agent as its last argument.
"""

from __future__ import annotations

import os
import sys

from capricorn.process import die_with_parent


def main() -> None:
    """Runs torchrun until its workers are done."""
    die_with_parent(int(sys.argv[1]))
    from torch.distributed.run import main as torchrun

    torchrun([*sys.argv[2:], str(os.getpid())])


if __name__ == "__main__":
    main()
