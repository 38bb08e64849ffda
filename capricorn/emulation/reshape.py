"""Changes the links of the node it is run in, by a script for tc: from within, or from outside through its entry.

Must know no failure; what a script says is the affair of `shaping`.
"""

from __future__ import annotations

import subprocess
import sys

from capricorn.emulation.builder import run_batch
from capricorn.emulation.fabric import FabricError, NamespaceEntry
from capricorn.units import Seconds

TIMEOUT_S: Seconds = 20.0


def reshape(entry: NamespaceEntry, script: str) -> None:
    """Runs the script at that place.

    Raises:
        FabricError: one of its lines failed.
    """
    command = [*entry.prefix, "capricorn.emulation.reshape"]
    try:
        done = subprocess.run(
            command,
            input=script,
            capture_output=True,
            text=True,
            pass_fds=entry.pass_fds,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise FabricError(f"cannot change a link: not done within {TIMEOUT_S:g} s") from None
    if done.returncode:
        raise FabricError(f"cannot change a link: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")


if __name__ == "__main__":
    run_batch("tc", sys.stdin.read())
