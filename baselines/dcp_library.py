"""torch.distributed.checkpoint as a library of ours, with all that is written while training waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from capricorn.emulation.storage import Storage
from capricorn.errors import StoreError
from capricorn.runtime.save.flat_state import FlatState
from capricorn.systems.interface import JobContext

from .dcp_storage import PacedReader, PacedWriter, PlainWriter
from .file_writer import in_words
from .library import Library, Write

SIGN: Final = ".metadata"
FLAT: Final = {"flatten_state_dict": False, "flatten_sharded_tensors": False}
"""Our tensors are named and whole already."""


class DcpLibrary(Library):
    """Saves tensors under their global names, and small values, which every rank has, under that of the rank."""

    is_async: ClassVar[bool] = False

    def __init__(self, job: JobContext, state: FlatState, storage: Storage | None) -> None:
        super().__init__(job, state, storage)
        prefix = f"rank{job.rank}/"
        self.named = {f"{prefix}{k}" if k.startswith("value/") else k: tensor for k, tensor in self.tensors.items()}

    def begin(self, folder: Path) -> Write:
        return partial(self._save, folder)

    def is_whole(self, folder: Path, num_ranks: int) -> bool:
        return (folder / SIGN).exists()

    def load(self, folder: Path) -> None:
        reader = PacedReader(folder, self.storage) if self.storage is not None else FileSystemReader(folder)
        with as_error():
            load(self.named, storage_reader=reader, planner=DefaultLoadPlanner(**FLAT), process_group=self.group)

    def close(self) -> None:
        _forget_plans()
        super().close()

    def how(self, folder: Path) -> dict[str, Any]:
        """The arguments of a save besides what is saved."""
        return {"storage_writer": self.writer(folder), "planner": _Planner(), "process_group": self.group}

    def writer(self, folder: Path) -> FileSystemWriter:
        if self.storage is not None:
            return PacedWriter(folder, self.storage, **self.options)
        return PlainWriter(folder, **self.options)

    @property
    def options(self) -> dict[str, Any]:
        """Of a writer."""
        # Its own fsync leaves out the folder, and of .metadata what is still in Python's buffer; ours does not.
        return {"thread_count": self.job.settings.threads, "sync_files": False}

    def files(self, folder: Path) -> list[Path]:
        """What this rank has written."""
        files = sorted(folder.glob(f"__{self.job.rank}_*.distcp"))
        return [*files, folder / SIGN] if self.job.rank == 0 else files

    def _save(self, folder: Path) -> list[Path]:
        with as_error():
            save(self.named, **self.how(folder))
        return self.files(folder)


class _Planner(DefaultSavePlanner):
    """Plans once: ranks send their plans again only if they have changed. The library keeps them by this name."""

    def __init__(self) -> None:
        super().__init__(**FLAT, enable_plan_caching=True)


def _forget_plans() -> None:
    for plans in vars(SavePlanner).values():
        if isinstance(plans, dict):
            plans.pop(_Planner.__name__, None)


@contextmanager
def as_error() -> Iterator[None]:
    """Makes of what the library raises, which is no Exception, a StoreError that names the rank."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        if not isinstance(cause, Exception):
            raise cause from None  # a signal that came meanwhile
        raise StoreError(f"rank {rank}: {in_words(cause)}") from None
