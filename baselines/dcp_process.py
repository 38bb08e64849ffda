"""The process that torch.distributed.checkpoint writes with: what it is sent, and that it ends with its trainer."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from functools import cache
from multiprocessing import parent_process, resource_sharer
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import _async_process_executor as executor
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from capricorn.emulation.storage import Storage
from capricorn.units import Seconds

from .dcp_storage import PacedWriter, PlainWriter


class DaemonWriter(FileSystemWriter):
    """Names a writer here, and is one there: what a modelled storage is made of does not travel."""

    def __init__(self, folder: Path, clocks: tuple[Path, int] | None, **options: Any) -> None:
        """`clocks`: folder and node of a modelled storage."""
        super().__init__(folder, **options)
        self._arrives_as = (folder, clocks, options)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack, self._arrives_as


def end_daemon(patience_s: Seconds) -> None:
    """Asks the process to end, if there is one, and sees to it."""
    daemon, executor._CHECKPOINT_PROCESS = executor._CHECKPOINT_PROCESS, None
    if daemon is None:
        return
    with suppress(OSError):  # it has ended by itself
        daemon._send(executor._CheckpointSaveProcessControlOpts.TERMINATE)
    process = daemon._save_process
    process.join(patience_s)
    if process.is_alive():
        process.kill()
        process.join()
    resource_sharer.stop(timeout=patience_s)  # a thread that hands out what is shared with the process


def _unpack(folder: Path, clocks: tuple[Path, int] | None, options: dict[str, Any]) -> FileSystemWriter:
    _end_with_trainer()
    return PlainWriter(folder, **options) if clocks is None else PacedWriter(folder, _storage(*clocks), **options)


@cache
def _storage(folder: Path, node: int) -> Storage:
    return Storage(folder, node)


@cache
def _end_with_trainer() -> None:
    """From now on this process is gone as soon as its trainer is, in the middle of a save or of a wait for others."""
    trainer = parent_process()
    assert trainer is not None

    def follow() -> None:
        trainer.join()
        os._exit(1)

    threading.Thread(target=follow, name="capricorn-follow", daemon=True).start()
