"""The rendezvous store, where the ranks find each other: outside of every failure domain, as any node may be lost."""

from __future__ import annotations

import os
import signal
import socket
import sys

from capricorn.process import die_with_parent


def serve(fd: int) -> None:
    """Serves the listening socket with that descriptor until a signal ends us."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    with socket.socket(fileno=os.dup(fd)) as listener:
        host, port = listener.getsockname()[:2]
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    del store


def main() -> None:
    """Serves the descriptor argv[2], tied to the life of the launcher argv[1]."""
    die_with_parent(int(sys.argv[1]))
    serve(int(sys.argv[2]))
    os._exit(0)


if __name__ == "__main__":
    main()
