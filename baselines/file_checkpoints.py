"""Systems that write every checkpoint into a folder of files by a library: the two classes to subclass.

A `Library` writes and reads one rank's part of a checkpoint. `FileCheckpoints` is the system around it: it decides when
to save, which checkpoint counts, what is restored and what is removed. A system of one's own is

    class OneFile(Library):
        def write(self, folder: Path) -> list[Path]: ...
        def load(self, folder: Path) -> None: ...

    class MySystem(FileCheckpoints):
        library = OneFile

There is one save at a time; the next waits for it. Its way on each rank:

    state      entered by                                                        thread            collective
    begun      `Library.begin`, after an update whose iteration is due           training          all ranks
    isolated   `Library.isolate`, before the next update changes the state       training          no
    written    the rest of the save (`Write`), then fsync if it is wanted,       writer, or the    as the library
               then on rank 0 the commit                                         training thread   needs it
    failed     an error in `begin` or in the rest; after one in `begin`          as above          no
               `Library.abandon` makes the save fail on the others too
    settled    the rank has written its part, or has failed to                   as above          no
    complete   a reduction finds that all ranks have written it; the             training          all ranks
               writer thread of rank 0 then removes older checkpoints
    lost       a reduction finds that all have settled and one has failed;       training          all ranks
               `Library.recover` makes ready for the next

The reduction starts when the gradients are reduced, or before the next update, and its answer is taken before that
update, after it, or at the next save: always at a moment to which all ranks come.
"""

from __future__ import annotations

import abc
import gc
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import ClassVar, Final, TypeAlias

import torch.distributed as dist
from pydantic import BaseModel

from capricorn.emulation.storage import Storage
from capricorn.errors import CapricornError, ConfigError, NoCompleteCheckpointError, StoreError
from capricorn.hooks import OpKey
from capricorn.runtime.comm.collectives import barrier, gather_layouts, maximum, newest
from capricorn.runtime.commit_tracker import CommitTracker
from capricorn.runtime.deadline import OWN_FRAC, Deadline, check_timeout
from capricorn.runtime.store.slot import Layout
from capricorn.systems.flat_state import FlatState
from capricorn.systems.interface import CheckpointSystem, ChunkEvent, Counters, JobContext, RestoreReport
from capricorn.systems.settings import FileSettings
from capricorn.units import Bytes, Seconds, format_seconds

from .checkpoint_folders import CheckpointFolders, Commit, sync, write_whole

PATIENCE_S: Final = 2.0
"""What a save on its way is given to become complete when the system is closed."""
MAX_EVENTS: Final = 1000
"""Writes that are kept for the timeline until somebody takes them."""

Write: TypeAlias = Callable[[], Sequence[Path]]
"""Does what is left of a save once it has begun, and returns the files that this rank has written."""


