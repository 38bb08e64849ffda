"""What the library lm-resiliency is given: its settings in a job, and its way to a rank's peer, timed and counted."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from lm_resiliency import InMemoryCkptConfig
from lm_resiliency.checkpointing.replication import ChunkedGlooBackend, ReplicationBackend

from capricorn.config.planner import PlannerConfig
from capricorn.errors import ConfigError
from capricorn.systems.interface import ChunkEvent, JobContext
from capricorn.units import Bytes

FOLDER: Final = "lm-resiliency"
"""Of the files for a restart, in the folder of the node's store."""


@dataclass(frozen=True, slots=True)
class Parallelism:
    """What the library asks of a parallelism: whether other ranks hold the same state anyway."""

    has_natural_replicas: bool


def check(job: JobContext) -> None:
    """Raises ConfigError if the library cannot work in this job."""
    if job.routes:
        raise ConfigError(
            "system lm-resiliency has sockets of its own, which links that are paced in user space do not see; "
            "use cluster.links=namespaces (or user-namespaces)"
        )
    replicas, num_nodes = job.config.replicas, job.topology.num_nodes
    if replicas > 2 or (replicas == 2 and num_nodes % 2):
        raise ConfigError(
            "system lm-resiliency pairs nodes: it needs --replicas 1, or 2 and an even number of nodes; "
            f"there are {replicas} replicas on {num_nodes} nodes"
        )


def settings(job: JobContext) -> InMemoryCkptConfig:
    """The library's own defaults, but for where the peer and the files are, checksums in them, and chunks.

    Its chunks of 16 MiB suit fast links, and cost less CPU time than small ones. Where ours are set smaller than usual,
    as they are for slow links, its are as small as ours: about what its `estimate_chunk_size` comes to there.
    """
    config = InMemoryCkptConfig(
        interval=max(1, job.config.every),
        replication_jump=job.topology.ranks_per_node,
        disk_folder=str(job.store_dir / FOLDER),
        run_id=job.run_id,
        verify_integrity=True,
        pin_memory=job.device.type == "cuda",
    )
    if job.planner.max_chunk_bytes < PlannerConfig().max_chunk_bytes:
        config.replication_chunk_size = job.planner.max_chunk_bytes
    return config


class Meter(ReplicationBackend):
    """A backend of the library, with what it has sent and why it failed."""

    def __init__(self, backend: ChunkedGlooBackend) -> None:
        self._backend = backend
        self.sent_bytes: Bytes = 0
        self.failure = ""
        self._events: list[ChunkEvent] = []

    @property
    def peer_rank(self) -> int:
        return int(self._backend.peer_rank)

    def send(self, tensors: list[torch.Tensor], step: int, meta: bytes = b"") -> None:
        begin_s = time.perf_counter()
        try:
            self._backend.send(tensors, step, meta)
        except RuntimeError as error:
            self.failure = f"cannot send to rank {self.peer_rank}: {error}"
            raise
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        self.sent_bytes += num_bytes
        self._events.append(ChunkEvent("send", step, begin_s, time.perf_counter(), num_bytes))

    def recv(self, buffers: list[torch.Tensor]) -> tuple[int, bytes]:
        try:
            step, meta = self._backend.recv(buffers)
        except RuntimeError as error:
            self.failure = f"cannot receive from rank {self.peer_rank}: {error}"
            raise
        return int(step), bytes(meta)

    def take_events(self) -> list[ChunkEvent]:
        taken = self._events[:]
        del self._events[: len(taken)]  # the sending thread may have added one meanwhile
        return taken

    def close(self) -> None:
        # The library leaves its group to the end of the job, and its threads end with the last who knows it.
        dist.destroy_process_group(self._backend._group)
        del self._backend._group
        gc.collect()
