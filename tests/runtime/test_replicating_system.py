"""The replicating system on several ranks: what is complete can be restored, and no update tears a state."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from capricorn.config.planner import PlannerConfig
from capricorn.config.scenario import SystemConfig
from capricorn.errors import CapricornError, ConfigError, NoCompleteCheckpointError, TransportError
from capricorn.hooks import OpKey
from capricorn.runtime.comm.replica_link import ReplicaLink
from capricorn.runtime.recovery import newest_common
from capricorn.runtime.replicating_system import ReplicatingSystem
from capricorn.runtime.store.node_store import NodeStore
from capricorn.runtime.store.slot import Slot
from capricorn.systems.flat_state import FlatState
from capricorn.systems.interface import JobContext
from capricorn.topology import Topology
from tests.support.spawn import run_ranks

SIZE = 300_000


class Toy:
    """A job whose state after iteration i is the number 100 * i + rank, everywhere."""

    def __init__(
        self,
        rank: int,
        num_nodes: int,
        folder: Path,
        attempt: int = 0,
        planner: PlannerConfig | None = None,
        system: type[ReplicatingSystem] = ReplicatingSystem,
        options: Any = None,
        **config: Any,
    ) -> None:
        self.rank, self.weights = rank, torch.full((SIZE,), float(rank))
        self.topology = Topology(num_nodes, 1)
        self.folder = folder / f"node{rank}"
        if not (self.folder / "node.json").exists():
            NodeStore.create(self.folder, "run", rank, self.topology)
        self.system = system()
        self.position = torch.tensor(0)
        settings = {"replicas": 2, "block_bytes": 65536, "timeout_s": 5.0} | config
        group = dist.group.WORLD
        assert group is not None
        job = JobContext(
            run_id="run",
            attempt=attempt,
            topology=self.topology,
            rank=rank,
            device=torch.device("cpu"),
            control_group=group,
            config=SystemConfig.model_validate(settings),
            store_dir=self.folder,
            address="127.0.0.1",
            planner=planner or PlannerConfig(),
            settings=options,
        )
        self.system.attach(job, FlatState({"w": self.weights}, capture=lambda: {"position": self.position}))

    def train(self, first: int, last: int, *, ops: int = 0) -> None:
        for iteration in range(first, last + 1):
            self.position.fill_(-1)  # changes at any time in an iteration
            for _ in range(ops):
                self.system.on_op_end(OpKey(0, "forward", "combine"))
            self.system.before_update(iteration)
            self.weights.fill_(100.0 * iteration + self.rank)
            self.position.fill_(iteration)
            self.system.after_update(iteration)

    def holds(self, iteration: int) -> bool:
        return bool((self.weights == 100.0 * iteration + self.rank).all())


def save_and_restore(rank: int, num_nodes: int, folder: str, replicas: int, lost: tuple[int, ...]) -> list[Any]:
    toy = Toy(rank, num_nodes, Path(folder), replicas=replicas)
    toy.train(1, 5, ops=2)
    toy.system.drain(10.0)
    completed = toy.system.take_completed()
    toy.system.close()
    toy.system.close()
    dist.barrier()
    if rank in lost:
        for path in toy.folder.iterdir():
            path.unlink()
    again = Toy(rank, num_nodes, Path(folder), attempt=1, replicas=replicas)
    report = again.system.restore()
    restored = again.holds(report.iteration)
    again.train(report.iteration + 1, report.iteration + 2)
    again.system.drain(10.0)
    latest = again.system.latest_complete()
    again.system.close()
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("capricorn")]
    return [completed, report.iteration, list(report.sources), restored, latest, threads]


@pytest.mark.parametrize(
    ("num_nodes", "replicas", "lost"),
    [(1, 1, ()), (2, 2, ()), (2, 2, (1,)), (3, 2, (0,)), (3, 3, (0, 2)), (4, 2, (0, 3))],
)
def test_the_last_iteration_is_restored_after_nodes_are_lost(
    tmp_path: Path, num_nodes: int, replicas: int, lost: tuple[int, ...]
) -> None:
    results = run_ranks(save_and_restore, num_nodes, str(tmp_path), replicas, lost)
    for completed, iteration, sources, restored, latest, threads in results:
        assert completed == [1, 2, 3, 4, 5]
        assert iteration == 5
        assert sources == ["peer" if rank in lost else "local" for rank in range(num_nodes)]
        assert restored
        assert latest == 7
        assert threads == []


def lose_all_copies(rank: int, num_nodes: int, folder: str) -> str:
    toy = Toy(rank, num_nodes, Path(folder), replicas=1)
    toy.train(1, 2)
    toy.system.close()
    dist.barrier()
    if rank == 1:
        for path in toy.folder.iterdir():
            path.unlink()
    again = Toy(rank, num_nodes, Path(folder), attempt=1, replicas=1)
    try:
        again.system.restore()
    except NoCompleteCheckpointError as error:
        return str(error)
    finally:
        again.system.close()
    return "restored"


def test_all_ranks_say_which_rank_has_no_copy_left(tmp_path: Path) -> None:
    messages = run_ranks(lose_all_copies, 2, str(tmp_path))
    assert messages[0] == messages[1]
    assert "rank 1 has no copy" in messages[0]


def damage_and_restore(rank: int, num_nodes: int, folder: str, where: tuple[tuple[int, int], ...]) -> list[Any]:
    """`where`: (node, owner) whose copy of the newest iteration, 3, gets a flipped byte."""
    toy = Toy(rank, num_nodes, Path(folder))
    toy.train(1, 3)
    toy.system.drain(10.0)
    toy.system.close()
    for node, owner in where:
        if node == rank:
            store = NodeStore.open(toy.folder)
            (copy,) = [c for c in store.inventory() if (c.owner, c.iteration) == (owner, 3)]
            with copy.path.open("r+b") as file:
                file.seek(copy.path.stat().st_size - 5000)
                file.write(b"\xff")
    dist.barrier()
    again = Toy(rank, num_nodes, Path(folder), attempt=1)
    report = again.system.restore()
    restored = again.holds(report.iteration)
    again.system.close()
    return [report.iteration, list(report.sources), list(report.damaged), restored]


def test_a_damaged_copy_is_named_and_skipped(tmp_path: Path) -> None:
    for iteration, sources, damaged, restored in run_ranks(damage_and_restore, 2, str(tmp_path), ((0, 0),)):
        assert (iteration, sources, restored) == (3, ["peer", "local"], True)
        assert damaged == ["rank 0's copy of iteration 3 on rank 0"]


def test_if_all_copies_of_the_newest_are_damaged_all_ranks_take_the_one_before(tmp_path: Path) -> None:
    for iteration, sources, damaged, restored in run_ranks(damage_and_restore, 2, str(tmp_path), ((0, 0), (1, 0))):
        assert (iteration, sources, restored) == (2, ["local", "local"], True)
        assert len(damaged) == 2


def slow_link(rank: int, num_nodes: int, folder: str) -> list[Any]:
    original = ReplicaLink.commit

    def commit(self: ReplicaLink, iteration: int) -> None:
        time.sleep(0.05)
        original(self, iteration)

    ReplicaLink.commit = commit  # type: ignore[method-assign]
    toy = Toy(rank, num_nodes, Path(folder))
    toy.train(1, 20, ops=4)
    toy.system.drain(10.0)
    completed = toy.system.take_completed()
    toy.system.close()
    return completed


def test_on_a_link_that_is_too_slow_every_iteration_is_still_saved(tmp_path: Path) -> None:
    """The update then waits: nothing is skipped, and no slot is used again too early."""
    assert run_ranks(slow_link, 2, str(tmp_path)) == [list(range(1, 21))] * 2


def break_link(rank: int, num_nodes: int, folder: str) -> list[Any]:
    original = ReplicaLink.send_range

    def send_range(self: ReplicaLink, iteration: int, slot: Slot, start: int, stop: int) -> None:
        if rank == 1 and iteration == 3:
            self.close()
        original(self, iteration, slot, start, stop)

    ReplicaLink.send_range = send_range  # type: ignore[method-assign]
    toy = Toy(rank, num_nodes, Path(folder))
    toy.train(1, 6)
    try:
        toy.system.drain(10.0)
        complaint = ""
    except CapricornError as error:
        complaint = str(error)
    completed, counters = toy.system.take_completed(), toy.system.counters()
    toy.system.close()
    return [completed, counters.failed_saves, complaint]


def test_a_broken_link_costs_one_checkpoint_is_counted_and_told_at_the_end(tmp_path: Path) -> None:
    first, second = run_ranks(break_link, 2, str(tmp_path))
    assert first == [[1, 2, 4, 5, 6], 0, ""]
    assert second[:2] == [[1, 2, 4, 5, 6], 1]
    assert "iteration 3" in second[2]
    assert "rank 0" in second[2]


def every_other(rank: int, num_nodes: int, folder: str) -> list[int]:
    toy = Toy(rank, num_nodes, Path(folder), every=2)
    toy.train(1, 7)
    toy.system.drain(10.0)
    completed = toy.system.take_completed()
    toy.system.close()
    return completed


def test_an_interval_of_two_saves_every_other_iteration(tmp_path: Path) -> None:
    assert run_ranks(every_other, 2, str(tmp_path)) == [[2, 4, 6]] * 2


def test_the_small_values_belong_to_the_same_iteration_as_the_weights(tmp_path: Path) -> None:
    assert run_ranks(position_after_restore, 2, str(tmp_path)) == [5, 5]


def position_after_restore(rank: int, num_nodes: int, folder: str) -> int:
    toy = Toy(rank, num_nodes, Path(folder))
    toy.train(1, 5)
    toy.position.fill_(-1)
    toy.system.drain(10.0)
    toy.system.close()
    again = Toy(rank, num_nodes, Path(folder), attempt=1)
    restored: list[int] = []
    again.system._state._publish = lambda values: restored.append(int(values["position"]))
    again.system.restore()
    again.system.close()
    return restored[0]


def abandon(rank: int, num_nodes: int, folder: str) -> list[Any]:
    """Rank 1 ends in iteration 4, when rank 0 may have staged a state that rank 1 has not."""
    toy = Toy(rank, num_nodes, Path(folder))
    toy.train(1, 3)
    toy.system.before_update(4)
    toy.weights.fill_(100.0 * 4 + rank)
    toy.system._settle(5.0)
    if rank == 0:
        toy.system._start(4)  # rank 1 never comes to this
    toy.system.close()
    dist.barrier()
    again = Toy(rank, num_nodes, Path(folder), attempt=1)
    report = again.system.restore()
    restored, local = again.holds(report.iteration), NodeStore.open(toy.folder).inventory()
    again.system.close()
    newest = max(copy.iteration for copy in local if copy.state == "complete")
    return [report.iteration, restored, newest]


def test_ranks_that_stopped_at_different_iterations_agree_on_the_one_they_share(tmp_path: Path) -> None:
    assert run_ranks(abandon, 2, str(tmp_path)) == [[3, True, 3]] * 2


@pytest.mark.parametrize(
    ("survivors", "expected"),
    [
        ({}, None),
        ({5: {0: [0]}, 4: {0: [0], 1: [1]}}, 4),
        ({5: {0: [0], 1: [0]}, 4: {0: [0], 1: [1]}}, 5),
        ({6: {0: [0]}, 5: {1: [1]}}, None),
    ],
)
def test_the_newest_iteration_that_all_owners_share(survivors: dict[int, Any], expected: int | None) -> None:
    assert newest_common(survivors, 2) == expected


def fall_back(rank: int, num_nodes: int, folder: str) -> dict[str, Any]:
    """Rank 1's own node has come back with the iterations 1 and 2; the fetch of 5, the newest, ends half way."""
    toy = Toy(rank, num_nodes, Path(folder))
    toy.train(1, 2)
    toy.system.drain(10.0)
    own = [path for path in toy.folder.glob("owner1.slot*") if rank == 1]
    old = {path: path.read_bytes() for path in own}
    toy.train(3, 5)
    toy.system.drain(10.0)
    toy.system.close()
    for path, content in old.items():
        path.write_bytes(content)
    dist.barrier()
    fetch, seen = ReplicaLink.fetch, []

    def fetch_half(self: ReplicaLink, iteration: int, slot: Slot) -> None:
        if iteration == 5:
            slot.payload[: SIZE // 2] = bytes(SIZE // 2)
            seen.append(sorted(again.system._store.iterations(1)))  # type: ignore[union-attr]
            raise TransportError("the connection was closed")
        fetch(self, iteration, slot)

    ReplicaLink.fetch = fetch_half  # type: ignore[method-assign]
    again = Toy(rank, num_nodes, Path(folder), attempt=1)
    report = again.system.restore()
    restored = again.holds(report.iteration)
    again.train(5, 6)
    again.system.drain(10.0)
    latest = again.system.latest_complete()
    again.system.close()
    return {"restored": (report.iteration, restored), "seen": seen, "latest": latest, "damaged": list(report.damaged)}


def test_a_fetch_that_ends_half_way_has_cost_none_of_the_local_copies(tmp_path: Path) -> None:
    first, second = run_ranks(fall_back, 2, str(tmp_path))
    assert second["seen"] == [[1, 2]]
    for each in (first, second):
        assert each["restored"] == (4, True)
        assert each["latest"] == 6
        assert each["damaged"] == ["rank 1's copy of iteration 5 on rank 0"]


def refuse_timeouts(rank: int, num_nodes: int, folder: str) -> list[str]:
    toy = Toy(rank, num_nodes, Path(folder), replicas=1)
    said = []
    for timeout_s in (0, 0.0, -1.0, float("nan"), float("inf"), 1e300, 1e-9, "5", None, True):
        try:
            toy.system.drain(timeout_s)  # type: ignore[arg-type]
        except ConfigError as error:
            said.append(str(error))
    toy.system.drain(1)
    toy.system.close()
    return said


def test_a_timeout_that_cannot_be_waited_for_is_refused_by_name(tmp_path: Path) -> None:
    (said,) = run_ranks(refuse_timeouts, 1, str(tmp_path))
    assert len(said) == 10
    assert all(text.startswith("timeout_s=") and "\n" not in text for text in said)


def close_after_a_failure(rank: int, num_nodes: int, folder: str) -> list[str]:
    """The server does not end in order; everything else does."""
    toy = Toy(rank, num_nodes, Path(folder), replicas=1)
    toy.train(0, 2)
    server = toy.system._server
    assert server is not None
    close = server.close

    def fail() -> None:
        close()
        raise OSError("no")

    server.close = fail  # type: ignore[method-assign]
    try:
        toy.system.close()
    except OSError:
        toy.system.close()
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("capricorn")]


