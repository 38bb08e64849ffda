"""One node's torchrun agent, tied to the life of the launcher. Takes torchrun's own arguments."""

from __future__ import annotations

import signal
import sys

from capricorn.launch.interrupts import are_heard
from capricorn.process import die_with_parent


def main() -> None:
    """Runs torchrun until its workers are done."""
    die_with_parent()
    from torch.distributed.run import main as torchrun

    # Of itself it also hears a signal that was ignored on purpose; SIGTERM is how the launcher ends it.
    heard = [signal.SIGTERM, *are_heard(signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)]
    torchrun(["--signals-to-handle", ",".join(number.name for number in heard), *sys.argv[1:]])


if __name__ == "__main__":
    main()
