"""Learns when a save is complete on all ranks, by small reductions that the training thread issues.

A slot may be used again only when a newer iteration is complete on every rank; otherwise one owner could hold only i+1
and another only i, with nothing in common.

    state     pending  vote        next state
    idle      none     none        tracked: `track`; local, on all ranks for the same iteration
    tracked   a save   none        voting: `start_vote`; collective, returns at once
    voting    a save   under way   by `poll_vote`, which waits for the reduction:
                                     some rank has not settled           -> tracked
                                     settled on all, some rank failed    -> idle, `latest` stays
                                     settled and complete on all ranks   -> idle, `latest` is that iteration

Only the training thread moves the states. The save itself settles on the threads that carry it out.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

import torch
import torch.distributed as dist

from capricorn.units import Seconds

NANOSECONDS = 10**9


class Settling(Protocol):
    """The part of one rank in a checkpoint on its way, as far as the other ranks need to hear of it."""

    @property
    def is_settled(self) -> bool: ...
    @property
    def is_complete(self) -> bool: ...

    iteration: int


S = TypeVar("S", bound=Settling)


class CommitTracker(Generic[S]):
    """Tracks the one save that is on its way on all ranks, and the newest iteration that is complete everywhere.

    All methods are collective or depend only on what was reduced, so every rank takes the same decisions.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.latest = 0
        """Newest iteration that is complete on all ranks; 0 is none."""
        self.pending: S | None = None
        self.losses_s: tuple[Seconds, Seconds] = (0.0, 0.0)
        """The greatest losses of all ranks, from the vote that was polled last."""
        self._group = group
        self._votes = torch.zeros(4, dtype=torch.int64)
        self._work: dist.Work | None = None

    def track(self, save: S) -> None:
        """Makes this the save on its way; the one before must have settled everywhere."""
        assert self.pending is None
        self.pending = save

    @property
    def can_start_vote(self) -> bool:
        """Whether a save is pending and no vote is under way."""
        return self.pending is not None and self._work is None

    def start_vote(self, losses_s: tuple[Seconds, Seconds] = (0.0, 0.0)) -> None:
        """Starts a vote of all ranks on whether the pending save has settled, and succeeded; collective.

        The same reduction finds the greatest of the ranks' losses. Nothing happens when no vote can start.
        """
        if self.pending is None or not self.can_start_vote:
            return
        self._votes[0] = int(self.pending.is_settled)
        self._votes[1] = int(self.pending.is_complete)
        for index, loss_s in enumerate(losses_s, 2):
            self._votes[index] = -round(loss_s * NANOSECONDS)
        self._work = dist.all_reduce(self._votes, dist.ReduceOp.MIN, group=self._group, async_op=True)

    def poll_vote(self) -> bool:
        """Waits for the vote under way, if there is one, and returns whether no save is pending any more."""
        self.losses_s = (0.0, 0.0)
        if self._work is not None:
            self._work.wait()
            self._work = None
            settled, complete = bool(self._votes[0]), bool(self._votes[1])
            self.losses_s = (-int(self._votes[2]) / NANOSECONDS, -int(self._votes[3]) / NANOSECONDS)
            if settled and self.pending is not None:
                self.latest = self.pending.iteration if complete else self.latest
                self.pending = None
        return self.pending is None
