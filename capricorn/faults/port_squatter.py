"""Squats on the ports of a worker that was killed: takes each as soon as it is free and answers with garbage.

Run as `python -m capricorn.faults.port_squatter LOCK PORTS`: the launcher's lock, and `[[host, port], ...]`. Must
import little, as it has to be there before the worker goes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import selectors
import socket
import sys
from typing import Final

from capricorn.faults.launcher_watch import LauncherWatch

POLL_S: Final = 0.02
GARBAGE: Final = bytes(range(256)) * 16


def main() -> None:
    """Takes the ports until it is told to end, or the launcher is gone."""
    watch = LauncherWatch(sys.argv[1])
    wanted = [(str(host), int(port)) for host, port in json.loads(sys.argv[2])]
    print("ready", flush=True)
    selector = selectors.DefaultSelector()
    while watch.goes_on():
        wanted = [address for address in wanted if not _take(address, selector)]
        for key, _ in selector.select(POLL_S):
            with contextlib.suppress(OSError):
                caller, _ = key.fileobj.accept()  # type: ignore[union-attr]
                with caller:
                    caller.settimeout(POLL_S)
                    caller.sendall(GARBAGE)


def _take(address: tuple[str, int], selector: selectors.BaseSelector) -> bool:
    """Listens at the address if it is free; returns whether it is."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        # Reuse only lets it in beside connections of the dead; beside a listener it is refused.
        listener = socket.create_server(address, family=family)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    listener.setblocking(False)
    selector.register(listener, selectors.EVENT_READ)
    return True


if __name__ == "__main__":
    main()
