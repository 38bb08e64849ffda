"""One checkpoint of one rank on its way, as all threads that carry it out see it.

    state      entered when                                                        moved by
    waiting    an update ended before the save before had settled on all ranks;    training thread
               there is no object yet, only the iteration (with `max_lost` = 1
               the update waits instead)
    staging    `Executor.start`: the local slot is WRITING, block after block is   training thread, then stager
               copied from the live state, by one thread or several
    local      the slot is COMPLETE (`finish_staging`); the next update may begin  stager
    sending    beside staging: holder after holder takes its turn (`wait_turn`),   one sender for each holder
               is sent each block once it is staged, and acknowledges the whole
    settled    staging and all links have ended (`finish_staging`, `finish_link`)  stager or sender, the last to end
      complete   without a failure
      failed     with failures; the older checkpoint is intact
    given up   settled as failed although threads are still at it: the deadline    training thread
               passed, or the system was closed
    committed  a vote found it complete on all ranks; see `commit_tracker`         training thread, collective

Only the vote is collective. With a live source, replicas are sent from the live state instead of the slot, and the
next update waits until the save has settled.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from capricorn.planner.plan import Plan
from capricorn.runtime.save.live_source import LiveSource
from capricorn.runtime.store.slot import Slot
from capricorn.units import Seconds

MAX_TURNS = 100
"""Deadlines that one replica may take to get out before those that follow are given up."""


class ReplicatedSave:
    """One checkpoint of one rank on its way: staged into a local slot, then replicated.

    Attributes:
        is_local: whether the copy in this node's memory is complete.
        failures: what went wrong, in words; empty when all replicas are in place.
        live: the live state, if replicas are sent from it instead of the slot.
    """

    def __init__(
        self, iteration: int, keep: int | None, plan: Plan, holders: Sequence[int], live: LiveSource | None = None
    ) -> None:
        """Makes a save that is about to be staged.

        Args:
            iteration: of the state.
            keep: newest iteration that is complete on all ranks, whose slots must stay; None if there is none.
            plan: in which order and when its chunks are sent.
            holders: the ranks that get a replica each, in this order.
            live: the live state, if replicas are sent from it.
        """
        self.live = live
        self.iteration, self.keep, self.plan = iteration, keep, plan
        self.is_local = False
        self.failures: list[str] = []
        self.slot: Slot | None = None
        self._staged_blocks = 0
        """So many, from the first on, are in the slot."""
        self._early_blocks: set[int] = set()
        """Further ones that are, behind a gap."""
        self._is_staged = False
        self._is_given_up = False
        self._open_links = len(holders)
        self._turns = list(holders)
        self._changed = threading.Condition()

    def advance(self, staged_blocks: int) -> None:
        """Notes that so many blocks, from the first on, are in the slot."""
        with self._changed:
            self._staged_blocks = staged_blocks
            self._changed.notify_all()

    def note_staged(self, index: int) -> None:
        """Notes that a block is in the slot; blocks may come in any order, from several threads."""
        with self._changed:
            self._early_blocks.add(index)
            if index != self._staged_blocks:
                return
            while self._staged_blocks in self._early_blocks:
                self._early_blocks.remove(self._staged_blocks)
                self._staged_blocks += 1
            self._changed.notify_all()

    def finish_staging(self, failure: str = "") -> None:
        """Notes that staging has ended, and why it failed if it did."""
        with self._changed:
            self._is_staged = True
            self.is_local = not failure
            if failure:
                self.failures.append(failure)
            self._changed.notify_all()

    def wait_turn(self, holder: int, timeout_s: Seconds) -> bool:
        """Waits until the holders before this one have been sent theirs; returns False if that took too long.

        Replicas leave one after the other, as planned: they share this rank's end of the link. Each may take as long as
        the gate holds it.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_given_up or self._turns[:1] == [holder], MAX_TURNS * timeout_s)
            return not self._is_given_up and self._turns[:1] == [holder]

    def end_turn(self, holder: int) -> None:
        """Notes that a holder has been sent its replica, or will not be."""
        with self._changed:
            if holder in self._turns:
                self._turns.remove(holder)
            self._changed.notify_all()

    def finish_link(self, failure: str = "") -> None:
        """Notes that one holder has acknowledged its replica, or why it has not."""
        with self._changed:
            if failure:
                self.failures.append(failure)
            self._open_links -= 1
            self._changed.notify_all()

    def is_block_staged(self, index: int) -> bool:
        """Tells whether a block is in the slot."""
        return self._staged_blocks > index

    def wait_block(self, index: int, timeout_s: Seconds) -> bool:
        """Waits until a block is staged; returns False if staging failed or took longer."""
        with self._changed:
            self._changed.wait_for(lambda: self._staged_blocks > index or self._is_staged, timeout_s)
            return self._staged_blocks > index

    def wait_staged(self, timeout_s: Seconds) -> bool:
        """Waits until the local copy is complete or has failed; returns False if that took longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_staged, timeout_s)

    def wait_settled(self, timeout_s: Seconds) -> bool:
        """Waits until all copies are in place or have failed; returns False if that took longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_settled, timeout_s)

    def give_up(self, failure: str) -> None:
        """Settles the save as failed, whatever its threads still do."""
        with self._changed:
            self._is_given_up = True
            self.failures.append(failure)
            self._changed.notify_all()

    @property
    def is_given_up(self) -> bool:
        """Whether nobody waits for the save any more; the live state it is sent from may change from now on."""
        return self._is_given_up

    @property
    def is_settled(self) -> bool:
        """Whether all copies are in place or have failed."""
        return self._is_given_up or (self._is_staged and self._open_links == 0)

    @property
    def is_complete(self) -> bool:
        """Whether all copies are in place."""
        return self.is_settled and not self.failures
