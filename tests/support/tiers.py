"""Checkpoints on disk of a real model whose every tensor follows from its name: saved by some ranks, for others."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from capricorn.config.resolve import load_model
from capricorn.config.scenario import PersistConfig, SystemConfig, TrainConfig
from capricorn.errors import CapricornError
from capricorn.hooks import NO_LAYER, OpKey
from capricorn.runtime.persist.messages import Order, WriterTask
from capricorn.runtime.persist.writer import write_checkpoint
from capricorn.runtime.replicating_system import ReplicatingSystem
from capricorn.runtime.save.staging import payload_of
from capricorn.runtime.store.node_store import NodeStore
from capricorn.runtime.store.slot import Layout, Slot, checksum
from capricorn.systems.interface import JobContext
from capricorn.topology import Topology
from capricorn.trainer.data import Batches
from capricorn.trainer.exchange import Network
from capricorn.trainer.models import build_model
from capricorn.trainer.optimizer import Optimizer
from capricorn.trainer.training_state import training_state
from tests.support import spawn

MODEL = "mixtral-tiny"
REDUCE = OpKey(NO_LAYER, "backward", "reduce")


def expected(key: str, shape: tuple[int, ...], iteration: int) -> Tensor:
    """What that tensor holds after that iteration."""
    if key.startswith("step/"):
        return torch.tensor(float(iteration))
    seed = checksum(f"{key} {iteration}".encode()) >> 1
    return torch.empty(shape).normal_(generator=torch.Generator().manual_seed(seed))


class Rank:
    """One rank's model, optimizer and data, all made of `expected`."""

    def __init__(
        self, rank: int, world_size: int, folder: Path, model: str = MODEL, batch_size: int | None = None
    ) -> None:
        self.rank, self.world_size, self.folder = rank, world_size, folder
        self.topology = Topology(world_size, 1)
        config = load_model(model)
        config = config.model_copy(update={"batch_size": batch_size or config.batch_size})
        network = Network(dist.group.WORLD)
        self.model = build_model(config, rank, world_size, network, "cpu", seed=0)
        self.optimizer = Optimizer(self.model, TrainConfig(), network)
        tokens = folder / f"tokens{rank}-of-{world_size}.npy"
        np.save(tokens, np.arange(100_000, dtype=np.uint8))
        self.batches = Batches(tokens, rank, world_size, config.batch_size, config.seq_len, seed=0)
        torch.manual_seed(rank)
        self.state = training_state(self.optimizer, self.batches, torch.device("cpu"))

    def fill(self, iteration: int) -> None:
        """Makes it the state after that iteration."""
        for key, tensor in self.tensors().items():
            tensor.copy_(expected(key, tuple(tensor.shape), iteration))
        self.batches.position = iteration * self.world_size * self.batches.batch_size
        self.state.capture()

    def tensors(self) -> dict[str, Tensor]:
        return {key: tensor for key, tensor in self.state.tensors.items() if not key.startswith("value/")}

    def wrong(self, iteration: int) -> list[str]:
        """Tensors that differ from what they were after that iteration, in any bit; and parameters nobody gave us."""
        owned = self.tensors()
        bad = [key for key, tensor in owned.items() if not same(tensor, expected(key, tuple(tensor.shape), iteration))]
        for name, param in self.model.named_parameters():
            if ".experts." not in name and not same(param, expected(f"param/{name}", tuple(param.shape), iteration)):
                bad.append(name)
        return bad

    def attach(self, root: Path, attempt: int = 0, persist: PersistConfig | None = None) -> ReplicatingSystem:
        """A system that knows the checkpoints on disk, with an empty memory."""
        node = self.folder / f"node{self.rank}-{attempt}-of-{self.world_size}"
        NodeStore.create(node, "run", self.rank, self.topology)
        group = dist.group.WORLD
        assert group is not None
        system = ReplicatingSystem()
        system.attach(
            JobContext(
                run_id="run",
                attempt=attempt,
                topology=self.topology,
                rank=self.rank,
                device=torch.device("cpu"),
                control_group=group,
                config=SystemConfig(replicas=min(2, self.world_size), timeout_s=10.0),
                store_dir=node,
                address="127.0.0.1",
                persist=persist or PersistConfig(),
                persist_dir=root,
                start_writer=spawn.start_writer,
                model=MODEL,
            ),
            self.state,
        )
        return system


def same(tensor: Tensor, other: Tensor) -> bool:
    return torch.equal(tensor.detach().view(torch.int32), other.view(torch.int32))


def save(rank: int, world_size: int, folder: str, iterations: tuple[int, ...], keep: int = 9) -> list[str]:
    """Writes the checkpoints of these iterations; what went wrong with each."""
    me = Rank(rank, world_size, Path(folder))
    write, failures = writer(me, keep), []
    for iteration in iterations:
        me.fill(iteration)
        failures.append(write(iteration))
        dist.barrier()
    return failures


def writer(me: Rank, keep: int = 9) -> Callable[[int], str]:
    """What writes the present state as the checkpoint of an iteration, and returns what went wrong."""
    root = me.folder / "tier"
    root.mkdir(exist_ok=True)
    path = me.folder / f"slot{me.rank}"
    store = NodeStore.create(me.folder / f"writer{me.rank}", "run", me.rank, me.topology)
    store.write_manifest(me.rank, json.dumps(me.state.manifest()))
    slot = Slot(path, me.rank, Layout(me.state.num_bytes, 65536, me.state.digest))
    work = WriterTask(
        run_id="run", attempt=0, rank=me.rank, num_nodes=me.world_size, ranks_per_node=1, model=MODEL, root=root,
        layout=store.manifest_path(me.rank), keep=keep, timeout_s=20.0,
    )  # fmt: skip

    def write(iteration: int) -> str:
        stage(me, slot, iteration)
        return write_checkpoint(work, Order(iteration=iteration, slot=path)).failure

    return write


def stage(me: Rank, slot: Slot, iteration: int) -> None:
    slot.begin(iteration, 0)
    payload_B = payload_of(slot)
    for run in me.state.runs:
        run.view(payload_B).copy_(run.source)
    for index in range(slot.layout.num_blocks):
        slot.table[index] = checksum(slot.payload[slot.layout.block(index)])
    slot.commit()


def load(rank: int, world_size: int, folder: str, model: str = MODEL) -> dict[str, Any]:
    """Restores from disk; what came of it, or what was said against it."""
    me = Rank(rank, world_size, Path(folder), model)
    before = me.state.content_digest()
    try:
        with contextlib.closing(me.attach(Path(folder) / "tier")) as system:
            report = system.restore()
    except CapricornError as error:
        is_untouched = me.state.content_digest() == before
        return {"error": f"{type(error).__name__}: {error}", "is_untouched": is_untouched}
    return {
        "iteration": report.iteration,
        "sources": list(report.sources),
        "damaged": list(report.damaged),
        "notes": list(report.notes),
        "wrong": me.wrong(report.iteration),
        "position": me.batches.position,
        "rng": checksum(bytes(torch.get_rng_state().tolist())),
    }


def train(me: Rank, system: ReplicatingSystem, first: int, last: int) -> None:
    """Iterations whose updates put the expected state into place."""
    for iteration in range(first, last + 1):
        system.on_op_begin(REDUCE)
        system.before_update(iteration)
        me.fill(iteration)
        system.after_update(iteration)


def experts_in(names: list[str]) -> set[int]:
    """Global ids of the experts that these parameters are of."""
    return {int(match[1]) for name in names if (match := re.search(r"\.experts\.(\d+)\.", name))}
