"""A job of two ranks on two nodes that any system can be put into: its state, its iterations, its lives and deaths."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from capricorn.config.scenario import SystemConfig
from capricorn.emulation.route import Links
from capricorn.emulation.storage import Storage
from capricorn.hooks import NO_LAYER, Direction, OpKey, OpKind
from capricorn.planner.gemini_planner import GeminiSettings
from capricorn.runtime.save.flat_state import FlatState
from capricorn.runtime.store.node_store import NodeStore
from capricorn.systems.interface import JobContext
from capricorn.systems.registry import load_system
from capricorn.topology import Topology
from tests.support.runs import polls
from tests.support.spawn import CONTEXT, PRELOADED

NUM_RANKS, NUM_LAYERS = 2, 2
SAVE_S = 0.05
"""What the modelled storage and links take for the state of one rank: longer than an iteration."""
LARGE = 400_000
"""Numbers in the largest tensor."""

# A fork has what its server has imported; these take longer than all else in a life.
SLOW_IMPORTS = ["torch.distributed.checkpoint.state_dict_saver", "torchsnapshot"]
CONTEXT.set_forkserver_preload([*PRELOADED, *SLOW_IMPORTS])

FORWARD: tuple[OpKind, ...] = ("attention", "gate", "dispatch", "expert", "combine")
UPDATE = OpKey(NO_LAYER, "forward", "update")


@dataclass(frozen=True)
class Case:
    """A system, and in what it differs from others when it is tested."""

    system: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of its `JobContext`."""
    environment: dict[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    """Tensors that it cannot keep."""
    large: int = LARGE
    close_first: tuple[int, ...] = ()
    """Ranks that are not killed without warning."""
    timeout_s: float = 5.0
    """Of every wait on a peer."""

    def __str__(self) -> str:
        return self.system


GEMINI = {"settings": GeminiSettings(profile_iterations=2, mu=0.8)}
DIFFERENT = {
    "gemini": Case("gemini", GEMINI),
    "gemini-staged": Case("gemini-staged", GEMINI),
    # Its sockets are its own: no modelled link can slow them. Its copies die with the last worker that is killed.
    "lm-resiliency": Case("lm-resiliency", {"routes": {}}, close_first=(0,)),
    # Its own limit is 128 MiB. What is larger is not copied together but written as it is.
    "torchsnapshot": Case(
        "torchsnapshot",
        without=("odd_bfloat16", "float8"),
        environment={"TORCHSNAPSHOT_SLAB_SIZE_THRESHOLD_BYTES_OVERRIDE": "1000000"},
    ),
}


def case_of(system: str, **changes: Any) -> Case:
    """How that system is tested, if these fields are not said to be others."""
    return replace(DIFFERENT.get(system, Case(system)), **changes)


class Toy:
    """One rank of the job. Its state after iteration i is a pattern of its own for each tensor, plus i."""

    def __init__(self, case: Case, rank: int, folder: Path, *, attempt: int = 0) -> None:
        self._rank = rank
        self.tensors = {name: tensor for name, tensor in _tensors(case.large).items() if name not in case.without}
        generator = torch.Generator().manual_seed(rank)
        self._patterns = {
            name: torch.randint(50, tensor.shape, generator=generator) for name, tensor in self.tensors.items()
        }
        self._patterns["tied"] = self._patterns["odd"]
        self.position, self.published = torch.tensor(-1), -1
        self.state = FlatState(
            {f"{name}/{rank}": tensor for name, tensor in self.tensors.items()},
            capture=lambda: {"position": self.position},
            publish=self._publish,
        )
        self.system = load_system(case.system)()
        self.fill(0)
        job = _job(case, rank, folder, attempt)
        self.traces = Traces()
        self.system.attach(job, self.state)

    def train(self, first: int, last: int, *, together: bool = True) -> bool:
        """Does these iterations; whether saving has left the state alone."""
        untouched = [self.iterate(iteration, together=together) for iteration in range(first, last + 1)]
        return all(untouched)

    def iterate(self, iteration: int, *, together: bool = True) -> bool:
        """One as the trainer does it, whose update follows the last at once; `together` as the ranks are there."""
        system = self.system
        self.position.fill_(-1)  # changes at any time
        system.on_iteration_begin(iteration)
        for layer in range(NUM_LAYERS):
            self._pass(layer, "forward", FORWARD)
        for layer in reversed(range(NUM_LAYERS)):
            self._pass(layer, "backward", FORWARD[::-1])
        reduce = OpKey(NO_LAYER, "backward", "reduce")
        system.on_op_begin(reduce)
        if together:
            dist.all_reduce(torch.zeros(1))
        system.on_op_end(reduce)
        is_untouched = self.holds(iteration - 1)
        self.update(iteration)
        system.after_update(iteration)
        is_untouched &= self.holds(iteration)
        system.on_iteration_end(iteration)
        return is_untouched

    def update(self, iteration: int) -> None:
        """Overwrites the state as soon as it may."""
        self.system.before_update(iteration)
        self.system.on_op_begin(UPDATE)
        self.fill(iteration)
        self.system.on_op_end(UPDATE)

    def fill(self, iteration: int) -> None:
        for name, tensor in self.tensors.items():
            tensor.copy_(self._after(name, iteration))
        self.position.fill_(iteration)

    def holds(self, iteration: int) -> bool:
        """Whether all tensors are those after that iteration, bit for bit."""
        return all(
            torch.equal(_bits(tensor), _bits(self._after(name, iteration))) for name, tensor in self.tensors.items()
        )

    def _after(self, name: str, iteration: int) -> Tensor:
        return (self._patterns[name] + iteration).to(self.tensors[name].dtype)

    def _pass(self, layer: int, direction: Direction, kinds: tuple[OpKind, ...]) -> None:
        for kind in kinds:
            if (kind, direction) == ("dispatch", "forward"):
                self.system.on_routed(layer, [3, 5])
            op = OpKey(layer, direction, kind)
            self.system.on_op_begin(op)
            self.system.on_op_end(op)

    def _publish(self, values: dict[str, Tensor]) -> None:
        self.published = int(values["position"])


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


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


def _job(case: Case, rank: int, folder: Path, attempt: int) -> JobContext:
    topology, address = Topology(NUM_RANKS, 1), "127.0.0.1"
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2 * case.timeout_s))
    settings = {"replicas": 2, "block_bytes": 65536, "timeout_s": case.timeout_s, "name": case.system}
    job = JobContext(
        run_id="run",
        attempt=attempt,
        topology=topology,
        rank=rank,
        device=torch.device("cpu"),
        control_group=group,
        config=SystemConfig.model_validate(settings),
        store_dir=folder / f"node{rank}",
        address=address,
        routes=Links(folder / "links").routes(rank, list(range(NUM_RANKS))),
        storage_dir=folder / "storage",
        files_dir=folder / "files",
    )
    return replace(job, **case.settings)


