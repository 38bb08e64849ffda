"""Runs a scenario from start to record, on this machine or conducted from it.

The life of a run, whose steps are undone in reverse whatever happens:

| step    | what is made                                          | how it ends                                      |
|---------|-------------------------------------------------------|--------------------------------------------------|
| check   | nothing; faults, persistent tier and data are checked | a mistake is refused                             |
| server  | the fork server, unless it is shared or not needed    | closed, and all it has forked ends with it       |
| network | addresses of the nodes, namespaces and shaped links   | closed, and freed with its last process          |
| store   | the locked folder of the memory store                 | removed, unless it is to be kept                 |
| folder  | the run's folder, of which the listener hears         | stays, and its record is written                 |
| loop    | the nodes and in them the ranks                       | stopped; failures that outlive them are reverted |

In the loop the nodes restart what fails (see `nodes`), and the loop tells the listener what the ranks have written. It
ends when all ranks are done, a rank has written why starting again cannot help, the nodes give up, or an interrupt
came. Knows no torch; what trains are the ranks.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, TypeAlias

from capricorn.config.cluster import ClusterConfig
from capricorn.config.fault_kinds import kind_of
from capricorn.config.fields import FrozenModel
from capricorn.config.scenario import Scenario
from capricorn.emulation.measure import measure_links
from capricorn.emulation.route import Links
from capricorn.emulation.storage import Storage
from capricorn.emulation.testbed import PACED, NetworkBackend, create_network
from capricorn.errors import CapricornError, ConfigError, RecordError, note_once, told
from capricorn.faults.feasibility import check_faults
from capricorn.faults.revert import Reverter
from capricorn.files import named, path_and_cause, write_text
from capricorn.launch.cpu_meter import CpuMeter
from capricorn.launch.fork_client import Forker, ForkServer
from capricorn.launch.forked_nodes import ForkedNodes
from capricorn.launch.interrupts import Interrupts
from capricorn.launch.nodes import GaveUpError, Nodes
from capricorn.launch.persist_folder import check_tier, tier_of
from capricorn.launch.preflight import environment
from capricorn.launch.torchrun_nodes import TorchrunNodes
from capricorn.records.failures import cause_of
from capricorn.records.follow import Follower
from capricorn.records.job_file import Job
from capricorn.records.recoveries import write_recoveries
from capricorn.records.samples import (
    CPU,
    EVENTS,
    ITERATIONS,
    LINKS,
    EventSample,
    IterationSample,
    RunRecord,
    append,
    write_run,
)
from capricorn.records.strict_json import as_json
from capricorn.runtime.store.node_store import RunLock, store_at
from capricorn.stats.run_summary import STORE, summarize
from capricorn.systems.registry import short_name
from capricorn.systems.settings import file_settings_of
from capricorn.trainer.data import prepare
from capricorn.units import Bytes

TICK_S: Final = 0.1
STORAGE_BYTES_PER_S: Final = 1e9
"""The rate of each node, where storage is modelled only so that it can become slow."""
OTHER_MACHINES: Final = "machines.json"
"""The file of what other machines had in a run; an `OtherMachines`."""
CHECKPOINTS: Final = "checkpoints"
"""The folder in a run folder for what systems write that write files."""

COMES_ON: Final = ("started", "ready", "resumed", "finished")
"""The events by which a rank shows that it comes on, as it does by an iteration."""

MakeNodes: TypeAlias = Callable[[Job, NetworkBackend, Path, Callable[[int], None]], Nodes]
"""Makes the nodes of a job, given their network, the folder of their logs, and whom to tell of a replacement."""
Launch: TypeAlias = Callable[[Scenario, Path, "RunListener"], Path]
"""Runs a scenario with its folder below that one, as `launch` does, and on several machines too."""
MakeNetwork: TypeAlias = Callable[[ClusterConfig], tuple[NetworkBackend, str]]
"""Makes where the nodes of a cluster live, and says how their links are made."""


class OtherMachines(FrozenModel):
    """The machines of a run beside this one."""

    hosts: tuple[str, ...] = ()
    """From node 1 on, and then spares."""
    store_bytes: Bytes = 0
    """Of all their parts of the memory store."""

    @classmethod
    def of(cls, run_dir: Path) -> OtherMachines:
        """Returns those of the run in that folder; none if it had but one."""
        path = run_dir / OTHER_MACHINES
        return cls.model_validate_json(path.read_text()) if path.exists() else cls()


class RunListener:
    """Hears what happens during a run, in the thread that called `launch`; here every method does nothing."""

    def on_start(self, run_dir: Path, scenario: Scenario) -> None:
        """Is told that the run folder exists; processes start now."""

    def on_sample(self, sample: IterationSample) -> None:
        """Is told that a rank finished an iteration."""

    def on_event(self, event: EventSample) -> None:
        """Is told that something happened to a rank."""

    def on_tick(self) -> None:
        """Is called about ten times a second."""


def launch(
    scenario: Scenario,
    out: Path,
    listener: RunListener,
    fork_server: Forker | None = None,
    *,
    make_nodes: MakeNodes | None = None,
    make_network: MakeNetwork = create_network,
) -> Path:
    """Runs the scenario and returns its folder below `out`, with `run.json` in it whatever happened.

    Args:
        scenario: what is run, resolved.
        out: where the run's folder is made.
        listener: hears what happens.
        fork_server: one that serves several runs; by default the run has one of its own.
        make_nodes: makes the nodes; by default as `launch.restart` says.
        make_network: makes where they live; by default on this machine.

    Raises:
        CapricornError: the run failed, with what the failed rank said, or with what the system refused.
        KeyboardInterrupt: it was interrupted (also by SIGTERM); everything has been ended and removed.
    """
    started = datetime.now(UTC)
    check_faults(scenario, out)
    try:
        with contextlib.ExitStack() as stack:
            if make_nodes is None and scenario.launch.by_torchrun:
                make_nodes = TorchrunNodes
            elif make_nodes is None:
                # One of our own imports while we make ready.
                make_nodes = partial(ForkedNodes, forker=fork_server or stack.enter_context(ForkServer()))
            return _launch(scenario, out, listener, make_nodes, make_network, started)
    except OSError as error:  # by now all is ended and removed
        raise CapricornError(f"the run failed: {path_and_cause(error)}") from error


def _launch(
    scenario: Scenario, out: Path, listener: RunListener, make_nodes: MakeNodes, make_network: MakeNetwork,
    started: datetime,
) -> Path:  # fmt: skip
    check_tier(scenario)
    tokens = prepare(scenario.data, scenario.model.vocab_size, seq_len=scenario.model.seq_len)
    run_id = _new_run_id(scenario, started)
    with Interrupts() as interrupts:
        with contextlib.ExitStack() as stack:
            network, links = make_network(scenario.cluster)
            stack.callback(network.close)
            cluster = scenario.cluster.model_copy(update={"links": links})
            scenario = scenario.model_copy(update={"cluster": cluster})
            lock = RunLock(Path(scenario.store.root), run_id)
            stack.callback(lock.release, keep=scenario.store.keep)
            run_dir = (out / run_id).resolve()
            with named(f"make the folder of the run, {run_dir}"):
                run_dir.mkdir(parents=True)
            job = _make_job(scenario, run_id, run_dir, lock.folder, tokens, network)
            listener.on_start(run_dir, scenario)
            stack.push(partial(_finish_record, job, started))
            if not file_settings_of(scenario).in_memory and not scenario.store.keep:
                # Before the record is written, as they may have filled the disk; those on tmpfs go with the store.
                stack.callback(_remove_files, job)
            RunLoop(job, network, listener, interrupts, make_nodes).run()
        interrupts.check()
    return run_dir


def _remove_files(job: Job) -> None:
    """Removes what a system has written that writes files, and of the folder around it what is then empty."""
    shutil.rmtree(str(job.files_dir), ignore_errors=True)
    if (shared := shared_dir_of(job.scenario, job.run_id)) is not None:
        with contextlib.suppress(OSError):  # the persistent tier is there
            shared.rmdir()


def _make_job(
    scenario: Scenario, run_id: str, run_dir: Path, store_dir: Path, tokens: Path, network: NetworkBackend
) -> Job:
    cluster, emulation = scenario.cluster, scenario.emulation
    links_dir = storage_dir = None
    if cluster.links == PACED:
        links_dir = store_dir / "links"
        Links.create(links_dir, cluster.nodes, cluster.rate).close()
    rate = emulation.storage_node_bytes_per_s if emulation is not None else None
    if rate is None and any("storage clocks" in kind_of(fault.kind).needs for fault in scenario.faults):
        rate = STORAGE_BYTES_PER_S
    if rate is not None:
        storage_dir = store_dir / "storage"
        Storage.create(
            storage_dir, cluster.nodes, rate, emulation.storage_total_bytes_per_s if emulation is not None else None
        )
    shared_dir = shared_dir_of(scenario, run_id) or run_dir
    files_dir = store_dir / "files" if file_settings_of(scenario).in_memory else shared_dir / CHECKPOINTS
    with named(f"make the folder {files_dir}"):
        files_dir.mkdir(mode=0o700, parents=True)
    return Job(
        run_id=run_id,
        scenario=scenario,
        run_dir=run_dir,
        store_dir=store_dir,
        tokens=tokens,
        addresses=tuple(map(network.address, range(cluster.nodes))),
        links_dir=links_dir,
        storage_dir=storage_dir,
        files_dir=files_dir,
        persist_dir=tier_of(scenario, shared_dir),
        launcher=os.getpid(),
    )


def shared_dir_of(scenario: Scenario, run_id: str) -> Path | None:
    """Returns the run's folder that all machines share; None if none was named, or the run came to have no name."""
    shared = scenario.launch.shared_dir
    return Path(shared).resolve() / run_id if shared and run_id else None


