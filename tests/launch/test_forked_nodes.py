"""Which nodes are replaced and which attempt follows on which failure, with node agents and a time that are played."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from capricorn.config.cluster import ClusterConfig
from capricorn.config.launch_config import LaunchConfig
from capricorn.emulation.testbed import Loopback
from capricorn.errors import CapricornError
from capricorn.launch.fork_client import FakeForkServer, FakeNodeAgent, FakeProcess
from capricorn.launch.forked_nodes import GATHER_S, VACANT_TIMEOUT_S, ForkedNodes
from capricorn.launch.launch_messages import RankEnded, RankFrozen
from capricorn.launch.nodes import FAILED, UNREACHABLE, GaveUpError
from capricorn.launch.restart_policy import FIRST_ITERATION_PATIENCE_S, MAX_GAP_S, START_PATIENCE_S
from capricorn.records.job_file import Job
from capricorn.records.samples import EVENTS, EventSample, read_samples
from tests.support.comparisons import sample_of
from tests.support.fault_jobs import TINY, with_faults

NUM_NODES, MAX_RESTARTS = 3, 2
WAIT_S = 0.1


@dataclass
class World:
    """Nodes of two ranks each, started, with all that they did to others."""

    job: Job
    server: FakeForkServer = field(default_factory=FakeForkServer)
    replaced: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        (log_dir := self.job.run_dir / "log").mkdir()
        self.network = Loopback()
        self.nodes = ForkedNodes(
            self.job,
            self.network,
            log_dir,
            self.replaced.append,
            forker=self.server,
            clock=self.server.clock,
            wait=self.server.wait_readable,
        )
        self.nodes.start()
        self.first = dict(self.server.agents)

    def agent(self, node: int) -> FakeNodeAgent:
        return self.server.agents[node]

    def orders(self) -> list[list[int]]:
        """The attempts that each node's newest agent was told to start since the last call."""
        return [self.agent(node).attempts() for node in range(NUM_NODES)]

    def end(self, rank: int, exit_code: int, attempt: int = 0) -> None:
        self.agent(rank // 2).say(RankEnded(rank=rank, attempt=attempt, exit_code=exit_code))

    def wait(self) -> None:
        """Has the nodes wait until time passes, as it does once all that was said has been heard."""
        before_s = self.server.now_s
        while self.server.now_s == before_s:
            self.nodes.wait(WAIT_S)

    def wait_for(self, seconds: float) -> None:
        end_s = self.server.now_s + seconds
        while self.server.now_s < end_s:
            self.wait()

    def failures(self) -> list[tuple[int, str]]:
        """Rank and words of all failures that were recorded."""
        events = read_samples(self.job.run_dir / EVENTS, EventSample)
        return [(event.rank, event.detail) for event in events]


def make_world(folder: Path, *faults: str) -> World:
    for name in ("run", "store"):
        (folder / name).mkdir(mode=0o700)
    cluster = ClusterConfig(nodes=NUM_NODES, ranks_per_node=2, device="cpu")
    parts = {"cluster": cluster, "launch": LaunchConfig(max_restarts=MAX_RESTARTS)}
    scenario = with_faults(*faults, scenario=TINY.model_copy(update=parts))
    return World(
        Job(run_id="test", scenario=scenario, run_dir=folder / "run", store_dir=folder / "store", tokens=folder)
    )


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = make_world(tmp_path)
    yield made
    made.nodes.stop()


def test_all_nodes_start_the_first_attempt_and_the_run_is_done_once_all_ranks_are(world: World) -> None:
    assert world.orders() == [[0]] * NUM_NODES
    for rank in range(2 * NUM_NODES):
        assert not world.nodes.are_done
        world.end(rank, 0)
        world.wait()
    assert world.nodes.are_done
    assert world.failures() == []


@pytest.mark.parametrize(("exit_code", "said"), [(FAILED, []), (-9, [(3, "killed by signal 9")])])
def test_a_rank_that_fails_starts_another_attempt_on_the_same_nodes(
    exit_code: int, said: list[tuple[int, str]], world: World
) -> None:
    world.orders()
    world.end(3, exit_code)
    world.wait()
    assert world.orders() == [[1]] * NUM_NODES
    assert world.replaced == []
    assert world.agent(1) is world.first[1]
    assert world.failures() == said


def test_ranks_that_fail_in_an_attempt_that_is_over_start_no_other(world: World) -> None:
    world.orders()
    world.end(0, FAILED)
    world.wait()
    for rank in range(1, 2 * NUM_NODES):
        world.end(rank, FAILED, attempt=0)
        world.wait()
    assert world.orders() == [[1]] * NUM_NODES


def test_what_was_done_in_an_attempt_that_failed_does_not_count(world: World) -> None:
    for rank in range(2 * NUM_NODES - 1):
        world.end(rank, 0)
        world.wait()
    world.end(5, FAILED)
    world.wait()
    world.wait()
    world.end(5, 0, attempt=1)
    world.wait()
    assert not world.nodes.are_done


def test_a_lost_node_is_replaced_and_the_others_stay(world: World) -> None:
    world.orders()
    world.agent(1).die()
    world.wait()
    assert world.replaced == [1]
    assert [world.agent(node) is world.first[node] for node in range(NUM_NODES)] == [True, False, True]
    assert world.orders() == [[1]] * NUM_NODES
    assert world.failures() == [(2, "node 1 was lost")]


def test_a_node_that_cannot_reach_the_rendezvous_is_killed_and_replaced(world: World) -> None:
    world.end(4, UNREACHABLE)
    world.wait()
    assert world.replaced == [2]
    assert world.first[2].process.signals == [signal.SIGKILL]
    assert world.first[2].process.has_ended
    assert world.failures() == [(4, "node 2 cannot reach the others")]


def test_the_next_attempt_waits_for_a_machine_for_each_node_and_for_those_lost_meanwhile(world: World) -> None:
    world.orders()
    world.server.vacant = {1}
    world.agent(1).die()
    world.wait_for(20)
    assert [world.agent(node).attempts() for node in (0, 2)] == [[], []]
    world.agent(2).die()
    world.wait_for(20)
    world.server.vacant = set()
    world.wait()
    assert world.orders() == [[1]] * NUM_NODES
    assert world.replaced == [1]
    assert world.failures() == [(2, "node 1 was lost"), (4, "node 2 was lost")]


def test_a_node_that_no_machine_takes_ends_the_run_and_says_what_to_start(world: World) -> None:
    world.server.vacant = {1}
    world.agent(1).die()
    world.wait_for(VACANT_TIMEOUT_S - 5)
    with pytest.raises(CapricornError, match="no machine has taken the place of node 1 within 300 s; start one"):
        world.wait_for(10)


@pytest.mark.parametrize("delay_s", [0.0, GATHER_S / 2])
def test_nodes_that_are_lost_together_are_replaced_together(delay_s: float, world: World) -> None:
    world.agent(0).die()
    world.server.after(delay_s, world.agent(2).die)
    world.wait()
    assert world.replaced == [0, 2]
    assert world.orders()[1] == [0, 1]


def test_a_node_that_is_lost_later_costs_an_attempt_of_its_own(world: World) -> None:
    world.agent(0).die()
    world.server.after(2 * GATHER_S, world.agent(2).die)
    world.wait_for(1.0)
    assert world.replaced == [0, 2]
    assert world.orders()[1] == [0, 1, 2]


def test_all_nodes_may_be_lost_at_once(world: World) -> None:
    for node in range(NUM_NODES):
        world.agent(node).die()
    world.wait()
    assert world.replaced == [0, 1, 2]
    assert world.orders() == [[1]] * NUM_NODES


def test_a_node_that_gives_no_heartbeat_is_killed_and_replaced(world: World) -> None:
    world.wait()
    world.wait()
    world.agent(1).is_beating = False
    patience_s = 2 * world.job.scenario.launch.frozen_s
    world.wait_for(patience_s - WAIT_S)
    assert world.replaced == []
    world.wait_for(1.0)
    assert world.replaced == [1]
    assert world.first[1].process.signals == [signal.SIGKILL]
    assert world.failures() == [(2, "node 1 is frozen")]


def test_a_frozen_rank_is_recorded_and_its_end_starts_the_next_attempt(world: World) -> None:
    world.orders()
    world.agent(0).say(RankFrozen(rank=1, attempt=0, silent_s=2.5))
    world.wait()
    assert world.orders() == [[]] * NUM_NODES
    world.end(1, -9)
    world.wait()
    assert world.orders() == [[1]] * NUM_NODES
    assert world.failures() == [(1, "frozen for 2.5 s"), (1, "killed by signal 9")]


def test_a_run_without_progress_is_started_again_where_it_is(world: World) -> None:
    world.orders()
    world.wait_for(FIRST_ITERATION_PATIENCE_S + 1)
    assert world.orders() == [[1]] * NUM_NODES
    assert world.replaced == []
    assert world.failures() == [(-1, "no rank has made progress")]


def test_a_run_with_progress_is_left_alone(world: World) -> None:
    world.orders()
    for _ in range(10):
        world.wait_for(FIRST_ITERATION_PATIENCE_S / 2)
        world.nodes.progressed()
    assert world.orders() == [[]] * NUM_NODES


@pytest.mark.parametrize("pause_s", [10.0, 3600.0, 10 * FIRST_ITERATION_PATIENCE_S])
def test_a_launcher_that_was_stopped_itself_blames_nobody(pause_s: float, world: World) -> None:
    """It may be that all were stopped, and the nodes go on only after it does."""
    world.orders()
    for node in range(NUM_NODES):
        world.agent(node).is_beating = False
    world.wait()
    world.server.now_s += pause_s
    world.wait()
    for node in range(NUM_NODES):
        world.agent(node).is_beating = True
    world.wait_for(1.0)
    assert world.orders() == [[]] * NUM_NODES
    assert world.failures() == []


def test_a_launcher_that_gets_little_of_a_core_is_patient_in_proportion(world: World) -> None:
    world.agent(1).is_beating = False
    world.agent(1).process.is_stopped = True
    patience_s = 2 * world.job.scenario.launch.frozen_s
    for _ in range(int(patience_s / (MAX_GAP_S + WAIT_S)) - 1):
        world.server.now_s += 10.0
        world.wait()
    assert world.replaced == []
    world.wait_for(2.0)
    assert world.replaced == [1]


def test_a_node_that_still_starts_has_more_time_unless_it_is_stopped(world: World) -> None:
    for node in (0, 1):
        world.agent(node).is_beating = False
    world.agent(1).process.is_stopped = True
    world.wait_for(2 * world.job.scenario.launch.frozen_s + 1.0)
    assert world.replaced == [1]
    world.wait_for(START_PATIENCE_S)
    assert world.replaced == [1, 0]


def rendezvous_of(world: World) -> list[FakeProcess]:
    agents = [agent.process for agent in (*world.first.values(), *world.server.agents.values())]
    return [process for process in world.server.processes if process not in agents]


def test_a_rendezvous_store_that_has_ended_is_replaced_and_nobody_who_trains_is_disturbed(world: World) -> None:
    world.orders()
    (store,) = rendezvous_of(world)
    store.has_ended = True
    world.wait_for(1.0)
    assert len(rendezvous_of(world)) == 2
    assert world.orders() == [[]] * NUM_NODES
    assert world.failures() == [(-1, "the rendezvous store has ended")]
    assert not [event for event in read_samples(world.job.run_dir / EVENTS, EventSample) if event.event == "failed"]


def test_a_rendezvous_store_that_stays_stopped_is_killed_and_replaced(world: World) -> None:
    (store,) = rendezvous_of(world)
    store.is_stopped = True
    world.wait_for(1.0)
    assert len(rendezvous_of(world)) == 1
    world.wait_for(2 * world.job.scenario.launch.frozen_s)
    assert store.signals == [signal.SIGKILL]
    assert len(rendezvous_of(world)) == 2
    assert world.failures() == [(-1, "the rendezvous store is stopped")]


def test_the_first_checkpoint_of_a_run_may_take_longer_than_ten_iterations(world: World) -> None:
    every = world.job.scenario.system.every
    assert every == 1
    world.orders()
    world.wait_for(1.0)
    world.nodes.progressed([sample_of(1, 0, 1.0)])
    world.wait_for(FIRST_ITERATION_PATIENCE_S - 1)
    assert world.orders() == [[]] * NUM_NODES
    world.nodes.progressed([sample_of(2, 0, 1.0).model_copy(update={"requested": True})])
    assert world.failures() == []


def test_the_failure_after_the_last_restart_names_its_node(world: World) -> None:
    for attempt in range(MAX_RESTARTS):
        world.end(0, FAILED, attempt)
        world.wait()
    world.end(5, FAILED, MAX_RESTARTS)
    with pytest.raises(GaveUpError) as raised:
        world.wait()
    assert raised.value.node == 2


@pytest.mark.parametrize("faults", [(), ("kill@rank=1,iteration=3",), ("kill@rank=1,iteration=3",) * 2])
def test_each_injected_failure_may_cost_two_restarts_more(faults: tuple[str, ...], tmp_path: Path) -> None:
    world = make_world(tmp_path, *faults)
    for attempt in range(MAX_RESTARTS + 2 * len(faults)):
        world.end(0, FAILED, attempt)
        world.wait()
    world.agent(1).die()
    with pytest.raises(GaveUpError):
        world.wait()
    world.nodes.stop()


def test_stopping_ends_all_that_was_forked_and_may_be_done_at_any_time(world: World) -> None:
    world.agent(0).die()
    world.wait()
    world.nodes.stop()
    world.nodes.stop()
    assert len(world.server.processes) == 1 + NUM_NODES + 1
    assert all(process.has_ended for process in world.server.processes)
