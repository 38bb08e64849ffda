"""A toy job of two ranks on two nodes that any system can be put into: its state, its iterations, its folder.

Every number of the state tells the rank, tensor and iteration it belongs to, so that a wrong one says what it is.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from capricorn.config.scenario import SystemConfig
from capricorn.conformance.subject import SystemUnderTest
from capricorn.conformance.traces import Traces
from capricorn.emulation.route import Links
from capricorn.emulation.storage import Storage
from capricorn.errors import NoCompleteCheckpointError
from capricorn.hooks import NO_LAYER, Direction, OpKey, OpKind
from capricorn.runtime.store.node_store import NodeStore
from capricorn.systems.flat_state import FlatState
from capricorn.systems.interface import JobContext
from capricorn.systems.registry import load_system
from capricorn.topology import Topology
from capricorn.units import Seconds

NUM_RANKS: Final = 2
NUM_LAYERS: Final = 2
SAVE_S: Final[Seconds] = 0.05
"""What the modelled storage and links take for the state of one rank: longer than an iteration."""
OVERWRITTEN: Final = 77
"""The state is as after this iteration, which none reaches, when it is restored."""
RUN_ID: Final = "conformance"
JOB_FILES: Final = ("files", "links", "node0", "node1", "storage", "tmp")
"""All that the folder of a job holds."""

_FORWARD: Final[tuple[OpKind, ...]] = ("attention", "gate", "dispatch", "expert", "combine")
_REDUCE: Final = OpKey(NO_LAYER, "backward", "reduce")
_UPDATE: Final = OpKey(NO_LAYER, "forward", "update")


def make_folder(folder: Path, subject: SystemUnderTest) -> None:
    """Makes what a launcher makes for a job, with a storage and links that are slow for its state."""
    folder.mkdir(parents=True, exist_ok=True)
    bytes_per_s = 4 * subject.large / SAVE_S
    for rank in range(NUM_RANKS):
        make_node(folder, rank)
    Links.create(folder / "links", NUM_RANKS, bytes_per_s).close()
    Storage.create(folder / "storage", NUM_RANKS, bytes_per_s, None)
    for name in ("files", "tmp"):
        (folder / name).mkdir()


def make_node(folder: Path, rank: int) -> None:
    """Makes the empty memory store of one node."""
    NodeStore.create(folder / f"node{rank}", RUN_ID, rank, Topology(NUM_RANKS, 1))


class ToyRank:
    """One rank of the job. Its state after iteration i is a pattern of its own for each tensor, plus i."""

    def __init__(self, subject: SystemUnderTest, rank: int, folder: Path, *, attempt: int = 0) -> None:
        """Attaches a new system to the state before the first iteration; collective over all ranks.

        Args:
            subject: the system, and how it is set up.
            rank: this one.
            folder: of the attempt, where stores and files go.
            attempt: how often the job has started before.
        """
        self.rank = rank
        self.tensors = {key: tensor for key, tensor in _tensors(subject.large).items() if key not in subject.without}
        generator = torch.Generator().manual_seed(rank)
        self._patterns = {
            key: torch.randint(50, tensor.shape, generator=generator) for key, tensor in self.tensors.items()
        }
        self._patterns["tied"] = self._patterns["odd"]
        self.position = torch.tensor(-1)
        self.published: int | None = None
        """The position that a restore has made effective."""
        self.state = FlatState(
            {f"{key}/{rank}": tensor for key, tensor in self.tensors.items()},
            capture=lambda: {"position": self.position},
            publish=self._publish,
        )
        self.system = load_system(subject.system)()
        self.fill(0)
        job = _context(subject, rank, folder, attempt)
        for group in (None, job.control_group):  # or the connections that are made would count as the system's
            dist.all_reduce(torch.zeros(1), group=group)
        self.traces = Traces()
        self.system.attach(job, self.state)

    def train(self, first: int, last: int, *, together: bool = True) -> list[str]:
        """Does these iterations; says which tensors were no longer what the last update had made them."""
        return [
            f"{key} in iteration {iteration}"
            for iteration in range(first, last + 1)
            for key in self.iterate(iteration, together=together)
        ]

    def iterate(self, iteration: int, *, together: bool = True) -> list[str]:
        """Does one iteration as the trainer does it; yields what saving has changed.

        The update follows the last one at once. With `together` all ranks take part, as in training.
        """
        system = self.system
        self.position.fill_(-1)  # changes at any time
        system.on_iteration_begin(iteration)
        for layer in range(NUM_LAYERS):
            self._pass(layer, "forward", _FORWARD)
        for layer in reversed(range(NUM_LAYERS)):
            self._pass(layer, "backward", _FORWARD[::-1])
        system.on_op_begin(_REDUCE)
        if together:
            dist.all_reduce(torch.zeros(1))
        system.on_op_end(_REDUCE)
        changed = self.differing(iteration - 1)
        self.update(iteration)
        system.after_update(iteration)
        changed += self.differing(iteration)
        system.on_iteration_end(iteration)
        return changed

    def update(self, iteration: int) -> None:
        """Overwrites the state as soon as it may."""
        self.system.before_update(iteration)
        self.system.on_op_begin(_UPDATE)
        self.fill(iteration)
        self.system.on_op_end(_UPDATE)

    def fill(self, iteration: int) -> None:
        """Makes the state that after an iteration."""
        for key, tensor in self.tensors.items():
            tensor.copy_(self._after(key, iteration))
        self.position.fill_(iteration)

    def differing(self, iteration: int) -> list[str]:
        """Names the tensors that are not, bit for bit, those after an iteration."""
        return [key for key in self.tensors if not torch.equal(self._bytes(key), _bytes(self._after(key, iteration)))]

    def restore(self) -> dict[str, Any] | None:
        """Restores over a state that is none; tells what came of it, or None if there was nothing to restore."""
        self.fill(OVERWRITTEN)
        self.published = None
        try:
            report = self.system.restore()
        except NoCompleteCheckpointError:
            self.fill(0)
            return None
        wrong = {key: self._iterations_in(key) for key in self.differing(report.iteration)}
        return {
            "iteration": report.iteration,
            "sources": list(report.sources),
            "torn": [f"{key} of iterations {found}" for key, found in wrong.items() if found],
            "foreign": [key for key, found in wrong.items() if not found],
            "position": self.published,
            "seconds": [report.agree_s, report.fetch_s, report.load_s],
        }

    def _iterations_in(self, key: str) -> list[int]:
        """The iterations that the numbers of a tensor are of; empty if some of them are of none."""
        found, actual = [], self._bytes(key)
        unknown = torch.ones(len(actual), dtype=torch.bool)
        for iteration in range(OVERWRITTEN):
            matches = (actual == _bytes(self._after(key, iteration))).all(dim=1) & unknown
            if matches.any():
                found.append(iteration)
                unknown &= ~matches
        return [] if unknown.any() else found

    def _bytes(self, key: str) -> Tensor:
        return _bytes(self.tensors[key])

    def _after(self, key: str, iteration: int) -> Tensor:
        return (self._patterns[key] + iteration).to(self.tensors[key].dtype)

    def _pass(self, layer: int, direction: Direction, kinds: tuple[OpKind, ...]) -> None:
        for kind in kinds:
            if (kind, direction) == ("dispatch", "forward"):
                self.system.on_routed(layer, [3, 5])
            op = OpKey(layer, direction, kind)
            self.system.on_op_begin(op)
            self.system.on_op_end(op)

    def _publish(self, values: Any) -> None:
        self.published = int(values["position"])


def tensor_names() -> list[str]:
    """The tensors of its state."""
    return list(_tensors(1))


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, one row an element."""
    return tensor.contiguous().reshape(-1, 1).view(torch.uint8)


