"""Carries out one rank's saves to files, beside training or while it waits, and removes old checkpoints.

Knows files, and when this rank's part of a save is done; nothing of other ranks.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from capricorn.systems.interface import ChunkEvent, Counters
from capricorn.units import Seconds

from .folders import Commit, Folders, sync
from .library import Library, Write


class FileSave:
    """One rank's part of a checkpoint on its way to storage; to `CommitTracker` it is like any save.

    Attributes:
        failures: what went wrong, in words; empty when all of this rank's part is written.
    """

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration
        self.failures: list[str] = []
        self._settled = threading.Event()

    def settle(self, failure: str = "") -> None:
        if failure:
            self.failures.append(failure)
        self._settled.set()

    def wait(self, timeout_s: Seconds) -> bool:
        """Waits until it is written or has failed; False if that took longer."""
        return self._settled.wait(timeout_s)

    @property
    def is_settled(self) -> bool:
        return self._settled.is_set()

    @property
    def is_complete(self) -> bool:
        return self.is_settled and not self.failures


class FileWriter:
    """A thread that sees a save through, and what has been counted."""

    def __init__(
        self, library: Library, folders: Folders, commit: Commit | None, counters: Counters, *, fsync: bool
    ) -> None:
        """`commit` goes into each folder, if it is for this rank to put it there."""
        self.counters, self.events = counters, deque[ChunkEvent](maxlen=1000)
        self._library, self._folders, self._commit, self._fsync = library, folders, commit, fsync
        self.usual_s: Seconds = math.inf
        """What a save takes, by the last one."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="capricorn-files")
        self._pruning: Future[None] | None = None

    def start(self, iteration: int) -> FileSave:
        """Starts a save of the state as it is now; it has settled already where training waits for all of it."""
        save, begin_s = FileSave(iteration), time.perf_counter()
        try:
            write = self._library.begin(self._folders.of(iteration))
        except Exception as error:  # noqa: BLE001 - a library raises what it likes, and training goes on
            save.settle(in_words(error))
        if save.is_settled:
            self._library.abandon()  # or the others would wait for this rank
            return save
        self.counters.staged_bytes += self._library.num_bytes
        if self._library.is_async:
            self._pool.submit(self._finish, save, write, time.perf_counter())
        else:
            self._finish(save, write, begin_s)
        return save

    def count(self, save: FileSave) -> None:
        """Counts a save that has settled, if it failed here."""
        if save.failures:
            self.counters.failed_saves += 1
            self.counters.last_failure = f"iteration {save.iteration}: {save.failures[0]}"

    def prune(self, newest: int, keep: int) -> None:
        """Removes old checkpoints beside training."""
        self._pruning = self._pool.submit(self._prune, newest, keep)

    def close(self, patience_s: Seconds) -> None:
        """Takes nothing more, and lets old checkpoints be removed, if that is soon done."""
        if self._pruning is not None:
            wait([self._pruning], patience_s)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _finish(self, save: FileSave, write: Write, begin_s: Seconds) -> None:
        try:
            files = write()
            self._seal(self._folders.of(save.iteration), files)
            num_bytes = sum(file.stat().st_size for file in files)
        except Exception as error:  # noqa: BLE001 - a library raises what it likes, and training goes on
            save.settle(in_words(error))
        else:
            end_s = time.perf_counter()
            self.usual_s = end_s - begin_s
            self.counters.sent_bytes += num_bytes
            self.events.append(ChunkEvent("write", save.iteration, begin_s, end_s, num_bytes))
            save.settle()

    def _seal(self, folder: Path, files: Sequence[Path]) -> None:
        if self._fsync:
            sync(files, folder)
        if self._commit is not None:
            file = self._commit.write(folder)
            self._library.charge(file.stat().st_size)
            if self._fsync:
                sync([file], folder.parent)

    def _prune(self, newest: int, keep: int) -> None:
        try:
            self._folders.prune(newest, keep)
        except OSError as error:
            self.counters.last_failure = f"checkpoints before {newest} stay: {in_words(error)}"


def in_words(error: BaseException) -> str:
    """What went wrong, in one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
