"""What a library that writes checkpoints into files must be able to do, and the group its ranks talk in.

Knows no schedule, and does not decide which checkpoint counts.
"""

from __future__ import annotations

import abc
import gc
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import ClassVar, TypeAlias

import torch.distributed as dist

from capricorn.emulation.storage import Storage
from capricorn.runtime.save.flat_state import FlatState
from capricorn.systems.interface import JobContext
from capricorn.units import Bytes, Seconds

Write: TypeAlias = Callable[[], Sequence[Path]]
"""Does what is left of a save once it has begun, and yields the files that this rank has written."""


class Library(abc.ABC):
    """One rank's use of it. All ranks call the same in the same order, and never while a save is on its way."""

    is_async: ClassVar[bool] = True
    """Whether training goes on while the rest of a save is done."""
    talks: ClassVar[bool] = True
    """Whether its ranks need a group of their own, beside that of the training."""

    def __init__(self, job: JobContext, state: FlatState, storage: Storage | None) -> None:
        """`storage` is charged for all bytes, if it is modelled. Nothing is started yet."""
        self.job, self.tensors, self.storage = job, state.tensors, storage
        self.timeout_s: Seconds = job.config.timeout_s
        self.num_bytes: Bytes = sum(tensor.nbytes for tensor in state.tensors.values())
        self.group: dist.ProcessGroup | None = None

    def open(self) -> None:
        """Makes ready."""
        if self.talks:
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout_s))

    @abc.abstractmethod
    def begin(self, folder: Path) -> Write:
        """Starts a checkpoint of the state as it is now; what it yields does the rest, beside training if it may."""

    def isolate(self, timeout_s: Seconds) -> bool:
        """Waits until an update cannot change what is written; False if that took longer."""
        return True

    @abc.abstractmethod
    def is_whole(self, folder: Path, num_ranks: int) -> bool:
        """Whether its own sign says that all of a checkpoint of so many ranks is there."""

    @abc.abstractmethod
    def load(self, folder: Path) -> None:
        """Reads this rank's part into the live tensors."""

    def recover(self) -> None:
        """Makes ready for the next save after one has failed on some rank.

        What a failed one has left under way in its group would be taken for a part of the next.
        """
        if self.talks:
            self.close()
            self.open()

    def abandon(self) -> None:
        """Makes the save on its way fail soon on all ranks; a rank that could not begin it calls this alone."""
        self._end_group()
        gc.collect()  # sockets close, so that peers notice, with the last reference; an error may hold it in a circle

    def give_up(self) -> None:
        """Makes the save on its way fail soon, whatever it waits for; nothing but `close` may follow."""
        self.abandon()
        if self.storage is not None:
            self.storage.close()

    def close(self) -> None:
        """Ends what `open` has started, also half of it; a rank may call it alone."""
        self._end_group()

    def charge(self, num_bytes: Bytes) -> None:
        """Returns when the storage has taken or given that many bytes, if it is modelled."""
        if self.storage is not None:
            self.storage.charge(num_bytes)

    def _end_group(self) -> None:
        group, self.group = self.group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)
