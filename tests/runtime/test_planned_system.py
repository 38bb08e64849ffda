"""The system with its planner in a training of small ops: what it saves is right, whatever was planned."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from capricorn.config.planner import PlannerConfig
from capricorn.hooks import NO_LAYER, OpKey
from capricorn.runtime import replicating_system as replicating
from capricorn.runtime.comm.idle_signals import IdleSignals
from capricorn.runtime.comm.replica_link import ReplicaLink
from capricorn.systems.interface import Planning
from tests.runtime.test_replicating_system import SIZE, Toy
from tests.support.spawn import run_ranks

FORWARD = tuple(OpKey(0, "forward", kind) for kind in ("attention", "gate", "dispatch", "expert", "combine"))
BACKWARD = tuple(OpKey(0, "backward", op.kind) for op in reversed(FORWARD))
HEAD = (OpKey(NO_LAYER, "forward", "head"), OpKey(NO_LAYER, "backward", "head"))
REDUCE, UPDATE = OpKey(NO_LAYER, "backward", "reduce"), OpKey(NO_LAYER, "forward", "update")
OPS = (*FORWARD, *HEAD, *BACKWARD, REDUCE)
COMPUTE_S = 0.002
ITERATIONS = 10


class Training(Toy):
    """Ops that sleep and communications that all ranks come to; no two bytes of a shard and no two shards are alike."""

    def weights_of(self, iteration: int) -> torch.Tensor:
        return (torch.arange(SIZE) * 31 + iteration * 7919 + self.rank * 104729).remainder(1 << 23).float()

    def run(self, first: int, last: int, *, has_iterations: bool = True, ops: Sequence[OpKey] = OPS) -> list[Planning]:
        """What was planned, by iteration."""
        planned = []
        for iteration in range(first, last + 1):
            self.position.fill_(-1)
            if has_iterations:
                self.system.on_iteration_begin(iteration)
            for op in ops:
                self._run(op, iteration)
            self.system.before_update(iteration)
            if ops:
                self.system.on_op_begin(UPDATE)
            self.weights.copy_(self.weights_of(iteration))
            self.position.fill_(iteration)
            if ops:
                self.system.on_op_end(UPDATE)
            self.system.after_update(iteration)
            if has_iterations:
                self.system.on_iteration_end(iteration)
            planned.append(self.system.take_planning())
        return planned

    def holds(self, iteration: int) -> bool:
        return torch.equal(self.weights, self.weights_of(iteration))

    def _run(self, op: OpKey, iteration: int) -> None:
        self.system.on_op_begin(op)
        if op.kind in ("dispatch", "combine", "reduce"):
            dist.all_reduce(torch.zeros(1000))
        else:
            time.sleep(COMPUTE_S * (2 if op.kind == "expert" else 1))
        if (op.kind, op.direction) == ("gate", "forward"):
            world_size = self.topology.world_size
            self.system.on_routed(0, [100 + 10 * ((iteration + index) % 3) for index in range(2 * world_size)])
        self.system.on_op_end(op)


def capricorn_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("capricorn")]


def sorted_bytes(planned: list[Planning]) -> int:
    """What was sent, by what the link did meanwhile."""
    return sum(each.hidden_bytes + each.colliding_bytes + each.overflow_bytes for each in planned)


def saved_and_restored(
    rank: int, num_nodes: int, folder: str, replicas: int, planner: dict[str, Any]
) -> dict[str, Any]:
    """Rank 1 loses its memory, so its state comes back from a replica."""
    config = PlannerConfig.model_validate({"profile_iterations": 2, "max_chunk_bytes": 50_001} | planner)
    training = Training(rank, num_nodes, Path(folder), planner=config, replicas=replicas)
    planned = training.run(1, ITERATIONS)
    training.system.drain(10.0)
    completed, sent_bytes = training.system.take_completed(), training.system.counters().sent_bytes
    training.system.close()
    threads = capricorn_threads()
    dist.barrier()
    if rank == 1:
        for path in training.folder.iterdir():
            path.unlink()
    again = Training(rank, num_nodes, Path(folder), attempt=1, planner=config, replicas=replicas)
    report = again.system.restore()
    restored = again.holds(report.iteration)
    again.run(report.iteration + 1, report.iteration + 3)
    again.system.drain(10.0)
    latest = again.system.latest_complete()
    again.system.close()
    return {
        "completed": completed,
        "restored": (report.iteration, restored, report.sources[1]),
        "latest": latest,
        "threads": threads + capricorn_threads(),
        "planned": planned,
        "sent_bytes": sent_bytes,
    }


@pytest.mark.parametrize(
    ("num_nodes", "replicas", "planner"),
    [
        pytest.param(2, 2, {}, id="as by default"),
        pytest.param(2, 2, {"spans": "load", "gate": False}, id="by load, without a gate"),
        pytest.param(2, 2, {"spans": "global", "replan": "every-3"}, id="as one average, again every third"),
        pytest.param(2, 2, {"spans": "none"}, id="as soon as staged"),
        pytest.param(
            3, 2, {"spans": "layer", "gate": False}, id="by layer on three, without a gate", marks=pytest.mark.slow
        ),
        pytest.param(3, 3, {"spans": "layer", "replan": "oracle"}, id="by layer on three, thrice"),
    ],
)
def test_every_save_completes_and_the_newest_state_comes_back_bit_for_bit(
    tmp_path: Path, num_nodes: int, replicas: int, planner: dict[str, Any]
) -> None:
    for result in run_ranks(saved_and_restored, num_nodes, str(tmp_path), replicas, planner):
        assert result["completed"] == list(range(1, ITERATIONS + 1))
        assert result["restored"] == (ITERATIONS, True, "peer")
        assert result["latest"] == ITERATIONS + 3
        assert result["threads"] == []
        planned: list[Planning] = result["planned"]
        assert result["sent_bytes"] >= ITERATIONS * 4 * SIZE * (replicas - 1)
        assert 0 < sorted_bytes(planned) <= result["sent_bytes"]
        if planner.get("spans") == "none":
            assert not any(each.replanned or each.planned_bytes for each in planned)
            continue
        assert [each.profiled for each in planned[:2]] == [True, True]
        assert any(each.replanned for each in planned)
        assert planned[-1].idle_s > 0
        assert planned[-1].link_bytes_per_s > 0
        assert any(each.planned_bytes for each in planned)


def trained_without(rank: int, num_nodes: int, folder: str, spans: str, loop: dict[str, Any]) -> list[Any]:
    training = Training(rank, num_nodes, Path(folder), planner=PlannerConfig.model_validate({"spans": spans}))
    training.run(1, 6, **loop)
    training.system.drain(10.0)
    completed = training.system.take_completed()
    training.system.close()
    return [completed, capricorn_threads()]


@pytest.mark.parametrize(
    ("spans", "loop"),
    [
        pytest.param("load", {"ops": (), "has_iterations": False}, id="updates alone"),
        pytest.param("global", {"ops": ()}, id="no ops"),
        pytest.param("load", {"has_iterations": False}, id="ops alone"),
        pytest.param("load", {"ops": (FORWARD[0], REDUCE)}, id="a dense model"),
        pytest.param("load", {"ops": (FORWARD[0],)}, id="no communication"),
    ],
)
def test_a_loop_of_ones_own_saves_whatever_it_tells_of_itself(tmp_path: Path, spans: str, loop: dict[str, Any]) -> None:
    assert run_ranks(trained_without, 2, str(tmp_path), spans, loop) == [[[1, 2, 3, 4, 5, 6], []]] * 2


def closed_within_an_iteration(rank: int, num_nodes: int, folder: str) -> list[str]:
    """In a communication, with the gate closed and a save on its way, as when another rank has died."""
    training = Training(rank, num_nodes, Path(folder), planner=PlannerConfig(profile_iterations=1))
    training.run(1, 5)
    training.system.on_iteration_begin(6)
    for op in FORWARD[:2]:
        training._run(op, 6)
    training.system.on_op_begin(FORWARD[2])
    training.system.close()
    return capricorn_threads()


def test_a_system_that_is_closed_within_an_iteration_leaves_no_thread_behind(tmp_path: Path) -> None:
    assert run_ranks(closed_within_an_iteration, 2, str(tmp_path)) == [[]] * 2


def trained_with(rank: int, num_nodes: int, folder: str, trouble: str, has_gate: bool) -> dict[str, Any]:
    if trouble == "a slow holder":
        commit = ReplicaLink.commit

        def commit_late(self: ReplicaLink, iteration: int) -> None:
            time.sleep(0.1)
            commit(self, iteration)

        ReplicaLink.commit = commit_late  # type: ignore[method-assign]
    if trouble == "lost signals":
        tell = IdleSignals.tell
        IdleSignals.tell = lambda self, number: tell(self, number) if number < 8 else None  # type: ignore[method-assign]
    config = PlannerConfig(profile_iterations=2, max_chunk_bytes=50_000, gate=has_gate)
    training = Training(rank, num_nodes, Path(folder), planner=config)
    planned = training.run(1, ITERATIONS)
    training.system.drain(10.0)
    completed, sent_bytes = training.system.take_completed(), training.system.counters().sent_bytes
    training.system.close()
    return {"completed": completed, "planned": planned, "sent_bytes": sent_bytes, "threads": capricorn_threads()}


@pytest.mark.parametrize(
    ("trouble", "has_gate"), [("a slow holder", True), ("a slow holder", False), ("lost signals", True)]
)
def test_every_save_completes_in_spite_of(tmp_path: Path, trouble: str, has_gate: bool) -> None:
    for result in run_ranks(trained_with, 2, str(tmp_path), trouble, has_gate):
        assert result["completed"] == list(range(1, ITERATIONS + 1))
        assert result["threads"] == []
        assert sorted_bytes(result["planned"]) <= result["sent_bytes"]
        if trouble == "a slow holder":
            assert sum(each.overflow_s for each in result["planned"]) > 0  # updates have waited


def failed_to_attach(rank: int, num_nodes: int, folder: str) -> list[Any]:
    def fail(*args: object) -> None:
        raise OSError("no socket is left")

    IdleSignals.__init__ = fail  # type: ignore[assignment,method-assign]
    systems: list[Any] = []
    original = replicating.ReplicatingSystem.__init__

    def init(self: replicating.ReplicatingSystem) -> None:
        original(self)
        systems.append(self)

    replicating.ReplicatingSystem.__init__ = init  # type: ignore[method-assign]
    try:
        Training(rank, num_nodes, Path(folder), replicas=1)
    except OSError as error:
        systems[0].close()
        systems[0].close()
        return [str(error), capricorn_threads()]
    return []


def test_a_system_that_could_not_be_attached_can_be_closed(tmp_path: Path) -> None:
    assert run_ranks(failed_to_attach, 1, str(tmp_path)) == [["no socket is left", []]]
