"""What a node agent does with its ranks, by the table at its top: over ranks and a time that are played."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from capricorn.config.cluster import ClusterConfig
from capricorn.config.fields import FrozenModel
from capricorn.launch.launch_messages import (
    AttemptLeft,
    NodeAlive,
    RankEnded,
    RankFrozen,
    StartAttempt,
    TrainingBegan,
    node_report,
    receive,
    to_bytes,
)
from capricorn.launch.node_agent import HEARTBEAT_S, LEAVE_S, NodeAgent, RankProcess
from capricorn.launch.nodes import FAILED
from capricorn.process import KILL_TIMEOUT_S
from capricorn.records.job_file import Job
from tests.support.fault_jobs import TINY

RANKS = (2, 3)
"""Of node 1 of two nodes."""


@dataclass(slots=True)
class PlayedRank(RankProcess):
    """A rank's process whose end the test holds."""

    theirs: socket.socket = field(default_factory=socket.socket)
    alive: int = -1
    """The other end of the pipe that stands for the pidfd."""
    code: int = 0
    signals: list[signal.Signals] = field(default_factory=list)
    threads: str = "S"

    def signal(self, number: signal.Signals) -> None:
        self.signals.append(number)

    def exit_code(self) -> int:
        return self.code

    def states(self) -> str:
        return self.threads

    def train(self) -> None:
        self.theirs.send(to_bytes(TrainingBegan(attempt=self.attempt)))

    def leave(self) -> None:
        self.theirs.send(to_bytes(AttemptLeft(attempt=self.attempt)))

    def orders(self) -> list[int]:
        found = []
        try:
            while message := receive(self.theirs):
                found.append(StartAttempt.model_validate_json(message).attempt)
        except BlockingIOError:
            return found
        return found

    def end(self, code: int) -> None:
        self.code = code
        self.theirs.close()
        os.close(self.alive)