class RunLoop:
    """The processes of one run, from start to end."""

    def __init__(
        self, job: Job, network: NetworkBackend, listener: RunListener, interrupts: Interrupts, make_nodes: MakeNodes
    ) -> None:
        self._job, self._network, self._listener, self._interrupts = job, network, listener, interrupts
        self._make_nodes, self._reverter = make_nodes, Reverter(job, network)
        self._samples = Follower(job.run_dir / ITERATIONS, IterationSample)
        self._events = Follower(job.run_dir / EVENTS, EventSample)
        self._heard: list[EventSample] = []
        self._is_training = False

    def run(self) -> None:
        """Runs the nodes until they are done.

        Raises:
            CapricornError: a rank or a node has given up.
            KeyboardInterrupt: the run was interrupted.
        """
        log_dir = self._job.run_dir / "log"
        log_dir.mkdir()
        # Processes that are started after a signal has come would ignore those that are to end them.
        self._interrupts.check()
        if self._job.scenario.cluster.is_emulated:
            self._measure_links()
        self._interrupts.check()
        nodes = self._make_nodes(self._job, self._network, log_dir, self._reverter.node_replaced)
        meter = CpuMeter()
        try:
            nodes.start()
            while not nodes.are_done:
                self._interrupts.check()
                nodes.wait(TICK_S)
                self._check_fatal()
                samples, events = self._tell_listener()
                if samples or any(event.event in COMES_ON for event in events):
                    nodes.progressed(samples)
                meter.tick(is_training=self._is_training)
        except GaveUpError as error:
            self._interrupts.check()  # as below
            self._check_fatal()
            self._tell_listener()
            raise CapricornError(self._describe_failure(error.node)) from None
        except (OSError, RecordError):
            self._interrupts.check()  # as below
            self._check_fatal()  # a rank may have met the cause before us
            raise
        except CapricornError:
            self._interrupts.check()  # what interrupts us may end all other processes at the same moment
            raise
        finally:
            try:
                nodes.stop()
                self._tell_listener()
            finally:
                self._reverter.close()
            with contextlib.suppress(RecordError):  # it would hide what has ended the run; the record comes next
                append(self._job.run_dir / CPU, meter.sample())

    def _measure_links(self) -> None:
        num_nodes = self._job.scenario.cluster.nodes
        entries = [self._network.enter_node(node) for node in range(num_nodes)]
        for sample in measure_links(entries, self._job.addresses, links=self._job.links_dir):
            append(self._job.run_dir / LINKS, sample)

    def _check_fatal(self) -> None:
        """Raises the error, if a rank has said that starting again cannot help: ConfigError for a user's mistake."""
        if fatal := self._job.fatal():
            raise told(f"the run cannot go on: {fatal.why}", is_users_mistake=fatal.is_users_mistake)

    def _tell_listener(self) -> tuple[list[IterationSample], list[EventSample]]:
        """Tells the listener what is new, and returns it."""
        samples, events = list(self._samples.new()), list(self._events.new())
        for sample in samples:
            self._is_training = True
            self._listener.on_sample(sample)
        for event in events:
            self._heard.append(event)
            self._reverter.on_event(event)
            self._listener.on_event(event)
        self._reverter.tick()
        self._listener.on_tick()
        return samples, events

    def _describe_failure(self, node: int) -> str:
        cause = cause_of(self._heard)
        return f"node {node} gave up{': ' * bool(cause)}{cause}; see {self._job.run_dir / 'log'}"


