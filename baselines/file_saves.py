"""The saves of all ranks, one at a time: started together, counted when complete everywhere, and old ones removed.

Knows when the ranks talk, but no file and no library.
"""

from __future__ import annotations

import gc

from capricorn.errors import StoreError
from capricorn.runtime.commit_tracker import Completion
from capricorn.systems.interface import ChunkEvent, JobContext
from capricorn.units import Seconds, format_seconds

from .file_writer import FileSave, FileWriter
from .library import Library


class FileSaves:
    """All methods but `close` are collective, or depend only on what was reduced; so all ranks take the same way."""

    def __init__(self, job: JobContext, library: Library, writer: FileWriter) -> None:
        self._rank, self._keep, self._library, self._writer = job.rank, job.settings.keep, library, writer
        self._completed: list[int] = []
        self._completion = Completion[FileSave](job.control_group)
        self._save: FileSave | None = None
        self._has_failed = False

    @property
    def latest(self) -> int:
        """Newest iteration that is complete on all ranks; 0 is none."""
        return self._completion.latest

    def resume(self, iteration: int) -> None:
        """That iteration has been restored."""
        self._completion.latest = iteration

    def start(self, iteration: int) -> None:
        """Starts a save of the state as it is now; the one before must have settled."""
        self._save = self._writer.start(iteration)
        self._completion.expect(self._save)

    def ask(self) -> None:
        """Starts to find out whether the save on its way has settled on all ranks."""
        self._completion.ask()

    def learn(self) -> bool:
        """Takes the answer; whether no save is on its way any more."""
        if not self._completion.learn():
            return False
        if self._save is not None:
            save, self._save = self._save, None
            self._book(save)
        return True

    def settle(self, timeout_s: Seconds) -> None:
        """Blocks until no save is on its way on any rank; each waits for its own, so one reduction is enough.

        Raises:
            StoreError: this rank's part is still not written.
        """
        if self.learn():
            return
        if self._save is not None and not self._save.wait(timeout_s):
            late = f"iteration {self._save.iteration} is not written after {format_seconds(timeout_s)}"
            raise StoreError(f"rank {self._rank}: {late}; if the storage is that slow, raise system.timeout_s")
        self.ask()
        self.learn()

    def take_completed(self) -> list[int]:
        """Iterations that became complete on all ranks since the last call."""
        taken, self._completed = self._completed, []
        return taken

    def take_events(self) -> list[ChunkEvent]:
        """What this rank has written since the last call."""
        events = self._writer.events
        return [events.popleft() for _ in range(len(events))]

    def close(self, patience_s: Seconds) -> None:
        """Lets the save on its way become complete, if it does so soon, and ends the library; not collective."""
        if self._save is not None and not self._save.wait(min(patience_s, 2 * self._writer.usual_s)):
            self._library.give_up()  # it waits for a peer that is gone, or its storage stalls
            self._save.wait(patience_s)
        self._has_failed |= self._save is not None and not self._save.is_complete
        self._writer.close(patience_s)
        self._library.close()
        if self._has_failed:
            gc.collect()  # its error holds the group in a circle, and the threads of a group end with it

    def _book(self, save: FileSave) -> None:
        """Of a save that has settled on all ranks."""
        self._writer.count(save)
        if self._completion.latest != save.iteration:
            self._has_failed = True
            self._library.recover()
            return
        self._completed.append(save.iteration)
        if self._rank == 0:
            self._writer.prune(save.iteration, self._keep)
