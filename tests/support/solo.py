"""Ranks with a state of the test's own: saved into memory and into the persistent tier, and restored from either."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from capricorn.config.scenario import PersistConfig, SystemConfig
from capricorn.runtime.persist.messages import Order, WriterTask
from capricorn.runtime.persist.writer import write_checkpoint
from capricorn.runtime.replicating_system import ReplicatingSystem
from capricorn.runtime.store.node_store import NodeStore
from capricorn.systems.flat_state import FlatState
from capricorn.systems.interface import JobContext
from capricorn.topology import Topology

RUN_ID = "own"


@contextmanager
def only_rank(folder: Path) -> Iterator[None]:
    """A gloo group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def attach(
    state: FlatState,
    folder: Path,
    *,
    tier: Path | None = None,
    system: Callable[[], ReplicatingSystem] = ReplicatingSystem,
    **config: Any,
) -> ReplicatingSystem:
    """A system around the state of this rank; each rank is a node, whose store lies in the folder."""
    group = dist.group.WORLD
    assert group is not None
    rank, num_nodes = dist.get_rank(), dist.get_world_size()
    store, made = folder / f"node{rank}", system()
    if not (store / "node.json").exists():
        NodeStore.create(store, RUN_ID, rank, Topology(num_nodes, 1))
    settings = {"replicas": min(2, num_nodes), "block_bytes": 4096, "timeout_s": 10.0} | config
    try:
        made.attach(
            JobContext(
                run_id=RUN_ID,
                attempt=0,
                topology=Topology(num_nodes, 1),
                rank=rank,
                device=torch.device("cpu"),
                control_group=group,
                config=SystemConfig.model_validate(settings),
                store_dir=store,
                address="127.0.0.1",
                persist=PersistConfig(),
                persist_dir=tier,
            ),
            state,
        )
    except BaseException:
        made.close()
        raise
    return made


def save(system: ReplicatingSystem, *iterations: int, change: Callable[[int], None] = lambda iteration: None) -> None:
    """Iterations whose updates do what `change` does."""
    for iteration in iterations:
        system.before_update(iteration)
        change(iteration)
        system.after_update(iteration)
    system.drain(10.0)


def persist(folder: Path, tier: Path, iteration: int) -> str:
    """Writes this rank's copy of an iteration into the persistent tier, as its writer does; returns what failed."""
    rank, num_nodes = dist.get_rank(), dist.get_world_size()
    store = folder / f"node{rank}"
    tier.mkdir(exist_ok=True)
    task = WriterTask(
        run_id=RUN_ID, attempt=0, rank=rank, num_nodes=num_nodes, ranks_per_node=1, model="", root=tier,
        layout=store / f"owner{rank}.json", keep=9, timeout_s=20.0,
    )  # fmt: skip
    held = [
        copy.path for copy in NodeStore.open(store).inventory() if (copy.owner, copy.iteration) == (rank, iteration)
    ]
    return write_checkpoint(task, Order(iteration=iteration, slot=held[0])).failure


def restored(state: FlatState, folder: Path, *, tier: Path | None = None, **config: Any) -> int:
    """Restores a state in a new attempt, and returns the iteration."""
    system = attach(state, folder, tier=tier, **config)
    try:
        return system.restore().iteration
    finally:
        system.close()
