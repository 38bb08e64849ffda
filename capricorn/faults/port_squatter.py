"""Squats on the ports of a worker that was killed: takes each as soon as it is free and answers with garbage.

Must import little, as it has to be there before the worker goes; ends with the launcher, whose lock it watches.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import selectors
import socket
import sys
from typing import Final

READY: Final = "ready"
POLL_S: Final = 0.02
GARBAGE: Final = bytes(range(256)) * 16


def main() -> None:
    """Takes the addresses `[[host, port], ...]` of argv[2] until the file argv[1] is locked by nobody any more."""
    lock = os.open(sys.argv[1], os.O_RDWR)
    wanted = [(str(host), int(port)) for host, port in json.loads(sys.argv[2])]
    print(READY, flush=True)
    selector = selectors.DefaultSelector()
    while _is_locked(lock):
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


def _is_locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


if __name__ == "__main__":
    main()