def _new_run_id(scenario: Scenario, started: datetime) -> str:
    return f"{started:%Y%m%d-%H%M%S}-{short_name(scenario.system.name)}-{scenario.model.name}-{secrets.token_hex(2)}"


def _finish_record(
    job: Job,
    started: datetime,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
) -> None:
    """Writes the record of a run that has ended, by an error where there is one.

    A mistake of the user's that was found before any iteration was done leaves nothing of the run.

    Raises:
        CapricornError: it cannot be written; what ended the run is told first.
    """
    if isinstance(error, ConfigError) and not (job.run_dir / ITERATIONS).exists():
        shutil.rmtree(job.run_dir, ignore_errors=True)
        return
    try:
        with named(f"write the results in {job.run_dir}"):
            _write_record(job, started)
    except CapricornError as unwritten:
        if error is None:
            raise
        # What came first may be the cause of it, and is not to be hidden.
        if isinstance(error, (CapricornError, OSError)):
            raise CapricornError(f"{error}; and then: {unwritten}") from error
        note_once(str(unwritten))


def _write_record(job: Job, started: datetime) -> None:
    store = store_at(job.store_dir)
    num_bytes = (0 if store is None else store.num_bytes) + OtherMachines.of(job.run_dir).store_bytes
    write_text(job.run_dir / STORE, as_json({"store_bytes": num_bytes}))
    write_recoveries(job.run_dir)
    write_run(job.run_dir, record_of(job, job.run_dir, started))


def record_of(job: Job, run_dir: Path, started: datetime) -> RunRecord:
    """Returns the record of what a run has written so far."""
    facts = environment(job.scenario.cluster.device)
    facts = facts.model_copy(update={"other_hosts": OtherMachines.of(run_dir).hosts})
    summary, verdict = summarize(run_dir, job.scenario, facts.num_cpus)
    return RunRecord(
        run_id=job.run_id,
        started_at=started.isoformat(timespec="seconds"),
        mode="emulated" if job.scenario.emulation else "live",
        system=short_name(job.scenario.system.name),
        seed=job.scenario.train.seed,
        config=job.scenario,
        environment=facts,
        summary=summary,
        verdict=verdict,
    )
