"""What systems that write files have in common: when they save, what outlives the ranks, and how it is restored.

How a checkpoint is written and read is the affair of a library.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import ClassVar, Final

from capricorn.emulation.storage import Storage
from capricorn.errors import CapricornError, ConfigError, StoreError
from capricorn.hooks import OpKey
from capricorn.runtime.comm.collectives import barrier, gather_layouts
from capricorn.runtime.save.flat_state import FlatState
from capricorn.runtime.store.slot import Layout
from capricorn.systems.interface import CheckpointSystem, ChunkEvent, Counters, JobContext, RestoreReport
from capricorn.systems.settings import FileSettings
from capricorn.units import Seconds, format_seconds

from .file_restore import agree, load_together
from .file_saves import FileSaves
from .file_writer import FileWriter
from .folders import Commit, Folders
from .library import Library

PATIENCE_S: Final = 2.0
"""What a save on its way is given to become complete when the system is closed."""


class FileCheckpoints(CheckpointSystem):
    """Writes every checkpoint into a folder of its own, which all ranks reach and which outlives them.

    The next save waits for the one before. What is complete on all ranks is learned from a reduction of a few integers
    an iteration, and old folders are removed once a newer one is complete.
    """

    kind = "files"
    settings = FileSettings
    library: ClassVar[type[Library]]
    notes: ClassVar[tuple[str, ...]] = ()
    """What is wrong with the library and stays so."""

    def __init__(self) -> None:
        self._counters = Counters()
        self._storage: Storage | None = None
        self._library: Library | None = None
        self._saves: FileSaves | None = None
        self._is_clean = False
        """Whether folders of an abandoned future are gone."""

    def attach(self, job: JobContext, state: FlatState) -> None:
        files_dir = job.files_dir
        if files_dir is None:
            what = f"{type(self).__name__} writes files"
            raise ConfigError(f"{what}: JobContext.files_dir must name a folder that all ranks reach")
        job = replace(job, settings=self.settings_in(job))
        self._job, self._state, self._timeout_s = job, state, job.config.timeout_s
        if job.storage_dir is not None:
            self._storage = Storage(job.storage_dir, job.topology.node_of(job.rank))
        self._library = library = self.library(job, state, self._storage)
        self._folders = Folders(files_dir, library.is_whole)
        layouts = gather_layouts(job.control_group, Layout(state.num_bytes, job.config.block_bytes, state.digest))
        self._commit = Commit(digests=tuple(layout.digest for layout in layouts))
        own_commit = self._commit if job.rank == 0 else None
        writer = FileWriter(library, self._folders, own_commit, self._counters, fsync=job.settings.fsync)
        self._saves = FileSaves(job, library, writer)
        library.open()

    def on_op_begin(self, op: OpKey) -> None:
        # Asked before the update, whose broadcasts it would have to wait behind.
        if op.kind == "reduce" and self._saves is not None:
            self._saves.ask()

    def before_update(self, iteration: int) -> None:
        assert self._library is not None
        assert self._saves is not None
        if not self._library.isolate(self._timeout_s):
            waited = format_seconds(self._timeout_s)
            raise StoreError(f"rank {self._job.rank}: update {iteration} still waits for staging after {waited}")
        if not self._saves.learn():
            self._saves.ask()

    def after_update(self, iteration: int) -> None:
        assert self._saves is not None
        self._saves.learn()
        if self._job.config.every == 0 or iteration % self._job.config.every:
            return
        self._saves.settle(self._timeout_s)
        self._forget_after(0)
        self._state.capture()
        self._saves.start(iteration)
        if not self.library.is_async:
            self._saves.settle(self._timeout_s)

    def latest_complete(self) -> int | None:
        return self._saves.latest or None if self._saves is not None else None

    def drain(self, timeout_s: Seconds) -> None:
        assert self._saves is not None
        self._saves.settle(timeout_s)
        if self._counters.last_failure:
            failed = f"{self._counters.failed_saves} saves failed on rank {self._job.rank}"
            raise CapricornError(f"{failed}, the last one: {self._counters.last_failure}")

    def restore(self) -> RestoreReport:
        assert self._library is not None
        assert self._saves is not None
        begin_s, rank, group = time.perf_counter(), self._job.rank, self._job.control_group
        iteration = agree(self._folders, self._commit, rank, group)
        self._forget_after(iteration)
        agreed_s = time.perf_counter()
        load_together(self._library, self._folders.of(iteration), rank, group)
        loaded_s = time.perf_counter()
        self._state.publish()
        self._saves.resume(iteration)
        sources = ("persistent",) * self._job.topology.world_size
        load_s = time.perf_counter() - loaded_s
        return RestoreReport(iteration, sources, agreed_s - begin_s, loaded_s - agreed_s, load_s)

    def close(self) -> None:
        saves, storage = self._saves, self._storage
        self._saves = self._library = self._storage = None
        if saves is not None:
            saves.close(PATIENCE_S)
        if storage is not None:
            storage.close()  # which also ends whoever still waits for it

    def counters(self) -> Counters:
        return self._counters

    def take_completed(self) -> list[int]:
        return self._saves.take_completed() if self._saves is not None else []

    def take_events(self) -> list[ChunkEvent]:
        return self._saves.take_events() if self._saves is not None else []

    def _forget_after(self, iteration: int) -> None:
        """Once, before the first save: removes what an abandoned attempt has left of later iterations."""
        if self._is_clean:
            return
        if self._job.rank == 0:
            self._folders.forget_after(iteration)
        barrier(self._job.control_group)  # or a faster rank's new files could be taken for old ones
        self._is_clean = True
