"""Learns when a save is complete on all ranks, by small reductions that the training thread issues.

A slot may be used again only when a newer iteration is complete on every rank; otherwise one owner could hold only i+1
and another only i, with nothing in common.

    state     pending  vote        next state
    idle      none     none        tracked: `track`; local, on all ranks for the same iteration
    tracked   a save   none        voting: `start_vote`; collective, returns at once
    voting    a save   under way   by `poll_vote`, which waits for the reduction:
                                     ranks save different iterations     -> voting ended, OutOfStepError on all
                                     some rank has not settled           -> tracked
                                     settled on all, some rank failed    -> idle, `latest` stays
                                     settled and complete on all ranks   -> idle, `latest` is that iteration

Only the training thread moves the states. The save itself settles on the threads that carry it out.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

import torch
import torch.distributed as dist

from capricorn.errors import OutOfStepError
from capricorn.runtime.comm.collectives import finish, gather, waiting_for
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
        self.latest: int | None = None
        """Newest iteration that is complete on all ranks; None if there is none."""
        self.pending: S | None = None
        self.losses_s: tuple[Seconds, Seconds] = (0.0, 0.0)
        """The greatest losses of all ranks, from the vote that was polled last."""
        self._group = group
        self._votes = torch.zeros(6, dtype=torch.int64)
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

        The same reduction finds whether all save the same iteration, and the greatest of the ranks' losses. Nothing
        happens when no vote can start.

        Raises:
            PeerLostError: a peer is gone.
        """
        if self.pending is None or not self.can_start_vote:
            return
        iteration = self.pending.iteration
        losses_ns = [-round(loss_s * NANOSECONDS) for loss_s in losses_s]
        votes = [int(self.pending.is_settled), int(self.pending.is_complete), iteration, -iteration, *losses_ns]
        self._votes = torch.tensor(votes, dtype=torch.int64)
        with waiting_for(self._group, self._what()):
            self._work = dist.all_reduce(self._votes, dist.ReduceOp.MIN, group=self._group, async_op=True)

    def poll_vote(self, timeout_s: Seconds | None = None) -> bool:
        """Waits for the vote under way, if there is one, and returns whether no save is pending any more.

        A vote that is not over within `timeout_s` stays under way.

        Raises:
            PeerLostError: a peer is gone, or did not come in time.
            OutOfStepError: on all ranks, if they save different iterations.
        """
        self.losses_s = (0.0, 0.0)
        if self._work is not None:
            finish(self._group, self._work, self._what(), timeout_s)
            self._work = None
            settled, complete, lowest, highest, *losses_ns = self._votes.tolist()
            if lowest != -highest:
                self._refuse_mixed()
            self.losses_s = (-losses_ns[0] / NANOSECONDS, -losses_ns[1] / NANOSECONDS)
            if settled and self.pending is not None:
                self.latest = self.pending.iteration if complete else self.latest
                self.pending = None
        return self.pending is None

    def _what(self) -> str:
        return f"the vote on iteration {self.pending.iteration}" if self.pending is not None else "a vote"

    def _refuse_mixed(self) -> None:
        """Raises OutOfStepError; collective, as all ranks have seen the same votes."""
        assert self.pending is not None
        mine = torch.tensor([self.pending.iteration])
        found = enumerate(int(each) for each in gather(self._group, mine, "the iterations of the others"))
        saved = ", ".join(f"rank {rank} saves iteration {iteration}" for rank, iteration in found)
        raise OutOfStepError(f"{saved}: all ranks must count alike; nothing was kept of these")
