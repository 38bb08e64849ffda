"""One checkpoint of one rank on its way, as all threads that carry it out see it."""

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
        live: what replicas are sent from, where that is not the slot.
    """

    def __init__(
        self, iteration: int, keep: int, plan: Plan, holders: Sequence[int], live: LiveSource | None = None
    ) -> None:
        """`holders` get a replica each, in this order."""
        self.live = live
        self.iteration, self.keep, self.plan = iteration, keep, plan
        self.is_local = False
        self.failures: list[str] = []
        self.slot: Slot | None = None
        self._staged_blocks = 0
        self._is_staged = False
        self._is_given_up = False
        self._open_links = len(holders)
        self._turns = list(holders)
        self._changed = threading.Condition()

    def advance(self, staged_blocks: int) -> None:
        with self._changed:
            self._staged_blocks = staged_blocks
            self._changed.notify_all()

    def finish_staging(self, failure: str = "") -> None:
        with self._changed:
            self._is_staged = True
            self.is_local = not failure
            if failure:
                self.failures.append(failure)
            self._changed.notify_all()

    def wait_turn(self, holder: int, timeout_s: Seconds) -> bool:
        """Waits until the holders before this one have been sent theirs; False if that took too long.

        One after the other, as planned: they share our end of the link. Each may take as long as the gate holds it.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_given_up or self._turns[:1] == [holder], MAX_TURNS * timeout_s)
            return not self._is_given_up and self._turns[:1] == [holder]

    def end_turn(self, holder: int) -> None:
        """That holder has been sent its replica, or will not be."""
        with self._changed:
            if holder in self._turns:
                self._turns.remove(holder)
            self._changed.notify_all()

    def finish_link(self, failure: str = "") -> None:
        with self._changed:
            if failure:
                self.failures.append(failure)
            self._open_links -= 1
            self._changed.notify_all()

    def is_block_staged(self, index: int) -> bool:
        return self._staged_blocks > index

    def wait_block(self, index: int, timeout_s: Seconds) -> bool:
        """Waits until a block is staged; False if staging failed or took longer."""
        with self._changed:
            self._changed.wait_for(lambda: self._staged_blocks > index or self._is_staged, timeout_s)
            return self._staged_blocks > index

    def wait_staged(self, timeout_s: Seconds) -> bool:
        """Waits until the local copy is complete or has failed; False if that took longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_staged, timeout_s)

    def wait_settled(self, timeout_s: Seconds) -> bool:
        """Waits until all copies are in place or have failed; False if that took longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_settled, timeout_s)

    def give_up(self, failure: str) -> None:
        """Settles it as failed, whatever its threads still do."""
        with self._changed:
            self._is_given_up = True
            self.failures.append(failure)
            self._changed.notify_all()

    @property
    def is_given_up(self) -> bool:
        """Whether nobody waits for it any more; what is sent from the live state may change from now on."""
        return self._is_given_up

    @property
    def is_settled(self) -> bool:
        return self._is_given_up or (self._is_staged and self._open_links == 0)

    @property
    def is_complete(self) -> bool:
        return self.is_settled and not self.failures