def make_folder(folder: Path, case: Case) -> None:
    """Makes what the launcher makes for a job, with a storage and links that are slow for its state."""
    bytes_per_s = 4 * case.large / SAVE_S
    for rank in range(NUM_RANKS):
        NodeStore.create(folder / f"node{rank}", "run", rank, Topology(NUM_RANKS, 1))
    Links.create(folder / "links", NUM_RANKS, bytes_per_s).close()
    Storage.create(folder / "storage", NUM_RANKS, bytes_per_s, None)
    for name in ("files", "tmp"):
        (folder / name).mkdir()


@dataclass
class Traces:
    """What a process has besides what it had when this was made."""

    num_threads: int = field(default_factory=lambda: len(os.listdir("/proc/self/task")))
    files: frozenset[Path] = field(default_factory=lambda: _temporary_files())

    def left(self, deadline_s: float = 10.0) -> list[str]:
        """Threads, child processes and files in memory or of a temporary kind that stay, in words."""
        for _ in polls(deadline_s):
            if not (found := self._found()):
                break
        return found

    def _found(self) -> list[str]:
        more = len(os.listdir("/proc/self/task")) - self.num_threads
        threads = [f"{more} threads more: {[thread.name for thread in threading.enumerate()]}"] if more > 0 else []
        children = [f"process {child.pid}: {_command(child)}" for child in children_of(os.getpid())]
        return [*threads, *children, *map(str, _temporary_files() - self.files)]


def _temporary_files() -> frozenset[Path]:
    shared = (path for path in Path("/dev/shm").iterdir() if str(os.getpid()) in path.name)
    # Importing a part of torch makes a folder for compiled code, and Python one for its sockets until it ends.
    others = (path for path in Path(tempfile.gettempdir()).iterdir() if not path.name.startswith(("torchin", "pymp")))
    return frozenset([*shared, *others])


def children_of(pid: int) -> list[psutil.Process]:
    """Living processes that this one has started; Python's tracker of shared memory, which ends with it, is none."""
    commands = {child: _command(child) for child in psutil.Process(pid).children(recursive=True)}
    return [child for child, command in commands.items() if command and "resource_tracker" not in command]


def _command(process: psutil.Process) -> str:
    """Empty if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def live(fn: Callable[..., Any], folder: Path, case: Case, *args: Any, deadline_s: float = 60.0) -> list[Any]:
    """What `fn(rank, folder, case, *args)` returns on each rank, each in a process that is killed right after.

    None for a rank that has ended, or stands still, before it could return; the others must come to their end.
    """
    with TemporaryDirectory() as results:
        processes = [
            CONTEXT.Process(target=_live, args=(fn, rank, folder, case, args, Path(results)))
            for rank in range(NUM_RANKS)
        ]
        for process in processes:
            process.start()
        for _ in polls(deadline_s):
            if all(_is_over(process) for process in processes):
                break
        late = [rank for rank, process in enumerate(processes) if not _is_over(process)]
        for process in processes:
            process.kill()
            process.join()
        errors = [path.read_text() for path in sorted(Path(results).glob("error*"))]
        assert not errors, "\n".join(errors)
        assert not late, f"ranks {late} did not end within {deadline_s} s"
        files = [Path(results) / f"result{rank}" for rank in range(NUM_RANKS)]
        return [torch.load(file, weights_only=False) if file.exists() else None for file in files]


def _is_over(process: Any) -> bool:
    try:
        return not process.is_alive() or psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:  # it has ended in between
        return True


def _live(fn: Callable[..., Any], rank: int, folder: Path, case: Case, args: tuple[Any, ...], results: Path) -> None:
    torch.set_num_threads(1)
    tempfile.tempdir = str(folder / "tmp")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": "0", "TMPDIR": tempfile.tempdir} | case.environment
    try:
        limit = timedelta(seconds=4 * case.timeout_s)
        dist.init_process_group(
            "gloo", init_method=f"file://{results}/store", rank=rank, world_size=NUM_RANKS, timeout=limit
        )
        torch.save(fn(rank, folder, case, *args), results / f"partial{rank}")
        (results / f"partial{rank}").rename(results / f"result{rank}")
    except BaseException:  # noqa: BLE001 - told to the test; the process ends below
        (results / f"error{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
    finally:
        os.kill(os.getpid(), signal.SIGKILL)
