"""Runs a scenario on this machine from start to record: store, processes, watching, replacing lost nodes, clean-up.

Knows no torch; what trains are the ranks, which it has forked or started by torchrun.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from capricorn.config.scenario import Scenario
from capricorn.emulation.measure import measure_links
from capricorn.emulation.route import Links
from capricorn.emulation.storage import Storage
from capricorn.emulation.testbed import PACED, Ground, lay_ground
from capricorn.errors import CapricornError
from capricorn.faults.feasibility import check_faults
from capricorn.faults.revert import Repairs
from capricorn.launch.cpu_meter import CpuMeter
from capricorn.launch.fork_client import Standby
from capricorn.launch.forked_nodes import WarmNodes
from capricorn.launch.interrupts import Interrupts
from capricorn.launch.nodes import GaveUpError, Nodes
from capricorn.launch.persist_folder import check_tier, tier_of
from capricorn.launch.preflight import environment
from capricorn.launch.torchrun_nodes import TorchrunNodes
from capricorn.records.follow import Follower
from capricorn.records.job_file import FATAL, Job
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
from capricorn.runtime.store.node_store import RunLock, find_stores
from capricorn.stats.run_summary import STORE, summarize
from capricorn.systems.registry import short_name
from capricorn.systems.settings import file_settings_of
from capricorn.trainer.data import prepare

TICK_S: Final = 0.1
STORAGE_BYTES_PER_S: Final = 1e9
"""Of each node, where storage is modelled only so that it can become slow."""
CHECKPOINTS: Final = "checkpoints"
"""Of a run folder: what systems write that write files."""


class RunListener:
    """Hears what happens during a run, in the thread that called `launch`; every method does nothing."""

    def on_start(self, run_dir: Path, scenario: Scenario) -> None:
        """The run folder exists; processes start now."""

    def on_sample(self, sample: IterationSample) -> None:
        """A rank finished an iteration."""

    def on_event(self, event: EventSample) -> None:
        """Something happened to a worker."""

    def on_tick(self) -> None:
        """About ten times a second."""


def launch(scenario: Scenario, out: Path, listener: RunListener, standby: Standby | None = None) -> Path:
    """Runs the scenario and yields its folder below `out`, with `run.json` in it whatever happened.

    `standby` is a warm process that serves several runs; without it the run has one of its own.

    Raises:
        CapricornError: the run failed, with what the failed rank said.
        KeyboardInterrupt: it was interrupted (also by SIGTERM); everything has been ended and removed.
    """
    started = datetime.now(UTC)
    check_faults(scenario, out)
    with contextlib.ExitStack() as stack:
        if standby is None and not scenario.launch.by_torchrun:
            standby = stack.enter_context(Standby())  # it imports while we make ready
        return _launch(scenario, out, listener, standby, started)


def _launch(scenario: Scenario, out: Path, listener: RunListener, standby: Standby | None, started: datetime) -> Path:
    check_tier(scenario)
    tokens = prepare(scenario.data, scenario.model.vocab_size, seq_len=scenario.model.seq_len)
    run_id = _new_run_id(scenario, started)
    with Interrupts() as interrupts:
        ground, scenario = _lay_ground(scenario)
        try:
            lock = RunLock(Path(scenario.store.root), run_id)
            try:
                run_dir = (out / run_id).resolve()
                run_dir.mkdir(parents=True)
                job = _make_job(scenario, run_id, run_dir, lock.folder, tokens, ground)
                listener.on_start(run_dir, scenario)
                try:
                    _Run(job, ground, listener, interrupts, standby).run()
                finally:
                    if not file_settings_of(scenario).in_memory and not scenario.store.keep:
                        # First, as they may have filled the disk; those on tmpfs go with the store.
                        shutil.rmtree(run_dir / CHECKPOINTS, ignore_errors=True)
                    _finish_record(job, started)
            finally:
                lock.release(keep=scenario.store.keep)
        finally:
            ground.close()
        interrupts.check()
    return run_dir


def _lay_ground(scenario: Scenario) -> tuple[Ground, Scenario]:
    """Where the nodes live, and the scenario that says how their links are made."""
    ground, links = lay_ground(scenario.cluster)
    cluster = scenario.cluster.model_copy(update={"links": links})
    return ground, scenario.model_copy(update={"cluster": cluster})


def _make_job(scenario: Scenario, run_id: str, run_dir: Path, store_dir: Path, tokens: Path, ground: Ground) -> Job:
    cluster, emulation = scenario.cluster, scenario.emulation
    links_dir = storage_dir = None
    if cluster.links == PACED:
        links_dir = store_dir / "links"
        Links.create(links_dir, cluster.nodes, cluster.rate).close()
    rate = emulation.storage_node_bytes_per_s if emulation is not None else None
    if rate is None and any(fault.kind == "disk-slow" for fault in scenario.faults):
        rate = STORAGE_BYTES_PER_S
    if rate is not None:
        storage_dir = store_dir / "storage"
        Storage.create(
            storage_dir, cluster.nodes, rate, emulation.storage_total_bytes_per_s if emulation is not None else None
        )
    files_dir = store_dir / "files" if file_settings_of(scenario).in_memory else run_dir / CHECKPOINTS
    files_dir.mkdir(mode=0o700)
    return Job(
        run_id=run_id,
        scenario=scenario,
        run_dir=run_dir,
        store_dir=store_dir,
        tokens=tokens,
        addresses=tuple(map(ground.address, range(cluster.nodes))),
        links_dir=links_dir,
        storage_dir=storage_dir,
        files_dir=files_dir,
        persist_dir=tier_of(scenario, run_dir),
    )


class _Run:
    """The processes of one run, from start to end."""

    def __init__(
        self, job: Job, ground: Ground, listener: RunListener, interrupts: Interrupts, standby: Standby | None
    ) -> None:
        self._job, self._ground, self._listener, self._interrupts = job, ground, listener, interrupts
        self._standby, self._repairs = standby, Repairs(job, ground)
        self._samples = Follower(job.run_dir / ITERATIONS, IterationSample)
        self._events = Follower(job.run_dir / EVENTS, EventSample)
        self._failures: list[str] = []
        self._is_training = False

    def run(self) -> None:
        log_dir = self._job.run_dir / "log"
        log_dir.mkdir()
        # Processes that are started after a signal has come would ignore those that are to end them.
        self._interrupts.check()
        if self._job.scenario.cluster.is_emulated:
            self._measure_links()
        self._interrupts.check()
        nodes = self._make_nodes(log_dir)
        meter = CpuMeter()
        try:
            nodes.start()
            while not nodes.are_done:
                self._interrupts.check()
                nodes.wait(TICK_S)
                self._check()
                if self._tell():
                    nodes.progressed()
                meter.tick(is_training=self._is_training)
        except GaveUpError as error:
            self._check()
            self._tell()
            raise CapricornError(self._describe_failure(error.node)) from None
        finally:
            try:
                nodes.stop()
                self._tell()
            finally:
                self._repairs.close()
            append(self._job.run_dir / CPU, meter.sample())

    def _make_nodes(self, log_dir: Path) -> Nodes:
        if self._standby is None or self._job.scenario.launch.by_torchrun:
            return TorchrunNodes(self._job, self._ground, log_dir, self._repairs.node_replaced)
        return WarmNodes(self._job, self._ground, log_dir, self._standby, self._repairs.node_replaced)

    def _measure_links(self) -> None:
        num_nodes = self._job.scenario.cluster.nodes
        entries = [self._ground.enter_node(node) for node in range(num_nodes)]
        for sample in measure_links(entries, self._job.addresses, links=self._job.links_dir):
            append(self._job.run_dir / LINKS, sample)

    def _check(self) -> None:
        """Raises CapricornError if a rank has said that starting again cannot help."""
        fatal = self._job.run_dir / FATAL
        if fatal.exists() and (text := fatal.read_text(encoding="utf-8")):
            raise CapricornError(f"the run cannot go on: {text}")

    def _tell(self) -> bool:
        """Tells the listener what is new; whether some rank has finished an iteration."""
        samples = list(self._samples.new())
        for sample in samples:
            self._is_training = True
            self._listener.on_sample(sample)
        for event in self._events.new():
            if event.event == "failed":
                self._failures.append(f"rank {event.rank}: {event.detail}")
            self._repairs.on_event(event)
            self._listener.on_event(event)
        self._repairs.tick()
        self._listener.on_tick()
        return bool(samples)

    def _describe_failure(self, node: int) -> str:
        last = f": {self._failures[-1]}" if self._failures else ""
        return f"node {node} gave up{last}; see {self._job.run_dir / 'log'}"


def _new_run_id(scenario: Scenario, started: datetime) -> str:
    return f"{started:%Y%m%d-%H%M%S}-{short_name(scenario.system.name)}-{scenario.model.name}-{secrets.token_hex(2)}"


def _finish_record(job: Job, started: datetime) -> None:
    try:
        _write_record(job, started)
    except OSError as error:
        raise CapricornError(f"cannot write the results in {job.run_dir}: {error.strerror}") from None


def _write_record(job: Job, started: datetime) -> None:
    stores = [store for store in find_stores(job.store_dir.parent) if store.path == job.store_dir]
    (job.run_dir / STORE).write_text(json.dumps({"store_bytes": sum(store.num_bytes for store in stores)}))
    write_recoveries(job.run_dir)
    write_run(job.run_dir, record_of(job, job.run_dir, started))


def record_of(job: Job, run_dir: Path, started: datetime) -> RunRecord:
    """The record of what a run has written so far."""
    facts = environment(job.scenario.cluster.device)
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
