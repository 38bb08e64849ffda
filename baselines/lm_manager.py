"""The manager of the library lm-resiliency, its faults corrected.

Knows no trainer: what it does when is decided by `lm_resiliency`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Final
from unittest.mock import patch

import torch
import torch.distributed as dist
from lm_resiliency.checkpointing.buffer import SlotState
from lm_resiliency.checkpointing.replication import ChunkedGlooBackend, PeerReplicator
from lm_resiliency.experimental import InMemoryCheckpointManager

from capricorn.systems.interface import JobContext
from capricorn.units import Seconds

from .lm_peer import Meter, Parallelism, settings

FLUSH_PATIENCE_S: Final[Seconds] = 1.0
"""For sending and for receiving what is on its way when a worker ends; torchrun kills it 5 s after SIGTERM."""
NUM_FLUSHED: Final = 2
"""Periodic flushes that are kept, so that all ranks have one in common while the next is written."""


@dataclass(slots=True)
class Save:
    """One checkpoint of one rank on its way, as `CommitTracker` looks at it."""

    iteration: int
    is_settled: bool = False
    failures: list[str] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return self.is_settled and not self.failures


class Manager(InMemoryCheckpointManager):
    """The library's manager, corrected.

    As it is, a slot that is being overwritten passes for the generation it held, also to a SIGTERM that comes then;
    waits for a peer have no deadline; a second SIGTERM cuts off the files that the first one asked for; files of
    periodic flushes stay for ever.
    """

    def __init__(self, job: JobContext) -> None:
        self.failure = ""
        """Why the last exchange did not end well."""
        self._is_flushing = False
        self._patience_s = job.config.timeout_s / 2  # sending and receiving are waited for one after the other
        # The library's groups wait 30 min for each message, and ending a group does not end who waits in it.
        new_group = partial(dist.new_group, timeout=timedelta(seconds=self._patience_s))
        with patch.object(dist, "new_group", new_group):
            super().__init__(settings(job), Parallelism(job.config.replicas == 1), process_group=job.control_group)
        self.meter: Meter | None = None
        if isinstance(self._replicator._backend, ChunkedGlooBackend):
            self.meter = Meter(self._replicator._backend)
            self._replicator = PeerReplicator(self.meter)

    @property
    def is_busy(self) -> bool:
        """Whether the host copy or the exchange is still on its way."""
        thread = self._completion_thread
        return (thread is not None and thread.is_alive()) or bool(self._replicator.in_flight)

    @property
    def peer_rank(self) -> int:
        """The rank whose replica this one keeps; -1 without replicas."""
        return int(self._replicator.peer_rank)

    def start(self, iteration: int, tensors: list[torch.Tensor]) -> Save:
        """A save of the tensors; on the CPU they are copied when it returns."""
        save = Save(iteration)
        try:
            self.save_tensors(tensors, iteration)
        except (OSError, RuntimeError) as error:
            save.failures, save.is_settled = [str(error)], True
        return save

    def end(self, save: Save, timeout_s: Seconds) -> None:
        """Waits for the exchange of that save; one that has not ended by then has failed."""
        if not save.is_settled and not self.finalize_replication(timeout_s / 2):
            save.failures.append(self.failure)
        save.is_settled = True

    def save_tensors(self, tensors: list[torch.Tensor], step: int, extra: dict[str, object] | None = None) -> None:
        super().save_tensors(tensors, step, extra)
        if step % self.config.disk_flush_interval == 0:
            for iteration in self.shards(self._rank)[NUM_FLUSHED:]:
                self.shard_path(self._rank, iteration).unlink(missing_ok=True)

    def wait_copied(self, timeout_s: Seconds) -> bool:
        """Waits until the state may change again; False if that took longer."""
        thread = self._completion_thread
        if thread is not None:
            thread.join(timeout_s)  # its error is told by `finalize_replication`, once
        return thread is None or not thread.is_alive()

    def finalize_replication(self, timeout_s: Seconds | None = None) -> bool:
        try:
            is_aligned = super().finalize_replication(timeout_s or self._patience_s)
        except RuntimeError as error:
            self.failure = f"{error}: {error.__cause__}"
            return False
        self.failure = (self.meter.failure if self.meter else "") or "the exchange did not end in time"
        return bool(is_aligned)

    def flush_for_restart(self) -> int:
        self._is_flushing = True
        self.finalize_replication(FLUSH_PATIENCE_S)
        iteration = int(super().flush_for_restart())
        self._is_flushing = False
        return iteration

    def close(self) -> None:
        """Also writes the files for a restart, if there is anything that they do not have."""
        try:
            if self._exit_flush_registered:
                self.flush_for_restart()
        finally:
            super().close()

    def shards(self, owner: int) -> list[int]:
        """Iterations of which this node has a file of that owner, newest first."""
        return list(self._disk.find_steps_on_disk(rank=owner))

    def shard_path(self, owner: int, iteration: int) -> Path:
        return Path(self._disk._folder) / f"step-{iteration}" / f"rank-{owner}.pt"

    def read_shard(self, owner: int, iteration: int) -> list[torch.Tensor]:
        """The state of an owner from this node's files, its checksums compared."""
        return list(self._disk.load(iteration, rank=owner)[1])

    def _prepare_next_capture(self) -> None:
        super()._prepare_next_capture()
        slot = self._buffer_pool.own_current
        slot.step, slot.state = -1, SlotState.EMPTY

    def _sigterm_handler(self, signum: int, frame: FrameType | None) -> None:
        if not self._is_flushing:
            super()._sigterm_handler(signum, frame)