def _tensors(large: int) -> dict[str, Tensor]:
    odd = torch.empty(1237)
    return {
        "odd": odd,
        "tied": odd,
        "large": torch.empty(large),
        "bfloat16": torch.empty(1000, dtype=torch.bfloat16),
        "integers": torch.empty(33, dtype=torch.int64),
        "scalar": torch.empty(()),
        "empty": torch.empty(0),
        "gaps": torch.empty(50, 40)[:, ::2],
        "odd_bfloat16": torch.empty(3, dtype=torch.bfloat16),
        "float8": torch.empty(8, dtype=torch.float8_e4m3fn),
    }


def _context(subject: SystemUnderTest, rank: int, folder: Path, attempt: int) -> JobContext:
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2 * subject.timeout_s))
    config = {"replicas": 2, "block_bytes": 65536, "timeout_s": subject.timeout_s, "name": subject.system}
    return JobContext(
        run_id=RUN_ID,
        attempt=attempt,
        topology=Topology(NUM_RANKS, 1),
        rank=rank,
        device=torch.device("cpu"),
        control_group=group,
        config=SystemConfig.model_validate(config),
        store_dir=folder / f"node{rank}",
        address="127.0.0.1",
        routes=Links(folder / "links").routes(rank, list(range(NUM_RANKS))) if subject.has_links else {},
        storage_dir=folder / "storage",
        files_dir=folder / "files",
        settings=subject.settings(),
    )
