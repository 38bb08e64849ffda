"""Runs a module within namespaces: `python -m capricorn.emulation.inside PARENT FD[,FD...] MODULE ARGS...`.

Must import little and start no thread: a process with threads cannot enter a user namespace.
"""

from __future__ import annotations

import os
import runpy
import sys

from capricorn.emulation.namespaces import enter
from capricorn.process import die_with_parent


def main() -> None:
    """Enters the namespaces with these descriptors in this order and becomes the module, tied to the parent's life."""
    for fd in map(int, sys.argv[2].split(",")):
        enter(fd)
        os.close(fd)
    # Not before: entering a user namespace undoes it.
    die_with_parent(int(sys.argv[1]))
    sys.argv = sys.argv[3:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
