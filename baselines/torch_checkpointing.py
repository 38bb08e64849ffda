"""torch_checkpointing, the real library: staged into shared memory beside training, written by a process of its own.

The library has the name of this module and is meant by every absolute import of it.
"""

from __future__ import annotations

import shutil
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

from torch_checkpointing import CheckpointManager
from torch_checkpointing.checkpoint_process import CheckpointProcess
from torch_checkpointing.checkpoint_saver import AsyncCheckpointSaver

from capricorn.errors import StoreError
from capricorn.units import Seconds

from .checkpointing_settings import END_S, UNFINISHED, settings
from .files import FileCheckpoints
from .library import Library, Write
from .sharing import end_sharing, share_in

KEY: Final = "state"
"""Of the one item, which becomes one file a rank."""
TICK_S: Final[Seconds] = 0.001


class _Manager(Library):
    """Its default commit: all ranks meet in the store of the job, then rank 0 gives the folder its name."""

    talks: ClassVar[bool] = False
    _manager: CheckpointManager | None = None
    _num_opened = 0

    def open(self) -> None:
        is_first = self._num_opened == 0
        share_in(self.job.store_dir)
        if is_first and self.job.rank == 0:
            assert self.job.files_dir is not None
            for folder in self.job.files_dir.glob(f"{UNFINISHED}*"):
                shutil.rmtree(folder)
        self._manager = CheckpointManager(settings(self.job, self._num_opened))
        if is_first:  # later ones start beside training
            self._process.wait_for_init()
            self._manager.prewarm_staging({KEY: self.tensors})
        self._num_opened += 1

    def begin(self, folder: Path) -> Write:
        assert self._manager is not None
        written = self._manager.save(str(folder), {KEY: self.tensors})
        assert written is not None
        return partial(self._finish, written, folder)

    def isolate(self, timeout_s: Seconds) -> bool:
        assert self._manager is not None
        try:
            with self._manager.lock():  # its deadline is `timeout_s` rounded up
                return True
        except RuntimeError:
            return False

    def is_whole(self, folder: Path, num_ranks: int) -> bool:
        return all(_file_of(folder, rank).exists() for rank in range(num_ranks))

    def load(self, folder: Path) -> None:
        assert self._manager is not None
        self.charge(_file_of(folder, self.job.rank).stat().st_size)
        self._manager.load(str(folder), into={KEY: self.tensors}, strict=True)

    def recover(self) -> None:
        self.close()  # the process ends with the first save that fails in it
        self.open()

    def give_up(self) -> None:
        process = self._process.process
        if process is not None:
            process.processes[0].kill()

    def close(self) -> None:
        manager, self._manager = self._manager, None
        if manager is not None:
            manager._write_future = None  # whether it failed has been told
            manager.close()
            end_sharing(END_S)
        super().close()

    @property
    def _process(self) -> CheckpointProcess:
        assert self._manager is not None
        assert isinstance(self._manager._saver, AsyncCheckpointSaver)
        return self._manager._saver._checkpoint_process

    def _finish(self, written: Future[Any], folder: Path) -> list[Path]:
        try:
            written.result()
        except Exception as error:  # noqa: BLE001 - a process reports what it likes
            raise StoreError(str(error).strip().rpartition("\n")[2]) from None  # the rest is the process's traceback
        deadline_s = time.monotonic() + self.timeout_s
        while not folder.exists():  # until rank 0 has named it
            if time.monotonic() > deadline_s:
                raise StoreError(f"rank {self.job.rank}: {folder} is written but rank 0 has not put it there")
            time.sleep(TICK_S)
        return [_file_of(folder, self.job.rank)]


class TorchCheckpointing(FileCheckpoints):
    """`CheckpointManager.save` of every checkpoint.

    Source: torch_checkpointing 0.1.
    """

    library: ClassVar[type[Library]] = _Manager
    notes: ClassVar[tuple[str, ...]] = (
        "a flipped bit loads without a word",
        "files are unpickled without restriction when they are read",
        "shared memory and the process that writes are not part of the memory shown",
    )


def _file_of(folder: Path, rank: int) -> Path:
    return folder / f"{KEY}_{rank}.pt"