class Played:
    """A node agent with the launcher at its link."""

    def __init__(self, folder: Path) -> None:
        cluster = ClusterConfig(nodes=2, ranks_per_node=2, device="cpu")
        scenario = TINY.model_copy(update={"cluster": cluster})
        job = Job(run_id="test", scenario=scenario, run_dir=folder, store_dir=folder, tokens=folder)
        self.frozen_s = scenario.launch.frozen_s
        self.now_s = 1000.0
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.link.setblocking(False)
        self.forked: list[PlayedRank] = []
        self.agent = NodeAgent(job, 1, ("127.0.0.1", 1), theirs, fork=self._fork, clock=lambda: self.now_s)

    def _fork(self, rank: int, attempt: int) -> PlayedRank:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.setblocking(False)
        reading, writing = os.pipe()
        self.forked.append(PlayedRank(rank, attempt, 0, reading, ours, theirs=theirs, alive=writing))
        return self.forked[-1]

    def start(self, attempt: int) -> None:
        self.link.send(to_bytes(StartAttempt(attempt=attempt)))
        self.turn()

    def turn(self) -> None:
        for _ in range(3):  # several things may have happened
            assert self.agent.turn(0.0)

    def pass_time(self, seconds: float) -> None:
        """Has the agent look about as often as it does in life."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += HEARTBEAT_S
            self.turn()

    def reports(self) -> list[FrozenModel]:
        """What the agent has said since the last call, without its heartbeats."""
        found: list[FrozenModel] = []
        try:
            while message := receive(self.link):
                found.append(node_report(message))
        except BlockingIOError:
            return [report for report in found if not isinstance(report, NodeAlive)]
        return found

    def rank(self, rank: int) -> PlayedRank:
        """The newest process of a rank."""
        return next(process for process in reversed(self.forked) if process.rank == rank)

    def processes(self) -> list[tuple[int, int]]:
        """Rank and attempt of each process that was forked."""
        return [(process.rank, process.attempt) for process in self.forked]


@pytest.fixture
def played(tmp_path: Path) -> Iterator[Played]:
    made = Played(tmp_path)
    made.start(0)
    made.reports()
    yield made
    made.link.close()


def test_the_first_attempt_forks_all_ranks_of_the_node(played: Played) -> None:
    assert played.processes() == [(2, 0), (3, 0)]
    assert played.reports() == []


@pytest.mark.parametrize("code", [0, 1, 4, -9, -15])
def test_the_end_of_a_rank_is_reported_with_how_it_ended(code: int, played: Played) -> None:
    played.rank(3).end(code)
    played.turn()
    assert played.reports() == [RankEnded(rank=3, attempt=0, exit_code=code)]
    assert len(played.forked) == 2


def test_a_rank_that_leaves_a_failed_attempt_is_reported_and_goes_on_in_the_next_in_its_process(played: Played) -> None:
    played.rank(2).leave()
    played.turn()
    assert played.reports() == [RankEnded(rank=2, attempt=0, exit_code=FAILED)]
    played.start(1)
    assert played.rank(2).orders() == [1]
    assert played.rank(2).signals == []
    assert len(played.forked) == 2


def test_a_rank_that_has_ended_is_forked_anew_for_the_next_attempt_and_no_earlier(played: Played) -> None:
    played.rank(2).end(-9)
    played.turn()
    assert len(played.forked) == 2
    played.start(1)
    assert played.processes() == [(2, 0), (3, 0), (2, 1)]


def test_ranks_that_still_train_are_told_to_leave_and_then_sent_on(played: Played) -> None:
    played.start(1)
    assert [played.rank(rank).signals for rank in RANKS] == [[signal.SIGTERM]] * 2
    assert played.rank(2).orders() == []
    played.rank(2).leave()
    played.turn()
    assert played.rank(2).orders() == [1]
    assert played.reports() == []


def test_a_rank_that_ends_instead_of_leaving_is_forked_anew_at_once(played: Played) -> None:
    played.start(1)
    played.rank(3).end(1)
    played.turn()
    assert played.processes()[-1] == (3, 1)
    assert played.reports() == []


def test_a_rank_that_does_not_leave_in_time_is_killed_and_forked_anew(played: Played) -> None:
    played.start(1)
    slow = played.rank(3)
    played.pass_time(LEAVE_S + 0.1)
    assert slow.signals == [signal.SIGTERM, signal.SIGKILL]
    slow.end(-9)
    played.turn()
    assert played.processes()[-1] == (3, 1)
    assert played.reports() == []


def test_attempts_that_follow_each_other_fast_end_in_the_newest(played: Played) -> None:
    played.start(1)
    played.start(2)
    played.rank(2).leave()
    played.rank(3).end(1)
    played.turn()
    assert played.rank(2).orders() == [2]
    assert played.processes()[-1] == (3, 2)
    assert played.reports() == []


def freeze(played: Played) -> None:
    """Ranks that are played give no heartbeat."""
    for rank in RANKS:
        played.rank(rank).train()
    played.pass_time(played.frozen_s + 0.5)


def test_a_rank_without_a_heartbeat_is_reported_and_killed_once(played: Played) -> None:
    freeze(played)
    played.turn()
    frozen = [RankFrozen(rank=rank, attempt=0, silent_s=played.frozen_s) for rank in RANKS]
    assert played.reports() == frozen
    assert [played.rank(rank).signals for rank in RANKS] == [[signal.SIGKILL]] * 2
    played.rank(2).end(-9)
    played.turn()
    assert played.reports() == [RankEnded(rank=2, attempt=0, exit_code=-9)]


@pytest.mark.parametrize("is_told_to_leave", [False, True])
def test_a_rank_that_leaves_in_the_moment_it_is_killed_is_not_sent_on(is_told_to_leave: bool, played: Played) -> None:
    """It would die in the next attempt, which would then have failed for nothing."""
    if is_told_to_leave:
        played.start(1)
    freeze(played)
    dying = played.rank(2)
    dying.leave()
    played.turn()
    if not is_told_to_leave:
        played.start(1)
    assert dying.orders() == []
    played.reports()
    dying.end(-9)
    played.turn()
    assert played.processes()[-1] == (2, 1)
    assert not [report for report in played.reports() if isinstance(report, RankEnded)]


@pytest.mark.parametrize(
    ("threads", "is_training", "is_found"),
    [("S", True, True), ("SR", True, False), ("S", False, False), ("T", False, True), ("T", True, True)],
)
def test_a_silent_rank_counts_as_hung_unless_it_starts_or_is_not_let_run(
    threads: str, is_training: bool, is_found: bool, played: Played
) -> None:
    rank = played.rank(2)
    rank.threads = threads
    if is_training:
        rank.train()
    played.pass_time(played.frozen_s + 0.5)
    assert (rank.signals == [signal.SIGKILL]) is is_found


@pytest.mark.parametrize("pause_s", [3.0, 3600.0])
def test_a_node_that_was_stopped_together_with_its_ranks_kills_none(pause_s: float, played: Played) -> None:
    for rank in RANKS:
        played.rank(rank).train()
        played.rank(rank).threads = "T"
    played.turn()
    played.now_s += pause_s
    played.turn()
    assert [played.rank(rank).signals for rank in RANKS] == [[]] * 2
    played.pass_time(played.frozen_s)
    assert [played.rank(rank).signals for rank in RANKS] == [[signal.SIGKILL]] * 2, "only the ranks are stopped"


def test_a_rank_that_goes_on_in_another_attempt_starts_again(played: Played) -> None:
    rank = played.rank(2)
    rank.train()
    rank.leave()
    played.turn()
    played.start(1)
    played.pass_time(played.frozen_s + 0.5)
    assert rank.signals == []


def test_a_rank_whose_process_does_not_end_though_it_was_killed_is_named_and_left(
    played: Played, capfd: pytest.CaptureFixture[str]
) -> None:
    played.start(1)
    stuck = played.rank(3)
    played.pass_time(LEAVE_S + KILL_TIMEOUT_S + 0.5)
    assert stuck.signals == [signal.SIGTERM, signal.SIGKILL]
    assert "note: rank 3" in capfd.readouterr().err
    assert played.processes()[-1] == (3, 1)


@pytest.mark.parametrize("has_left", [False, True])
def test_a_second_rank_may_die_while_the_first_is_replaced(has_left: bool, played: Played) -> None:
    played.rank(2).end(-9)
    played.turn()
    if has_left:
        played.rank(3).leave()
        played.turn()
    else:
        played.start(1)
    played.rank(3).end(-9)
    played.turn()
    if has_left:
        played.start(1)
    played.turn()
    assert sorted(played.processes()[2:]) == [(2, 1), (3, 1)]
    assert [report for report in played.reports() if isinstance(report, RankEnded) and report.attempt] == []


def test_two_ranks_may_die_at_once(played: Played) -> None:
    for rank in RANKS:
        played.rank(rank).end(-9)
    played.turn()
    played.start(1)
    assert sorted(played.processes()[2:]) == [(2, 1), (3, 1)]


def test_a_node_whose_ranks_are_well_gives_its_heartbeats(played: Played) -> None:
    for _ in range(3):
        played.now_s += HEARTBEAT_S + 0.01
        assert played.agent.turn(0.0)
        assert node_report(receive(played.link)) == NodeAlive()


def test_a_node_whose_launcher_has_gone_ends(played: Played) -> None:
    played.link.close()
    assert not played.agent.turn(0.0)