class Library(abc.ABC):
    """Writes and reads one rank's part of a checkpoint.

    A subclass has `load`, and `write` or, for more than one file written while training waits, `begin` and `is_whole`.
    It may raise any `Exception`: a save that fails is counted, and training goes on; a load that fails ends the
    attempt on all ranks with that error.
    Unless something else is said, a method is called by the training thread, by all ranks in the same order, and never
    while a save is on its way; so it may use collectives, on `group`.

    Attributes:
        job: who and where this rank is.
        tensors: the live tensors of this rank's state by their global names, which are the same after a restart.
        num_bytes: their size.
        timeout_s: the longest that anything may wait for another rank.
        storage: the modelled storage that `charge` charges; None where storage is real.
        clocks: its folder and the node of this rank, by which another process opens it.
        fsync: whether a checkpoint counts only once it is on the medium.
        group: a process group for this library alone, if it `needs_group` and is open.
    """

    is_async: ClassVar[bool] = False
    """Whether training goes on while the rest of a save is done.

    The next update then changes the tensors, so the library must have copied them before `isolate` returns.
    """
    needs_group: ClassVar[bool] = False
    """Whether its ranks talk to each other, for which they need a group beside that of the training."""

    def __init__(self, job: JobContext, state: FlatState) -> None:
        """Starts nothing yet; `open` does."""
        self.job, self.tensors, self.fsync = job, state.tensors, job.settings.fsync
        self.timeout_s: Seconds = job.config.timeout_s
        self.num_bytes: Bytes = sum(tensor.nbytes for tensor in state.tensors.values())
        node = job.topology.node_of(job.rank)
        self.clocks = (job.storage_dir, node) if job.storage_dir is not None else None
        self.storage = Storage(*self.clocks) if self.clocks is not None else None
        self.group: dist.ProcessGroup | None = None

    def open(self) -> None:
        """Makes ready for saves and restores; called once before the first, and by `recover`."""
        if self.needs_group:
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout_s))

    def begin(self, folder: Path) -> Write:
        """Starts a checkpoint of the state as it is now, in a folder that need not exist, and returns what is left.

        What is left is done beside training, by the writer thread, if the library `is_async`; else at once, by the
        training thread. By default it is `write`, and the sign that `is_whole` looks for.
        """
        return partial(self._write_and_sign, folder)

    def write(self, folder: Path) -> list[Path]:
        """Writes all tensors into a folder that all ranks share, and returns the files that this rank has made.

        It charges the storage by `charge` for them. Called by the training thread, or by the writer thread if the
        library `is_async`; on all ranks for the same checkpoint.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method write or begin")

    def isolate(self, timeout_s: Seconds) -> bool:
        """Waits until an update cannot change what is written; returns False if that took longer.

        Called before each update, also while a save is on its way; not collective.
        """
        return True

    def is_whole(self, folder: Path, num_ranks: int) -> bool:
        """Returns whether all that so many ranks have written is in a folder; by default by the signs of `begin`.

        Called on rank 0 alone, by the training thread or the writer thread, at any time: it only looks at files.
        """
        return all(_is_as_signed(folder, _sign_of(folder, rank)) for rank in range(num_ranks))

    @abc.abstractmethod
    def load(self, folder: Path) -> None:
        """Reads this rank's part into the live tensors; it charges the storage by `charge` for what it reads."""

    def recover(self) -> None:
        """Makes ready for the next save after one has failed on some rank.

        What a failed one has left under way in its group would be taken for a part of the next.
        """
        if self.needs_group:
            self.close()
            self.open()

    def abandon(self) -> None:
        """Makes the save on its way fail soon on all ranks; called by a rank alone that could not begin it."""
        self._end_group()
        gc.collect()  # sockets close, so that peers notice, with the last reference; an error may hold it in a circle

    def give_up(self) -> None:
        """Makes the save on its way fail soon on this rank, whatever it waits for; nothing but `close` follows.

        Called by a rank alone, while the writer thread is busy with that save.
        """
        self.abandon()
        if self.storage is not None:
            self.storage.close()

    def close(self) -> None:
        """Ends what `open` has started, also half of it; called by a rank alone, or by `recover`."""
        self._end_group()

    def charge(self, num_bytes: Bytes) -> None:
        """Returns when a modelled storage has taken or given that many bytes; any thread may call it."""
        if self.storage is not None:
            self.storage.charge(num_bytes)

    def _write_and_sign(self, folder: Path) -> list[Path]:
        folder.mkdir(exist_ok=True)
        files = self.write(folder)
        if self.fsync:
            sync(files, folder)  # before the sign that makes them count
        lines = [f"{file.stat().st_size} {file.relative_to(folder)}" for file in files]
        sign = write_whole(_sign_of(folder, self.job.rank), "\n".join(lines))
        self.charge(sign.stat().st_size)
        return [*files, sign]

    def _end_group(self) -> None:
        group, self.group = self.group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


