"""The vote on a checkpoint: all ranks decide alike, or end with one error that names who waited for what."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from capricorn.errors import OutOfStepError, PeerLostError, TransportError
from capricorn.runtime.comm import collectives
from capricorn.runtime.commit_tracker import CommitTracker
from tests.runtime.test_replicating_system import Toy
from tests.support.runs import polls
from tests.support.spawn import run_ranks


@dataclass
class Saved:
    """A save that has settled, with or without success."""

    iteration: int
    is_complete: bool = True
    is_settled: bool = True


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def vote_on(rank: int, num_ranks: int, iterations: tuple[int, ...]) -> Any:
    tracker = CommitTracker[Saved](world())
    tracker.track(Saved(iterations[rank]))
    tracker.start_vote((0.5, 0.25 * rank))
    try:
        tracker.poll_vote()
    except OutOfStepError as error:
        return str(error), tracker.latest, tracker.poll_vote()
    return tracker.latest, tracker.losses_s


@pytest.mark.parametrize("iteration", [0, 7, (1 << 63) - 2])
def test_what_all_ranks_save_is_complete_whatever_its_number(iteration: int) -> None:
    assert run_ranks(vote_on, 2, (iteration, iteration)) == [(iteration, (0.5, 0.25))] * 2


@pytest.mark.parametrize("iterations", [(5, 6), (0, 1), (6, 5), (0, (1 << 63) - 2)])
def test_ranks_that_save_different_iterations_all_hear_who_saves_which_and_nothing_is_complete(
    iterations: tuple[int, int],
) -> None:
    first, second = iterations
    complaint = f"rank 0 saves iteration {first}, rank 1 saves iteration {second}: "
    for said, latest, is_settled in run_ranks(vote_on, 2, iterations):
        assert said.startswith(complaint)
        assert latest is None
        assert not is_settled


def vote_late(rank: int, num_ranks: int, folder: str) -> list[Any]:
    """Rank 1 votes only once rank 0 has given up to wait."""
    tracker, has_waited = CommitTracker[Saved](world()), Path(folder) / "waited"
    tracker.track(Saved(4))
    told = []
    if rank == 0:
        tracker.start_vote()
        try:
            tracker.poll_vote(0.05)
        except PeerLostError as error:
            told.append(str(error))
        has_waited.touch()
    else:
        for _ in polls(30.0):
            if has_waited.exists():
                break
        tracker.start_vote()
    return [*told, tracker.poll_vote(30.0), tracker.latest]


def test_a_vote_that_is_late_for_a_callers_deadline_is_named_and_goes_on(tmp_path: Path) -> None:
    first, second = run_ranks(vote_late, 2, str(tmp_path))
    assert "rank 0 lost a peer while it waited for the vote on iteration 4: " in first[0]
    assert first[1:] == second == [True, 4]


COLLECTIVES = {
    "gather_texts": lambda group: collectives.gather_texts(group, "mine", 8),
    "share_text": lambda group: collectives.share_text(group, "mine"),
    "share_secret": collectives.share_secret,
    "maxima": lambda group: collectives.maxima(group, [1]),
    "newest": lambda group: collectives.newest(group, None),
    "barrier": collectives.barrier,
    "gather_addresses": lambda group: collectives.gather_addresses(group, ("here", 1)),
}


def lose_rank_0(rank: int, num_ranks: int) -> dict[str, str]:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    told = {}
    for name, collective in COLLECTIVES.items():
        try:
            collective(world())
        except PeerLostError as error:
            told[name] = str(error)
    return told


def test_each_collective_without_a_peer_is_one_error_that_names_the_rank_and_what_it_waited_for() -> None:
    _, told = run_ranks(lose_rank_0, 2, lost=(0,))
    assert told.keys() == COLLECTIVES.keys()
    assert all(text.startswith("rank 1 lost a peer while it waited for ") for text in told.values())
    assert not [text for text in told.values() if ".cc" in text or "\n" in text]
    assert issubclass(PeerLostError, TransportError)


def die_in_the_vote(rank: int, num_ranks: int, folder: str, moment: str) -> str:
    """Rank 1 ends in the vote on iteration 3, before it starts, while it is under way, or when it is decided."""
    start_vote, poll_vote = CommitTracker.start_vote, CommitTracker.poll_vote

    def is_now(tracker: CommitTracker[Any]) -> bool:
        return rank == 1 and tracker.pending is not None and tracker.pending.iteration == 3

    def start(tracker: CommitTracker[Any], *losses: Any) -> None:
        if moment == "before" and is_now(tracker):
            os.kill(os.getpid(), signal.SIGKILL)
        start_vote(tracker, *losses)

    def poll(tracker: CommitTracker[Any], *timeout: Any) -> bool:
        is_voting = is_now(tracker) and tracker._work is not None
        if moment == "under way" and is_voting:
            os.kill(os.getpid(), signal.SIGKILL)
        is_settled = poll_vote(tracker, *timeout)
        if moment == "decided" and is_voting and is_settled:
            os.kill(os.getpid(), signal.SIGKILL)
        return is_settled

    CommitTracker.start_vote, CommitTracker.poll_vote = start, poll  # type: ignore[method-assign]
    toy = Toy(rank, num_ranks, Path(folder))
    try:
        toy.train(1, 9)
        return ""
    except PeerLostError as error:
        return str(error)
    finally:
        toy.system.close()


def restore_all(rank: int, num_ranks: int, folder: str) -> list[Any]:
    toy = Toy(rank, num_ranks, Path(folder), attempt=1)
    report = toy.system.restore()
    told = [report.iteration, toy.holds(report.iteration)]
    toy.system.close()
    return told


@pytest.mark.parametrize("moment", ["before", "under way", "decided"])
def test_when_a_rank_dies_in_a_vote_the_others_are_told_and_all_agree_after_the_restart(
    tmp_path: Path, moment: str
) -> None:
    said, _ = run_ranks(die_in_the_vote, 2, str(tmp_path), moment, lost=(1,))
    assert "rank 0 lost a peer while it waited for the vote on iteration " in said
    first, second = run_ranks(restore_all, 2, str(tmp_path))
    assert first == second
    assert first[0] in (2, 3)
    assert first[1]


def drain_alone(rank: int, num_ranks: int, folder: str) -> str:
    """Rank 1 is there, and does not come to the drain before rank 0 has given it up."""
    toy, is_done = Toy(rank, num_ranks, Path(folder)), Path(folder) / "done"
    toy.train(1, 2)
    said = ""
    if rank == 0:
        try:
            toy.system.drain(1.0)
        except PeerLostError as error:
            said = str(error)
        is_done.touch()
    else:
        for _ in polls(30.0):
            if is_done.exists():
                break
    toy.system.close()
    return said


def test_a_drain_ends_at_the_callers_deadline_with_an_error_that_names_rank_and_iteration(tmp_path: Path) -> None:
    said, _ = run_ranks(drain_alone, 2, str(tmp_path), deadline_s=40.0)
    assert "rank 0 lost a peer while it waited for the vote on iteration 2: " in said
