"""Which agents of torchrun are replaced and which end the run, with agents that are played."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from capricorn.config.cluster import ClusterConfig
from capricorn.config.launch_config import LaunchConfig
from capricorn.emulation.fabric import NamespaceEntry
from capricorn.emulation.testbed import Loopback
from capricorn.launch.nodes import GaveUpError
from capricorn.launch.torchrun_nodes import TorchrunNodes
from capricorn.records.job_file import Job
from tests.support.fault_jobs import TINY, with_faults

NUM_NODES, MAX_RESTARTS = 2, 2


class PlayedAgent:
    """A process that ends when the test, or a signal, says so."""

    pid = 0

    def __init__(self) -> None:
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code

    def wait(self, timeout: float | None = None) -> int:
        assert self.code is not None, "it was waited for and never told to end"
        return self.code

    def terminate(self) -> None:
        self.code = -15 if self.code is None else self.code

    kill = terminate


class Played:
    """The nodes of a run by torchrun, started, with all that they started and replaced."""

    def __init__(self, folder: Path, *faults: str) -> None:
        for name in ("run", "store"):
            (folder / name).mkdir(mode=0o700)
        launch = LaunchConfig(max_restarts=MAX_RESTARTS, restart="torchrun")
        cluster = ClusterConfig(nodes=NUM_NODES, ranks_per_node=1, device="cpu")
        scenario = with_faults(*faults, scenario=TINY.model_copy(update={"cluster": cluster, "launch": launch}))
        job = Job(run_id="test", scenario=scenario, run_dir=folder / "run", store_dir=folder / "store", tokens=folder)
        self.started: list[tuple[PlayedAgent, list[str], Path]] = []
        self.told: list[str] = []
        self.nodes = TorchrunNodes(job, Loopback(), folder, self._replace, spawn=self._spawn, sleep=lambda _: None)
        self.nodes.start()

    def _spawn(
        self,
        entry: NamespaceEntry,
        module: Sequence[str],
        log: Path,
        *,
        env: dict[str, str] | None = None,
        pass_fds: tuple[int, ...] = (),
    ) -> PlayedAgent:
        self.told.append(f"start {log.stem}")
        self.started.append((PlayedAgent(), list(module), log))
        return self.started[-1][0]

    def _replace(self, node: int) -> None:
        self.told.append(f"replace {node}")

    def agent(self, node: int) -> PlayedAgent:
        """The newest agent of a node."""
        return next(agent for agent, _, log in reversed(self.started) if log.stem == f"node{node}")

    def end(self, node: int, code: int) -> None:
        self.agent(node).code = code
        self.nodes.wait(0.1)


@pytest.fixture
def played(tmp_path: Path) -> Iterator[Played]:
    made = Played(tmp_path)
    yield made
    made.nodes.stop()


def test_the_rendezvous_is_there_before_the_agents_and_each_is_told_the_same_one(played: Played) -> None:
    assert played.told == ["start rendezvous", "start node0", "start node1"]
    endpoints = {module[module.index("--rdzv-endpoint") + 1] for _, module, _ in played.started[1:]}
    assert len(endpoints) == 1


def test_the_run_is_done_once_all_agents_have_ended_well(played: Played) -> None:
    played.end(1, 0)
    assert not played.nodes.are_done
    played.end(0, 0)
    assert played.nodes.are_done


def test_an_agent_that_was_killed_is_replaced_after_it_was_told(played: Played) -> None:
    played.end(1, -9)
    assert played.told[3:] == ["replace 1", "start node1"]
    assert played.agent(1).code is None
    assert played.agent(0).code is None


def test_an_agent_that_has_given_up_on_its_ranks_ends_the_run(played: Played) -> None:
    with pytest.raises(GaveUpError) as raised:
        played.end(1, 1)
    assert raised.value.node == 1


@pytest.mark.parametrize("faults", [(), ("node-loss@node=1,iteration=3",)])
def test_a_node_is_replaced_as_often_as_is_allowed_and_was_injected(faults: tuple[str, ...], tmp_path: Path) -> None:
    played = Played(tmp_path, *faults)
    for _ in range(MAX_RESTARTS + len(faults)):
        played.end(1, -9)
    with pytest.raises(GaveUpError) as raised:
        played.end(0, -9)
    assert raised.value.node == 0
    played.nodes.stop()


def test_stopping_ends_the_agents_and_the_rendezvous(played: Played) -> None:
    played.nodes.stop()
    assert all(agent.code is not None for agent, _, _ in played.started)
