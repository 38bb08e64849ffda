"""`python -m benchmarks [NAME ...]`: runs the named benchmarks, or all that need no GPU, a line for each figure."""

from __future__ import annotations

import sys
from collections.abc import Callable

from benchmarks import checksums, gpu, hiding, hooks, links, planning, restart, slowdown, staging, transport

BENCHMARKS: dict[str, Callable[[], None]] = {
    "staging": staging.main,
    "checksums": checksums.main,
    "transport": transport.main,
    "hooks": hooks.main,
    "links": links.main,
    "hiding": hiding.main,
    "planning": planning.main,
    "slowdown": slowdown.main,
    "restart": restart.main,
    "gpu": gpu.main,
}


ON_GPUS = ("gpu",)
"""What runs only when it is named."""


def main() -> None:
    """Runs what the command line names."""
    names = sys.argv[1:] or [name for name in BENCHMARKS if name not in ON_GPUS]
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        sys.exit(f"error: unknown benchmark {unknown[0]!r}; known: {', '.join(BENCHMARKS)}")
    for name in names:
        print(f"== {name}", flush=True)
        BENCHMARKS[name]()


if __name__ == "__main__":
    main()
