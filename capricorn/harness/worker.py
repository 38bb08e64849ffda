"""One rank of one attempt: what torchrun starts on every node. Builds everything, restores, trains, drains.

Whether it is the first start or the hundredth, it does the same: take the newest checkpoint that all ranks have.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from capricorn.emulation.pacer import Pacer
from capricorn.emulation.route import Links, Route
from capricorn.errors import CapricornError, ConfigError, NoCompleteCheckpointError, TransportError
from capricorn.harness.address import own_address
from capricorn.harness.data import Batches
from capricorn.harness.faults import FaultInjector, register_worker
from capricorn.harness.job import ATTEMPT, FATAL, Job
from capricorn.harness.model import build_model
from capricorn.harness.network import Network
from capricorn.harness.optim import Optimizer
from capricorn.harness.recorder import Recorder, was_ever_complete
from capricorn.harness.state import training_state
from capricorn.harness.trainer import StallMeter, Trainer
from capricorn.hooks import HookChain
from capricorn.loads.deal import Loads
from capricorn.loads.given import given_shares
from capricorn.process import die_with_parent
from capricorn.registry import load_system
from capricorn.runtime.exchange import maximum, share_text
from capricorn.system import CheckpointSystem, JobContext

COLLECTIVE_TIMEOUT = timedelta(seconds=120)


def main() -> None:
    """Runs the rank that torchrun's environment names, of the job in the file argv[1]."""
    die_with_parent()
    signal.signal(signal.SIGTERM, _leave)
    job = Job.read(Path(sys.argv[1]))
    torch.set_num_threads(1)  # results are bit-reproducible at a fixed number of threads only
    worker = Worker(job)
    try:
        worker.run()
    except BaseException as error:  # noqa: BLE001 - also SIGTERM; the process ends below
        worker.fail(error)
        # Threads of a process group that lost a peer may never join; the state they served is in the store.
        sys.stderr.flush()
        os._exit(1)


