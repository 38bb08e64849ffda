"""Several "machines" on this one: commands of their own, with stores and results of their own, on the loopback."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.runs import LiveRun, Run


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on right now."""
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        port: int = listener.getsockname()[1]
    return port


@contextlib.contextmanager
def machines(
    folder: Path, count: int, *options: str | Path, nnodes: str = "", own: Sequence[Sequence[str]] = ()
) -> Iterator[list[LiveRun]]:
    """So many machines that run the same, each with options of its own as well; the first conducts."""
    endpoint = f"127.0.0.1:{free_port()}"
    with contextlib.ExitStack() as stack:
        started = []
        for number in range(count):
            (store := folder / f"stores{number}").mkdir(exist_ok=True)
            where = ("--nnodes", nnodes or str(count), "--node-rank", str(number), "--rdzv-endpoint", endpoint)
            mine = own[number] if own else ()
            here = folder / f"machine{number}"
            live = LiveRun(here, *where, "--set", f"store.root={store}", *options, *mine)
            started.append(stack.enter_context(live))
        yield started


def ended(live: Sequence[LiveRun], *, deadline_s: float = 100.0) -> list[Run]:
    """The commands of the machines once all have ended."""
    return [each.finish(deadline_s=deadline_s) for each in live]


def left_in(folder: Path) -> list[str]:
    """What the machines have left in their stores."""
    return [str(path) for stores in folder.glob("stores*") for path in stores.iterdir()]
