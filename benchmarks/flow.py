"""One end of a flow for the `links` benchmark.

python -m benchmarks.flow PARENT sink ADDRESS PORT | PARENT source ADDRESS PORT [LINKS SOURCE TARGET]
"""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

from capricorn.emulation.route import Links
from capricorn.process import die_with_parent
from capricorn.units import KIB

LENGTH_S, SETTLE_S = 2.5, 0.7
DEADLINE_S = 10.0
PIECE_BYTES = 64 * KIB


def _sink(address: str, port: int) -> None:
    """Prints the bytes a second that arrived, without those of the first moments."""
    with socket.create_server((address, port)) as listener:
        print("ready", flush=True)
        listener.settimeout(DEADLINE_S)
        sock, _ = listener.accept()
    sock.settimeout(DEADLINE_S)
    start_s, arrived, since_s, until_s = time.perf_counter(), 0, 0.0, float("inf")
    while count := len(sock.recv(1 << 20)):
        now_s = time.perf_counter() - start_s
        if now_s < SETTLE_S:
            since_s = now_s
        elif now_s < LENGTH_S - 0.3:  # as long as all flows last
            arrived, until_s = arrived + count, now_s
    print(arrived / (until_s - since_s))


def _source(address: str, port: int, links: list[str]) -> None:
    route = Links(Path(links[0])).route(int(links[1]), int(links[2])) if links else None
    payload, end_s = memoryview(bytes(PIECE_BYTES)), time.monotonic() + LENGTH_S
    with socket.create_connection((address, port), 10) as sock:
        while time.monotonic() < end_s:
            for piece in route.pieces(payload) if route else (payload,):
                sock.sendall(piece)


def main() -> None:
    """Does what the command line says."""
    die_with_parent(int(sys.argv[1]))
    role, address, port = sys.argv[2], sys.argv[3], int(sys.argv[4])
    if role == "sink":
        _sink(address, port)
    else:
        _source(address, port, sys.argv[5:])


if __name__ == "__main__":
    main()
