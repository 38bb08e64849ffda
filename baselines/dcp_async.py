"""torch.distributed.checkpoint beside training: staged by a thread, written by another or by a process."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import ClassVar, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save

from capricorn.errors import StoreError
from capricorn.units import Seconds

from .dcp_library import DcpLibrary, as_error
from .dcp_process import DaemonWriter, end_daemon
from .folders import REMOVED
from .library import Write

START_S: Final = 60.0
"""What the process is given to start, which is mostly imports."""
END_S: Final = 2.0


class DcpThread(DcpLibrary):
    """The next update waits for staging, into buffers that are kept. Needs a group of its own."""

    is_async: ClassVar[bool] = True
    kind = AsyncCheckpointerType.THREAD
    _stager: DefaultStager | None = None
    _staged: Future[None] | None = None

    def open(self) -> None:
        super().open()
        on_cuda, is_shared = self.job.device.type == "cuda", self.kind is AsyncCheckpointerType.PROCESS
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=on_cuda,
                use_shared_memory=is_shared,
                use_async_staging=True,
                use_non_blocking_copy=on_cuda,
            )
        )

    def begin(self, folder: Path) -> Write:
        saving = self._start(self.named, folder)
        self._staged = saving.staging_completion
        return partial(self._finish, saving.upload_completion, folder)

    def isolate(self, timeout_s: Seconds) -> bool:
        return self._staged is None or not wait([self._staged], timeout_s).not_done

    def close(self) -> None:
        stager, self._stager = self._stager, None
        if stager is not None:
            stager.close()
        super().close()

    def _start(self, named: Mapping[str, Tensor], folder: Path) -> AsyncSaveResponse:
        how = {"async_stager": self._stager, "async_checkpointer_type": self.kind, **self.how(folder)}
        with as_error():
            saving = async_save(dict(named), **how)
        assert isinstance(saving, AsyncSaveResponse)
        return saving

    def _finish(self, written: Future[None], folder: Path) -> list[Path]:
        with as_error():
            written.result()
        return self.files(folder)


class DcpProcess(DcpThread):
    """Staged into shared memory, from which a process writes that is started beforehand."""

    kind = AsyncCheckpointerType.PROCESS

    def open(self) -> None:
        super().open()
        assert self.job.files_dir is not None
        folder = self.job.files_dir / f"{REMOVED}warm-up"
        # The first save would wait for the process to start.
        written = self._start({f"rank{self.job.rank}": torch.zeros(1)}, folder).upload_completion
        if wait([written], START_S).not_done:
            raise StoreError(f"rank {self.job.rank}: the process that writes has not started in {START_S:.0f} s")
        with as_error():
            written.result()
        if self.job.rank == 0:
            shutil.rmtree(folder)

    def writer(self, folder: Path) -> FileSystemWriter:
        node = self.job.topology.node_of(self.job.rank)
        clocks = (self.job.storage_dir, node) if self.job.storage_dir is not None else None
        return DaemonWriter(folder, clocks, **self.options)

    def abandon(self) -> None:
        end_daemon(0.0)
        super().abandon()

    def close(self) -> None:
        end_daemon(END_S)
        super().close()
