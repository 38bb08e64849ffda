"""One rank of a run, attempt after attempt; the first start and the hundredth do the same:

| phase      | what the rank does                                                     | collective | event written |
|------------|------------------------------------------------------------------------|------------|---------------|
| rendezvous | meets the others, makes the process groups of the attempt              | yes        | `started`     |
| attach     | makes or keeps what it trains, compares the data, attaches the system  | yes        | `ready`       |
| restore    | takes the newest checkpoint that all ranks have, if there is one       | yes        | `resumed`     |
| train      | iterations up to the last                                              | yes        |               |
| drain      | waits until requested checkpoints are complete, and leaves with all    | yes        | `finished`    |
| fail       | after an error or SIGTERM in any phase: says why, closes the system    | no         | `failed`      |
| leave      | if it was forked and may stay: shuts down the groups, awaits an order  | no         |               |

A rank that may not leave this way ends its process, and its successor begins with the first phase.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from capricorn.emulation.pacer import Pacer
from capricorn.emulation.route import Links, Route
from capricorn.errors import CapricornError, ConfigError, NoCompleteCheckpointError, RecordError, TransportError
from capricorn.faults.injector import FaultInjector
from capricorn.faults.process_registry import register_worker
from capricorn.hooks import HookChain
from capricorn.launch.launch_messages import AttemptLeft, StartAttempt, TrainingBegan, receive, to_bytes
from capricorn.launch.nodes import FAILED, UNREACHABLE
from capricorn.launch.rank_context import (
    ForkedContext,
    RankContext,
    TorchrunContext,
    UnreachableError,
    shut_down_process_groups,
)
from capricorn.launch.recorder import Recorder, was_ever_complete
from capricorn.process import die_with_parent
from capricorn.records.job_file import Fatal, Job
from capricorn.runtime.comm.collectives import maximum, share_text
from capricorn.runtime.comm.device_groups import AbortOnSigterm, abort_all, device_backends
from capricorn.runtime.persist.layout import iterations_in
from capricorn.runtime.schedule.op_clock import Clock, make_clock
from capricorn.systems.interface import CheckpointSystem, JobContext
from capricorn.systems.registry import load_system
from capricorn.systems.settings import settings_of
from capricorn.trainer.device_setup import set_up_device
from capricorn.trainer.loop import StallMeter, Trainer
from capricorn.trainer.training import RankTraining


def main() -> None:
    """Runs the rank that torchrun's environment names, of the job in the file argv[1]; argv[2] is its agent."""
    die_with_parent(int(sys.argv[2]))
    signal.signal(signal.SIGTERM, _leave)
    job = Job.read(Path(sys.argv[1]))
    torch.set_num_threads(1)  # results are bit-reproducible at a fixed number of threads only
    worker = Worker(job, TorchrunContext(job))
    try:
        worker.run()
    except BaseException as error:  # noqa: BLE001 - also SIGTERM; the process ends below
        worker.fail(error)
        # Threads of a process group that lost a peer may never join; the state they served is in the store.
        sys.stderr.flush()
        os._exit(FAILED)


def run_forked(job: Job, context: ForkedContext, link: socket.socket) -> int:
    """Runs a rank for the node agent that forked it, in one attempt after the other; returns the exit code.

    When it has left an attempt it says so over the link and waits to be told the next.
    """

    def training_began() -> None:
        with contextlib.suppress(ConnectionError):  # the node has ended, and takes us along
            link.send(to_bytes(TrainingBegan(attempt=context.attempt)))

    worker = Worker(job, context, training_began)
    while (error := _attempt(worker)) is not None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        worker.fail(error)
        if not worker.can_stay(error):
            return UNREACHABLE if isinstance(error, UnreachableError) else FAILED
        # Its frames hold the trainer, the activations of an iteration, and groups that are to end.
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = error.__context__ = error.__cause__ = None
        worker.leave_attempt()
        link.send(to_bytes(AttemptLeft(attempt=context.attempt)))
        if not (order := receive(link)):  # the node has ended
            return FAILED
        context.attempt = StartAttempt.model_validate_json(order).attempt
    return 0


