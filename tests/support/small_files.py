"""Files that cannot be written on, and things where a file should be: as a full disk and a careless user make them."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path


@contextmanager
def files_end_at(num_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond that size: a write that would reach it is short, the next one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def make_socket(path: Path) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as end:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            end.bind(f"/proc/self/fd/{folder}/{path.name}")  # the path itself may be too long for a socket
        finally:
            os.close(folder)


NOT_FILES: Mapping[str, Callable[[Path], object]] = {
    "FIFO": lambda path: os.mkfifo(path),
    "folder": lambda path: path.mkdir(),
    "socket": make_socket,
    "device": lambda path: path.symlink_to("/dev/zero"),
}
"""What may stand where a file should, by its name."""
