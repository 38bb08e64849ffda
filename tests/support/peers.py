"""A job for systems around other people's libraries: its state and iterations, and what a process has left of it."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from capricorn.config.scenario import SystemConfig
from capricorn.errors import CapricornError
from capricorn.hooks import NO_LAYER, OpKey
from capricorn.systems.flat_state import FlatState
from capricorn.systems.interface import JobContext
from capricorn.systems.registry import load_system
from capricorn.topology import Topology
from tests.support.processes import children_of

SIZE = 300_000
REDUCE = OpKey(NO_LAYER, "backward", "reduce")


def job_of(rank: int, num_nodes: int, folder: Path, attempt: int = 0, **config: Any) -> JobContext:
    group = dist.group.WORLD if dist.is_initialized() else None
    (store := folder / f"node{rank}").mkdir(exist_ok=True)
    (files := folder / "files").mkdir(exist_ok=True)
    return JobContext(
        run_id="run",
        attempt=attempt,
        topology=Topology(num_nodes, 1),
        rank=rank,
        device=torch.device("cpu"),
        control_group=cast(dist.ProcessGroup, group),
        config=SystemConfig.model_validate({"replicas": min(2, num_nodes), "timeout_s": 5.0} | config),
        store_dir=store,
        address="127.0.0.1",
        files_dir=files,
    )


class Toy:
    """A job whose state after iteration i is the number 100 * i + rank, everywhere."""

    def __init__(self, system: str, job: JobContext) -> None:
        self.job, self.rank = job, job.rank
        self.weights, self.position = torch.full((SIZE,), float(job.rank)), torch.tensor(0)
        self.restored_position = -1
        self.before = left_over()
        self.system = load_system(system)()
        self.system.attach(job, self.state())

    def state(self) -> FlatState:
        tensors = {"w": self.weights, f"own/{self.rank}": torch.full((3, self.rank + 1), 7, dtype=torch.bfloat16)}
        return FlatState(tensors, capture=lambda: {"position": self.position}, publish=self._publish)

    def _publish(self, values: Any) -> None:
        self.restored_position = int(values["position"])

    def train(self, first: int, last: int) -> None:
        for iteration in range(first, last + 1):
            self.position.fill_(-1)  # changes at any time in an iteration
            self.system.on_op_begin(REDUCE)
            self.system.before_update(iteration)
            self.weights.fill_(100.0 * iteration + self.rank)
            self.position.fill_(iteration)
            self.system.after_update(iteration)

    def holds(self, iteration: int) -> bool:
        return bool((self.weights == 100.0 * iteration + self.rank).all()) and self.restored_position == iteration

    def complaint(self) -> str:
        """What `drain` says of failed saves."""
        try:
            self.system.drain(10.0)
        except CapricornError as error:
            return str(error)
        return ""


def left_over() -> list[Any]:
    """What a system might leave in this process: threads, process groups, processes, handlers of signals."""
    threads = sorted(thread.name for thread in threading.enumerate())
    children = children_of(os.getpid(), recursive=False)
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    return [threads, len(dist.distributed_c10d._world.pg_map), children, handlers]


def left_files(job: JobContext) -> list[str]:
    return sorted(path.name for path in job.store_dir.rglob("*.pt"))