def test_what_fails_to_end_does_not_keep_the_rest_from_ending(tmp_path: Path) -> None:
    assert run_ranks(close_after_a_failure, 1, str(tmp_path)) == [[]]


def fail_beside_training(rank: int, num_nodes: int, folder: str, where: str) -> dict[str, Any]:
    """What no handler expects happens in iteration 3: to the stager of rank 1, or where rank 0 holds its replica."""
    toy = Toy(rank, num_nodes, Path(folder))
    begin = NodeStore.begin

    def fail(store: NodeStore, owner: int, iteration: int, *arguments: Any) -> Slot:
        if (rank, owner, iteration) == ((1, 1, 3) if where == "stager" else (0, 1, 3)):
            raise KeyError("nobody expects this")
        return begin(store, owner, iteration, *arguments)

    NodeStore.begin = fail  # type: ignore[method-assign,assignment]
    toy.train(1, 6)
    complaint = ""
    try:
        toy.system.drain(10.0)
    except CapricornError as error:
        complaint = str(error)
    told = {"completed": toy.system.take_completed(), "complaint": complaint}
    told["num_failed"] = toy.system.counters().failed_saves
    toy.system.close()
    return told


@pytest.mark.parametrize("where", ["stager", "holder"])
def test_what_nobody_expects_beside_training_costs_one_checkpoint_and_is_told_with_its_cause(
    tmp_path: Path, where: str
) -> None:
    results = run_ranks(fail_beside_training, 2, str(tmp_path), where)
    assert [told["completed"] for told in results] == [[1, 2, 4, 5, 6]] * 2
    cause = "KeyError: 'nobody expects this'"
    if where == "stager":
        assert f"rank 1, the last one: iteration 3: staging: {cause}" in results[1]["complaint"]
        assert results[0]["complaint"] == ""
    else:
        assert f"the replica of rank 1 failed on rank 0: {cause}" in results[0]["complaint"]
        assert "iteration 3: rank 1, replica on rank 0: the connection" in results[1]["complaint"]
    assert max(told["num_failed"] for told in results) == 1
