"""What processes do on the nodes of a fabric: `python -m tests.support.traffic ARGS...`. Imports nothing of ours."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

TIMEOUT_S = 30.0


def receive(address: str) -> None:
    """Prints a port, takes one connection, and acknowledges what came by it at its end."""
    with socket.create_server((address, 0)) as listener:
        listener.settimeout(TIMEOUT_S)
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
    connection.settimeout(TIMEOUT_S)
    while connection.recv(1 << 18):
        continue
    connection.sendall(b"!")


def send(address: str, port: str, num_bytes: str, tos: str) -> None:
    """Sends when told to on standard input; prints when it began and when all was acknowledged."""
    with socket.create_connection((address, int(port)), TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, int(tos))
        sys.stdin.readline()
        start_s = time.monotonic()
        connection.sendall(bytes(int(num_bytes)))
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b"!"
        print(start_s, time.monotonic())


def connect(address: str, port: str) -> None:
    """Prints what comes of a connection: `connected` or why not."""
    try:
        socket.create_connection((address, int(port)), TIMEOUT_S).close()
    except OSError as error:
        print(error.strerror)
    else:
        print("connected")


def run(*command: str) -> None:
    """Becomes another program."""
    os.execvp(command[0], command)


def show(*_: str) -> None:
    """Prints how the module was started, and the namespaces that it holds descriptors of."""
    fds = [Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    held = [str(fd.readlink()) for fd in fds if fd.is_symlink()]
    print(json.dumps([__name__, sys.argv[1:], [name for name in held if name.startswith(("net:", "user:"))]]))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