def _attempt(worker: Worker) -> BaseException | None:
    """Runs a worker through an attempt; returns the error that ended it, such as SIGTERM, by which a node ends it."""
    signal.signal(signal.SIGTERM, _leave)
    try:
        try:
            worker.run()
        finally:  # a signal that comes while another error is on its way ends up below like the first
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the node hears of it
        return error
    return None


def _leave(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(f"signal {signum}")


class Worker:
    """One rank from its start to its end."""

    def __init__(self, job: Job, context: RankContext, training_began: Callable[[], None] = lambda: None) -> None:
        """Starts nothing yet; `training_began` is called after the first iteration of each attempt."""
        self._job, self._context, self._rank = job, context, context.rank
        self._training_began = training_began
        emulation, model = job.scenario.emulation, job.scenario.model
        self._pacer = Pacer(emulation.pace, model, self._rank, job.scenario.topology) if emulation else None
        self._routes = self._open_routes()
        self._training: RankTraining | None = None
        self._its_device: torch.device | None = None
        self._clock: Clock | None = None
        self._iteration = 0
        self._is_training = False
        self._reset()

    def run(self) -> None:
        """Trains to the last iteration.

        Raises:
            CapricornError: it cannot go on.
        """
        register_worker(self._job.run_dir, self._rank)
        device = self._device()
        self._rendezvous(device)
        self._recorder.event("started", f"pid {os.getpid()}")
        self._attach(device)
        self._is_training = True
        first = self._iteration + 1
        for iteration in range(first, self._job.scenario.train.iterations + 1):
            self._iteration = iteration
            measured = self._trainer.run(iteration)
            self._recorder.iteration(measured)
            if iteration == first:
                self._training_began()
        self._finish()

    def fail(self, error: BaseException) -> None:
        """Writes down why the attempt ends, and lets a running local copy be completed."""
        with contextlib.suppress(OSError):  # the log may lie on a full disk
            traceback.print_exception(error)
        with contextlib.suppress(RuntimeError):  # they are gone; what closes below would wait for the device
            abort_all(device_backends())
        is_hopeless = isinstance(error, CapricornError) and not isinstance(error, TransportError)
        is_hopeless = (is_hopeless and not self._is_training) or isinstance(error, RecordError)
        try:
            self._recorder.event("failed", _in_words(error), iteration=self._iteration)
        except RecordError as unwritten:  # the launcher would not hear of the failure, and start again in vain
            is_hopeless, error = True, error if is_hopeless else unwritten
        if is_hopeless:
            self._job.say_fatal(_fatal(error))
        self._system.close()

    def can_stay(self, error: BaseException) -> bool:
        """Returns whether this process may go on in the next attempt, with its model and optimizer where they are.

        Before the first checkpoint the initial state is needed again, which a new process has.
        """
        is_lost = isinstance(error, UnreachableError) or self._training is None
        return not is_lost and self._system.can_be_replaced and was_ever_complete(self._job.run_dir)

    def leave_attempt(self) -> None:
        """Shuts down the groups of the attempt that has failed, and forgets all of it but what was trained."""
        assert self._training is not None
        for name in ("_control", "_trainer"):  # the attempt may have ended before it had a trainer
            vars(self).pop(name, None)
        self._training.leave()
        self._reset()
        shut_down_process_groups()

    def _reset(self) -> None:
        """Forgets the attempt before this one; each has a system, a clock and a recorder of its own."""
        if self._clock is not None:
            self._clock.close()
            self._clock = None
        self._system: CheckpointSystem = load_system(self._job.scenario.system.name)()
        self._recorder = Recorder(self._job, self._rank, self._context.attempt, self._system, self._pacer)
        self._iteration = 0
        self._is_training = False

    def _device(self) -> torch.device:
        """Returns the device, which is set up for the first attempt of this process."""
        if self._its_device is None:
            scenario = self._job.scenario
            on_machine = self._rank % scenario.cluster.ranks_per_node if scenario.launch.nnodes else self._rank
            self._its_device = set_up_device(scenario.cluster.device, on_machine)
            if self._its_device.type == "cuda":
                AbortOnSigterm()  # until this process ends
        return self._its_device

    def _rendezvous(self, device: torch.device) -> None:
        """Meets the other ranks, and learns how often the job has started; collective."""
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        self._control, self._attempt = self._context.rendezvous(backend)
        self._clock = make_clock(device)
        self._recorder = Recorder(self._job, self._rank, self._attempt, self._system, self._pacer, self._clock)

    def _attach(self, device: torch.device) -> None:
        """Makes all that trains, and attaches the system to it; collective."""
        if self._training is None:
            self._training = RankTraining(self._job, self._rank, device, self._routes, self._context.timeout)
        else:
            self._training.rejoin()
        training = self._training
        self._check_same_data(training.batches.digest)
        injector = FaultInjector(self._job, self._rank, self._attempt)
        self._system.attach(self._job_context(device, injector), training.state)
        self._recorder.event("ready")
        self._restore()
        meter = StallMeter(self._system)
        faults = self._job.scenario.faults
        hooks = (meter, injector if faults else None, training.forced_routing, self._recorder, self._pacer)
        hook = HookChain(hook for hook in hooks if hook is not None)
        self._trainer = Trainer(training.model, training.optimizer, training.batches, device, meter, hook)

    def _check_same_data(self, digest: int) -> None:
        mine = digest >> 1  # fits a signed integer
        if maximum(self._control, mine) != mine or -maximum(self._control, -mine) != mine:
            raise ConfigError(f"rank {self._rank} reads other data than the others; give all nodes the same --data")

    def _job_context(self, device: torch.device, injector: FaultInjector) -> JobContext:
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
            store_dir=self._job.node_dir(node),
            address=self._context.address(),
            routes=injector.routes(self._routes),
            storage_dir=self._job.storage_dir,
            files_dir=self._job.files_dir,
            settings=settings_of(scenario),
            persist=scenario.persist,
            persist_dir=self._job.persist_dir,
            start_writer=self._context.start_writer,
            model=scenario.model.name,
        )

    def _open_routes(self) -> dict[int, Route]:
        """Returns by rank the way there over links that are paced in user space; empty where links are not."""
        if self._job.links_dir is None:
            return {}
        scenario = self._job.scenario
        links, topology = Links(self._job.links_dir, has_low_class=scenario.cluster.qos), scenario.topology
        node_of_rank = [topology.node_of(rank) for rank in range(topology.world_size)]
        return links.routes(node_of_rank[self._rank], node_of_rank)

    def _restore(self) -> None:
        """Takes the newest checkpoint that all ranks have; collective."""
        try:
            report = self._system.restore()
        except NoCompleteCheckpointError:
            # Before the first checkpoint was complete, the initial state is the newest there is, and the seed has it.
            # Nor is it to take the place of checkpoints on disk of which none is whole.
            tier = self._job.persist_dir
            # A machine that has taken a lost one's place has no records from before, and asks the others.
            was_complete = maximum(self._control, int(was_ever_complete(self._job.run_dir)))
            if was_complete or (tier is not None and iterations_in(tier)):
                raise
            return
        self._iteration = report.iteration
        detail = "; ".join([*(f"skipped {copy}: damaged" for copy in report.damaged), *report.notes])
        self._recorder.event("resumed", detail, iteration=report.iteration, restored=report)

    def _finish(self) -> None:
        """Completes the checkpoints and leaves together with the others; collective."""
        assert self._training is not None
        detail = ""
        scenario = self._job.scenario
        writing_s = scenario.persist.timeout_s if scenario.persist.every else 0.0
        try:
            self._system.drain(scenario.system.timeout_s + writing_s)
        except CapricornError as error:
            detail = str(error)
        digest = f"{self._training.state.content_digest():016x}"
        self._recorder.event("finished", detail, iteration=self._iteration, state_digest=digest)
        self._system.close()
        dist.barrier(group=self._control)  # or a fast rank's end would look like a failure to a slow one
        dist.destroy_process_group()


def _fatal(error: BaseException) -> Fatal:
    if isinstance(error, ConfigError):
        return Fatal(why=str(error), is_users_mistake=True)
    return Fatal(why=f"{type(error).__name__}: {error}")


def _in_words(error: BaseException) -> str:
    """Returns an error's first sentence, without the source position that gloo puts in front."""
    text = re.sub(r"^\[[^]]*\] *", "", str(error).partition("\n")[0]).partition(". ")[0]
    return f"{type(error).__name__}: {text}"


if __name__ == "__main__":
    main()