class FileSave:
    """One rank's part of a checkpoint on its way to storage.

    Attributes:
        failure: what went wrong on this rank, in words; empty if nothing did.
    """

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration
        self.failure = ""
        self._settled = threading.Event()

    def settle(self, failure: str = "") -> None:
        self.failure = failure
        self._settled.set()

    def wait(self, timeout_s: Seconds) -> bool:
        """Waits until it is written or has failed; returns False if that took longer."""
        return self._settled.wait(timeout_s)

    @property
    def is_settled(self) -> bool:
        return self._settled.is_set()

    @property
    def is_complete(self) -> bool:
        return self.is_settled and not self.failure


class FileCheckpoints(CheckpointSystem):
    """Writes every checkpoint into a folder of its own, which all ranks reach and which outlives them.

    A subclass gives `library`, and `settings` if it has more than `FileSettings`. Old folders are removed once a newer
    checkpoint is complete.
    """

    kind = "files"
    settings: ClassVar[type[BaseModel] | None] = FileSettings
    library: ClassVar[type[Library]]

    def __init_subclass__(cls) -> None:
        if cls.settings is None or not issubclass(cls.settings, FileSettings):
            raise TypeError(f"{cls.__name__}.settings must be a subclass of capricorn.FileSettings")

    def __init__(self) -> None:
        self._counters, self._events = Counters(), deque[ChunkEvent](maxlen=MAX_EVENTS)
        self._completed: list[int] = []
        self._save: FileSave | None = None
        self._usual_s: Seconds = math.inf
        """How long the last save took to write."""
        self._pruning: Future[None] | None = None
        self._is_open = self._has_failed = False
        self._is_clean = False
        """Whether folders of an abandoned future are gone."""

    def make_library(self, job: JobContext, state: FlatState) -> Library:
        """Returns the library of this rank; to be overridden where it depends on settings."""
        return self.library(job, state)

    def attach(self, job: JobContext, state: FlatState) -> None:
        if job.files_dir is None:
            what = f"{type(self).__name__} writes files"
            raise ConfigError(f"{what}: JobContext.files_dir must name a folder that all ranks reach")
        files_dir, job = job.files_dir, replace(job, settings=self.settings_in(job))
        self._job, self._state, self._keep = job, state, job.settings.keep
        self._timeout_s = check_timeout("system.timeout_s", job.config.timeout_s)
        self._library = self.make_library(job, state)
        self._folders = CheckpointFolders(files_dir, self._library.is_whole)
        self._tracker = CommitTracker[FileSave](job.control_group)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="capricorn-files")
        self._is_open = True
        layouts = gather_layouts(job.control_group, Layout(state.num_bytes, job.config.block_bytes, state.digest))
        self._commit = Commit(digests=tuple(layout.digest for layout in layouts))
        self._library.open()

    def on_op_begin(self, op: OpKey) -> None:
        # Asked before the update, whose broadcasts it would have to wait behind.
        if op.kind == "reduce" and self._is_open:
            self._tracker.start_vote()

    def before_update(self, iteration: int) -> None:
        self.iteration_order.check(iteration)
        if not self._library.isolate(self._timeout_s):
            waited = format_seconds(self._timeout_s)
            raise StoreError(f"rank {self._job.rank}: update {iteration} still waits for staging after {waited}")
        if not self._learn():
            self._tracker.start_vote()

    def after_update(self, iteration: int) -> None:
        iteration = self.iteration_order.advance(iteration)
        self._learn()
        if self._job.config.every == 0 or iteration % self._job.config.every:
            return
        self._settle(self._timeout_s)
        self._forget_after(None)
        self._state.capture()
        self._start(iteration)
        if not self._library.is_async:
            self._settle(self._timeout_s)

    def latest_complete(self) -> int | None:
        return self._tracker.latest if self._is_open else None

    def drain(self, timeout_s: Seconds) -> None:
        self._settle(timeout_s, Deadline(timeout_s))
        if complaint := self._counters.complaint(self._job.rank):
            raise CapricornError(complaint)

    def restore(self) -> RestoreReport:
        self.iteration_order.check_restore()
        begin_s = time.perf_counter()
        self._state.follow()
        iteration = self._agree()
        self._forget_after(iteration)
        agreed_s = time.perf_counter()
        self._load(self._folders.of(iteration))
        loaded_s = time.perf_counter()
        self._state.publish()
        self._tracker.latest = self.iteration_order.advance(iteration)
        sources = ("persistent",) * self._job.topology.world_size
        load_s = time.perf_counter() - loaded_s
        return RestoreReport(iteration, sources, agreed_s - begin_s, loaded_s - agreed_s, load_s)

    def close(self) -> None:
        """Lets the save on its way become complete, if it does so soon, and ends the library; not collective."""
        if not self._is_open:
            return
        self._is_open, save = False, self._save
        if save is not None:
            if not save.wait(min(PATIENCE_S, 2 * self._usual_s)):
                self._library.give_up()  # it waits for a peer that is gone, or its storage stalls
                save.wait(PATIENCE_S)
            self._has_failed |= not save.is_complete
        if self._pruning is not None:
            wait([self._pruning], PATIENCE_S)
        self._writer.shutdown(wait=False, cancel_futures=True)
        self._library.close()
        if self._has_failed:
            gc.collect()  # its error holds the group in a circle, and the threads of a group end with it
        if self._library.storage is not None:
            self._library.storage.close()  # which also ends whoever still waits for it

    def counters(self) -> Counters:
        return self._counters

    def take_completed(self) -> list[int]:
        taken, self._completed = self._completed, []
        return taken

    def take_events(self) -> list[ChunkEvent]:
        return [self._events.popleft() for _ in range(len(self._events))]

    # --- the training thread, on all ranks

    def _start(self, iteration: int) -> None:
        """Starts a save of the state as it is now; the one before must have settled."""
        save, begin_s = FileSave(iteration), time.perf_counter()
        self._save = save
        self._tracker.track(save)
        try:
            write = self._library.begin(self._folders.of(iteration))
        except Exception as error:  # noqa: BLE001 - a library raises what it likes, and training goes on
            save.settle(in_words(error))
        if save.is_settled:  # and the error, which may hold the library's group, is gone
            self._library.abandon()  # or the others would wait for this rank
            return
        self._counters.staged_bytes += self._library.num_bytes
        if self._library.is_async:
            self._writer.submit(self._finish, save, write, time.perf_counter())
        else:
            self._finish(save, write, begin_s)

    def _settle(self, timeout_s: Seconds, deadline: Deadline | None = None) -> None:
        """Blocks until no save is on its way on any rank; each waits for its own, so one reduction is enough.

        The rank's own save has `timeout_s`; with a deadline the reductions must be over by then, too.

        Raises:
            StoreError: this rank's part is still not written.
            PeerLostError: another rank's part is not, or the rank is gone.
        """
        if self._learn(deadline):
            return
        own_s = timeout_s if deadline is None else OWN_FRAC * deadline.left_s
        if self._save is not None and not self._save.wait(own_s):
            late = f"iteration {self._save.iteration} is not written after {format_seconds(timeout_s)}"
            raise StoreError(f"rank {self._job.rank}: {late}; if the storage is that slow, raise system.timeout_s")
        self._tracker.start_vote()
        self._learn(deadline)

    def _learn(self, deadline: Deadline | None = None) -> bool:
        """Takes the answer of the last reduction; returns whether no save is on its way any more."""
        if not self._tracker.poll_vote(None if deadline is None else deadline.left_s):
            return False
        save, self._save = self._save, None
        if save is not None:
            self._book(save)
        return True

    def _book(self, save: FileSave) -> None:
        """Counts a save that has settled on all ranks, and makes ready for the next."""
        if save.failure:
            self._counters.failed_saves += 1
            self._counters.last_failure = f"iteration {save.iteration}: {save.failure}"
        if self._tracker.latest != save.iteration:
            self._has_failed = True
            self._library.recover()
            return
        self._completed.append(save.iteration)
        if self._job.rank == 0:
            self._pruning = self._writer.submit(self._prune, save.iteration)

    def _forget_after(self, iteration: int | None) -> None:
        """Removes, once and before the first save, what an abandoned attempt has left of later iterations."""
        if self._is_clean:
            return
        if self._job.rank == 0:
            self._folders.forget_after(iteration)
        # Or a faster rank's new files could be taken for old ones.
        barrier(self._job.control_group, "rank 0 to remove the files of an abandoned future")
        self._is_clean = True

    def _agree(self) -> int:
        """Returns the newest complete iteration, as rank 0 sees it.

        Raises:
            NoCompleteCheckpointError: there is none.
            ConfigError: it is of other ranks or another layout than this job has.
        """
        complete = self._folders.complete() if self._job.rank == 0 else []
        iteration = newest(self._job.control_group, max(complete, default=None))
        if iteration is None:
            raise NoCompleteCheckpointError(f"{self._folders.root} holds no complete checkpoint")
        folder = self._folders.of(iteration)
        written = Commit.read(folder)
        if written is None:
            reader = f"rank {self._job.rank} cannot read {folder}"
            raise StoreError(f"{reader}, which rank 0 takes for complete; do both see one folder?")
        self._commit.check(written, folder)
        return iteration

    def _load(self, folder: Path) -> None:
        """Reads every rank's part of a checkpoint into its live tensors.

        Raises:
            StoreError: on all ranks, if one could not.
        """
        failure, rank = "", self._job.rank
        try:
            self._library.load(folder)
        except Exception as error:  # noqa: BLE001 - a library raises what it likes, and the others wait to hear of it
            failure = f": {in_words(error)}"
        failed = maximum(self._job.control_group, rank + 1 if failure else 0) - 1
        if failed >= 0:
            raise StoreError(f"rank {rank if failure else failed} cannot load {folder}{failure}")

    # --- the writer thread, or the training thread where it waits; each rank alone

    def _finish(self, save: FileSave, write: Write, begin_s: Seconds) -> None:
        try:
            files = write()
            self._seal(self._folders.of(save.iteration), files)
            num_bytes = sum(file.stat().st_size for file in files)
        except BaseException as error:  # noqa: BLE001 - a library raises what it likes, and training goes on
            save.settle(in_words(error))
        else:
            end_s = time.perf_counter()
            self._usual_s = end_s - begin_s
            self._counters.sent_bytes += num_bytes
            self._events.append(ChunkEvent("write", save.iteration, begin_s, end_s, num_bytes))
            save.settle()

    def _seal(self, folder: Path, files: Sequence[Path]) -> None:
        """Makes what was written last, and on rank 0 count."""
        if self._library.fsync:
            sync(files, folder)
        if self._job.rank == 0:
            commit = self._commit.write(folder)
            self._library.charge(commit.stat().st_size)
            if self._library.fsync:
                sync([commit], folder.parent)

    def _prune(self, newest: int) -> None:
        try:
            self._folders.prune(newest, self._keep)
        except OSError as error:
            self._counters.last_failure = f"checkpoints before {newest} stay: {in_words(error)}"


def in_words(error: BaseException) -> str:
    """Returns what went wrong, in one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _sign_of(folder: Path, rank: int) -> Path:
    """Returns the file that lists, a size and a name a line, what a rank has written, once all of it is there."""
    return folder / f"rank{rank}.files"


def _is_as_signed(folder: Path, sign: Path) -> bool:
    """Returns whether the files that a rank has signed are there, none of them cut short."""
    try:
        lines = [line.partition(" ") for line in sign.read_text(encoding="utf-8").splitlines()]
        return all((folder / name).stat().st_size == int(size) for size, _, name in lines)
    except (FileNotFoundError, ValueError):
        return False