def _leave(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(f"signal {signum}")


class Worker:
    """One rank from its start to its end."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._rank, self._world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._system: CheckpointSystem = load_system(job.scenario.system.name)()
        emulation, model = job.scenario.emulation, job.scenario.model
        self._pacer = Pacer(emulation.pace, model, self._rank, self._world_size) if emulation else None
        self._recorder = Recorder(job, self._rank, 0, self._system, self._pacer)
        self._routes = self._open_routes()
        self._iteration = 0
        self._is_training = False

    def run(self) -> None:
        """Trains to the last iteration.

        Raises:
            CapricornError: it cannot go on.
        """
        register_worker(self._job.run_dir, self._rank)
        device = self._device()
        self._join(device)
        self._recorder.event("started", f"pid {os.getpid()}")
        self._make_ready(device)
        self._is_training = True
        for iteration in range(self._iteration + 1, self._job.scenario.train.iterations + 1):
            self._iteration = iteration
            measured = self._trainer.run(iteration)
            self._recorder.iteration(measured)
        self._finish()

    def fail(self, error: BaseException) -> None:
        """Writes down why the rank ends, and lets a running local copy be completed."""
        traceback.print_exception(error)
        self._recorder.event("failed", _in_words(error), iteration=self._iteration)
        is_hopeless = isinstance(error, CapricornError) and not isinstance(error, TransportError)
        if is_hopeless and not self._is_training:
            (self._job.run_dir / FATAL).write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        self._system.close()

    def _device(self) -> torch.device:
        if self._job.scenario.cluster.device != "cuda":
            return torch.device("cpu")
        device = torch.device("cuda", self._rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device

    def _join(self, device: torch.device) -> None:
        """Meets the other ranks and settles with them who is who and how often the job has started."""
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
        self._control = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        file = self._job.run_dir / ATTEMPT
        # torchrun's own restart count differs between nodes once an agent has been replaced.
        self._attempt = maximum(self._control, int(file.read_text()) if file.exists() else -1) + 1
        if self._rank == 0 or self._job.scenario.launch.nnodes:
            file.write_text(str(self._attempt))
        self._recorder = Recorder(self._job, self._rank, self._attempt, self._system, self._pacer)

    def _make_ready(self, device: torch.device) -> None:
        scenario = self._job.scenario
        seed = scenario.train.seed
        network = Network(dist.group.WORLD, self._routes)
        loads = self._given_loads()
        model = build_model(scenario.model, self._rank, self._world_size, network, device, seed, loads)
        optimizer = Optimizer(model, scenario.train, network)
        shape = (scenario.model.batch_size, scenario.model.seq_len)
        batches = Batches(self._job.tokens, self._rank, self._world_size, *shape, seed)
        self._check_same_data(batches)
        torch.manual_seed(seed * self._world_size + self._rank)
        self._state = training_state(optimizer, batches, device)
        self._system.attach(self._context(device), self._state)
        self._recorder.event("ready")
        self._restore()
        meter = StallMeter(self._system)
        injector = FaultInjector(self._job, self._rank, self._attempt)
        hooks = (meter, injector if scenario.faults else None, loads, self._recorder, self._pacer)
        hook = HookChain(hook for hook in hooks if hook is not None)
        self._trainer = Trainer(model, optimizer, batches, device, meter, hook)

    def _check_same_data(self, batches: Batches) -> None:
        mine = batches.digest >> 1  # fits a signed integer
        if maximum(self._control, mine) != mine or -maximum(self._control, -mine) != mine:
            raise ConfigError(f"rank {self._rank} reads other data than the others; give all nodes the same --data")

    def _context(self, device: torch.device) -> JobContext:
        scenario = self._job.scenario
        node = scenario.topology.node_of(self._rank)
        return JobContext(
            run_id=share_text(self._control, self._job.run_id),
            attempt=self._attempt,
            topology=scenario.topology,
            rank=self._rank,
            device=device,
            control_group=self._control,
            config=scenario.system,
            planner=scenario.planner,
            store_dir=self._job.node_dir(scenario.launch.node_rank if scenario.launch.nnodes else node),
            address=own_address(os.environ["MASTER_ADDR"]) if scenario.launch.nnodes else self._job.addresses[node],
            routes=self._routes,
            storage_dir=self._job.storage_dir,
            files_dir=self._job.files_dir,
            gemini=scenario.gemini,
            storage=scenario.storage,
            torchsnapshot=scenario.torchsnapshot,
            dcp=scenario.dcp,
        )

    def _given_loads(self) -> Loads | None:
        """Loads that overrule the router's, if the scenario gives some."""
        loads, train, model = self._job.scenario.loads, self._job.scenario.train, self._job.scenario.model
        shares_IME = given_shares(loads, model, num_iterations=train.iterations, seed=train.seed)
        if shares_IME is None:
            return None
        layers = [layer for layer in range(model.num_layers) if model.is_moe(layer)]
        return Loads(shares_IME, layers=layers, top_k=model.top_k, seed=train.seed, rank=self._rank)

    def _open_routes(self) -> dict[int, Route]:
        """By rank: the way there over links that are paced in user space, if they are."""
        if self._job.links_dir is None:
            return {}
        scenario = self._job.scenario
        links, topology = Links(self._job.links_dir, has_low_class=scenario.cluster.qos), scenario.topology
        node_of_rank = [topology.node_of(rank) for rank in range(topology.world_size)]
        return links.routes(node_of_rank[self._rank], node_of_rank)

    def _restore(self) -> None:
        try:
            report = self._system.restore()
        except NoCompleteCheckpointError:
            # Before the first checkpoint was complete, the initial state is the newest there is, and the seed has it.
            if was_ever_complete(self._job.run_dir):
                raise
            return
        self._iteration = report.iteration
        detail = "; ".join(f"skipped {copy}: damaged" for copy in report.damaged)
        self._recorder.event("resumed", detail, iteration=report.iteration, restored=report)

    def _finish(self) -> None:
        detail = ""
        try:
            self._system.drain(self._job.scenario.system.timeout_s)
        except CapricornError as error:
            detail = str(error)
        digest = f"{self._state.content_digest():016x}"
        self._recorder.event("finished", detail, iteration=self._iteration, state_digest=digest)
        self._system.close()
        dist.barrier(group=self._control)  # or a fast rank's end would look like a failure to a slow one
        dist.destroy_process_group()


def _in_words(error: BaseException) -> str:
    """The first sentence, without the source position that gloo puts in front."""
    text = re.sub(r"^\[[^]]*\] *", "", str(error).partition("\n")[0]).partition(". ")[0]
    return f"{type(error).__name__}: {text}"


if __name__ == "__main__":
    main()
