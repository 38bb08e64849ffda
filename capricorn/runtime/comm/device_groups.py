"""Ends collectives on devices that wait for a dead peer; gloo's end with their connections instead.

A rank that waits for its device hears no signal: its Python code does not run until the wait is over. So a thread of
its own hears SIGTERM, and aborts the communicators, by which the wait ends with an error.
"""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from capricorn.runtime.watched_thread import WatchedThread

_END: Final = b"\0"
"""Of the thread; no signal has this number."""


class DeviceBackend(Protocol):
    """What NCCL's part of a process group can do."""

    def abort(self) -> None:
        """Ends its collectives, on this rank, with an error."""
        ...

    def _group_start(self) -> None: ...

    def _group_end(self) -> None: ...


def device_backends() -> list[DeviceBackend]:
    """Returns NCCL's parts of the process groups that there are, the newest first."""
    groups = sorted(distributed_c10d._world.pg_names.items(), key=lambda item: item[1], reverse=True)
    found: list[DeviceBackend] = []
    for group, _ in groups:
        with contextlib.suppress(RuntimeError):  # it has no part on CUDA
            backend = group._get_backend(torch.device("cuda"))
            if dist.is_nccl_available() and isinstance(backend, dist.ProcessGroupNCCL):
                found.append(backend)
    return found


def abort_all(backends: Sequence[DeviceBackend]) -> None:
    """Aborts communicators together: one after the other, each could wait for the next."""
    if not backends:
        return
    backends[0]._group_start()
    try:
        for backend in backends:
            backend.abort()
    finally:
        backends[0]._group_end()


class AbortOnSigterm:
    """A thread that aborts all communicators when this process gets SIGTERM; made on the main thread."""

    def __init__(self, abort: Callable[[], None] = lambda: abort_all(device_backends())) -> None:
        self._abort = abort
        self._heard, self._told = socket.socketpair()
        self._told.setblocking(False)  # as `set_wakeup_fd` demands
        self._before = signal.set_wakeup_fd(self._told.fileno(), warn_on_full_buffer=False)
        self._thread = WatchedThread(target=self._listen, name="capricorn-abort", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the thread."""
        signal.set_wakeup_fd(self._before)
        self._told.send(_END)
        self._thread.join(timeout_s)
        self._heard.close()
        self._told.close()

    def _listen(self) -> None:
        while (number := self._heard.recv(1)) not in (_END, b""):
            if number[0] == signal.SIGTERM:
                self._abort()
