"""One node's torchrun agent, tied to the life of the launcher. Takes torchrun's own arguments."""

from __future__ import annotations

import sys

from capricorn.process import die_with_parent


def main() -> None:
    """Runs torchrun until its workers are done."""
    die_with_parent()
    from torch.distributed.run import main as torchrun

    torchrun(sys.argv[1:])


if __name__ == "__main__":
    main()
