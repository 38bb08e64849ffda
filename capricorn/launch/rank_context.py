"""Which rank a process is and how it meets the others: as torchrun says, or as the node agent says that forked it.

Must know no model and no checkpoint.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import stat
from datetime import timedelta
from typing import Final, NamedTuple, Protocol

import torch.distributed as dist
from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]

from capricorn.records.job_file import ATTEMPT, Job
from capricorn.runtime.comm.collectives import maximum
from capricorn.runtime.comm.device_groups import abort_all, device_backends
from capricorn.runtime.persist.writer_process import WriterStarter

COLLECTIVE_TIMEOUT: Final = timedelta(seconds=120)
SUPERVISED_TIMEOUT: Final = timedelta(minutes=30)
"""The timeout of collectives where node agents and launcher find ranks that hang, much earlier. They know when all were
paused; a collective does not, and a short timeout would be over after any pause that is longer."""
JOIN_TIMEOUT: Final = timedelta(seconds=15)
"""How long finding the rendezvous store may take."""


class UnreachableError(RuntimeError):
    """The rendezvous store cannot be reached from this node."""


class RendezvousResult(NamedTuple):
    """What a rank has and knows once it has met the others."""

    control: dist.ProcessGroup
    """A gloo group of all ranks."""
    attempt: int
    """How often the job has started before, the same on all ranks."""


class RankContext(Protocol):
    """A rank's place in the job."""

    rank: int
    world_size: int
    attempt: int
    """The attempt as far as it is known before the rendezvous."""
    timeout: timedelta
    """Of collectives."""
    start_writer: WriterStarter | None
    """Starts a writer of the persistent tier; None where it is started afresh."""

    def rendezvous(self, backend: str) -> RendezvousResult:
        """Meets the other ranks and makes the process groups of the attempt; collective."""
        ...

    def address(self) -> str:
        """Returns the address of the own node's interface."""
        ...


class TorchrunContext:
    """The context of a rank that torchrun has started, by its environment."""

    timeout = COLLECTIVE_TIMEOUT
    start_writer: WriterStarter | None = None

    def __init__(self, job: Job) -> None:
        self._job, self.attempt = job, 0
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def rendezvous(self, backend: str) -> RendezvousResult:
        dist.init_process_group(backend, timeout=self.timeout)
        control = dist.new_group(backend="gloo", timeout=self.timeout)
        file = self._job.run_dir / ATTEMPT
        # torchrun's own restart count differs between nodes once an agent has been replaced.
        attempt = maximum(control, int(file.read_text()) if file.exists() else -1) + 1
        if self.rank == 0:
            file.write_text(str(attempt))
        return RendezvousResult(control, attempt)

    def address(self) -> str:
        return node_address(self._job, self.rank)


class ForkedContext:
    """The context of a rank that its node agent has forked; it may meet the others in one attempt after the other."""

    timeout = SUPERVISED_TIMEOUT

    def __init__(
        self,
        job: Job,
        rank: int,
        attempt: int,
        endpoint: tuple[str, int],
        start_writer: WriterStarter | None = None,
    ) -> None:
        """Starts nothing.

        Args:
            job: what is run.
            rank: of this process.
            attempt: the first in which it takes part.
            endpoint: host and port of the rendezvous store.
            start_writer: starts a writer of the persistent tier; None where it is started afresh.
        """
        self._job, self.rank, self.world_size = job, rank, job.scenario.topology.world_size
        self.attempt, self._endpoint, self.start_writer = attempt, endpoint, start_writer

    def rendezvous(self, backend: str) -> RendezvousResult:
        # A store that outlives all ranks needs a name for each attempt: addresses of the dead must not be read.
        store = PrefixStore(f"attempt{self.attempt}", self._store())
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world_size, timeout=self.timeout)
        return RendezvousResult(dist.new_group(backend="gloo", timeout=self.timeout), self.attempt)

    def address(self) -> str:
        return node_address(self._job, self.rank)

    def _store(self) -> TCPStore:
        host, port = self._endpoint
        try:
            return TCPStore(host, port, is_master=False, timeout=JOIN_TIMEOUT)
        except DistError as error:
            raise UnreachableError(f"rank {self.rank} cannot reach {host}:{port}: {error}") from None


def shut_down_process_groups() -> None:
    """Shuts down all process groups, also those that wait for a dead peer; nothing may refer to them any more.

    gloo cannot be told to give up: what is queued goes on in threads of its own, would write into tensors that have
    been restored meanwhile, and a group that ends waits for it. Without connections all of it fails at once. NCCL can
    be told, and must be first, while its connections are there.
    """
    abort_all(device_backends())
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # it is not connected, or was that of the listing
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                _shut(fd)
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # groups end with their last reference


def _shut(fd: int) -> None:
    with socket.socket(fileno=os.dup(fd)) as sock:
        # A thread of gloo's that finds its listener shut would end the process.
        is_listener = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if sock.family in (socket.AF_INET, socket.AF_INET6) and not is_listener:
            sock.shutdown(socket.SHUT_RDWR)


def node_address(job: Job, rank: int) -> str:
    """Returns the address of the rank's node."""
    return job.addresses[job.scenario.topology.node_of(rank)]
