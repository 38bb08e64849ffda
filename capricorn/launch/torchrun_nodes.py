"""The nodes of a run as torchrun agents, one each, and the rendezvous that they share."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from capricorn.emulation.fabric import NamespaceEntry
from capricorn.emulation.testbed import NetworkBackend
from capricorn.errors import CapricornError
from capricorn.launch.nodes import GaveUpError
from capricorn.launch.restart_policy import MAX_GAP_S, RENDEZVOUS, RestartBudget, SilenceWatchdog
from capricorn.process import PYTHON, AwakeClock, Child, is_stopped, kill_child, thread_states
from capricorn.records.job_file import Job
from capricorn.records.samples import IterationSample
from capricorn.runtime.store.node_store import NodeStore
from capricorn.units import Seconds

KEEP_ALIVE_INTERVAL_S = 1
KEEP_ALIVE_ATTEMPTS = 5
"""A lost agent is noticed by torchrun's rendezvous after interval x attempts; its defaults make that 15 s."""
JOIN_TIMEOUT_S = 300
STOP_TIMEOUT_S: Seconds = 10.0


class ChildProcess(Child, Protocol):
    """A child of this process; `subprocess.Popen` is one."""

    pid: int

    def poll(self) -> int | None: ...

    def terminate(self) -> None: ...


def spawn(
    entry: NamespaceEntry,
    module: Sequence[str],
    log: Path,
    *,
    env: dict[str, str] | None = None,
    pass_fds: tuple[int, ...] = (),
) -> subprocess.Popen[bytes]:
    """Starts a module where the entry leads; it prints to the log."""
    # A session of its own: a Ctrl-C at the terminal is for the launcher, which ends the others in order.
    with log.open("ab") as output:
        return subprocess.Popen(
            [*entry.prefix, *module],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            pass_fds=(*entry.pass_fds, *pass_fds),
            start_new_session=True,
        )


class Rendezvous:
    """The store at which the agents meet."""

    def __init__(self, job: Job, network: NetworkBackend, log_dir: Path, spawn: Callable[..., ChildProcess]) -> None:
        """Starts the store, which takes over the network's listener.

        Args:
            job: what is run.
            network: the backend that the nodes are in.
            log_dir: where the store writes what it prints.
            spawn: starts a process, as `spawn` does.
        """
        with network.listener as listener:
            self.endpoint = "{}:{}".format(*listener.getsockname())
            module = ("capricorn.launch.rendezvous", str(os.getpid()), str(listener.fileno()))
            log = log_dir / "rendezvous.log"
            self.process: ChildProcess = spawn(network.enter_switch(), module, log, pass_fds=(listener.fileno(),))

    def stop(self) -> None:
        _stop(self.process)


class TorchrunNodes:
    """The nodes on this machine, each with an agent of torchrun, which starts its ranks again; implements `Nodes`."""

    def __init__(
        self,
        job: Job,
        network: NetworkBackend,
        log_dir: Path,
        on_replace: Callable[[int], None],
        *,
        spawn: Callable[..., ChildProcess] = spawn,
        sleep: Callable[[Seconds], object] = time.sleep,
    ) -> None:
        """Starts nothing yet.

        Args:
            job: what is run.
            network: the backend that the nodes are in.
            log_dir: where each process writes what it prints.
            on_replace: is told of each node that is replaced, before its successor starts.
            spawn: starts a process.
            sleep: waits.
        """
        self._job, self._network, self._log_dir, self._on_replace = job, network, log_dir, on_replace
        self._spawn, self._sleep = spawn, sleep
        launch = job.scenario.launch
        self._nodes = list(range(job.scenario.cluster.nodes))
        self._replacements = RestartBudget(launch.max_restarts + len(job.scenario.faults))
        self._processes: dict[int, ChildProcess] = {}
        self._rendezvous: Rendezvous | None = None
        self._awake = AwakeClock(MAX_GAP_S)
        self._silence = SilenceWatchdog[int](2 * launch.frozen_s)

    def start(self) -> None:
        self._rendezvous = Rendezvous(self._job, self._network, self._log_dir, self._spawn)
        self._job_file, self._endpoint = self._job.write(), self._rendezvous.endpoint
        for node in self._nodes:
            self._start_node(node)

    def wait(self, timeout_s: Seconds) -> None:
        self._sleep(timeout_s)
        self._kill_stopped()
        if self._rendezvous is not None and (store := self._rendezvous.process).poll() is not None:
            raise CapricornError(f"the rendezvous store, by which nodes start again, has ended: {_end_of(store)}")
        for node, code in self._exit_codes().items():
            if code > 0:  # torchrun has restarted the ranks as often as it may
                raise GaveUpError(node)
            if code < 0:
                self._replacements.spend(node)
                self._on_replace(node)
                self._start_node(node)

    @property
    def are_done(self) -> bool:
        codes = self._exit_codes()
        return len(codes) == len(self._nodes) and not any(codes.values())

    def progressed(self, samples: Sequence[IterationSample] = ()) -> None:
        """Does nothing: torchrun sees to ranks that hang."""

    def stop(self) -> None:
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        for process in self._processes.values():
            _stop(process, max(0.1, deadline_s - time.monotonic()))
        if self._rendezvous is not None:
            self._rendezvous.stop()

    def _kill_stopped(self) -> None:
        """Kills agents and the rendezvous store if they have been stopped for too long: nobody else would notice."""
        processes = dict(self._processes)
        if self._rendezvous is not None:
            processes[RENDEZVOUS] = self._rendezvous.process
        now_s, states = self._awake(), {key: thread_states(process.pid) for key, process in processes.items()}
        for key in processes:
            if not is_stopped(states[key]):
                self._silence.heard(key, now_s)
        for key in self._silence.silent(now_s, states.__getitem__):
            kill_child(processes[key], "the rendezvous store" if key == RENDEZVOUS else f"the agent of node {key}")

    def _exit_codes(self) -> dict[int, int]:
        """Returns by node the exit codes of the agents that have ended, negative for the signal that ended one."""
        codes = {node: process.poll() for node, process in self._processes.items()}
        return {node: code for node, code in codes.items() if code is not None}

    def _start_node(self, node: int) -> None:
        """Starts the agent of a node, anew if there was one."""
        NodeStore.create(self._job.node_dir(node), self._job.run_id, node, self._job.scenario.topology)
        log, env = self._log_dir / f"node{node}.log", self._environment()
        self._processes[node] = self._spawn(self._network.enter_node(node), self._module(node), log, env=env)

    def _module(self, node: int) -> list[str]:
        scenario = self._job.scenario
        launch = scenario.launch
        conf = {
            "join_timeout": JOIN_TIMEOUT_S,
            "keep_alive_interval": KEEP_ALIVE_INTERVAL_S,
            "keep_alive_max_attempt": KEEP_ALIVE_ATTEMPTS,
            # Told, as torchrun knows a machine by its name alone; the store is ours.
            "is_host": 0,
        }
        return [
            *("capricorn.launch.torchrun_agent", str(os.getpid())),
            *("--nnodes", str(scenario.topology.num_nodes)),
            *("--nproc-per-node", str(scenario.topology.ranks_per_node)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", self._endpoint),
            *("--rdzv-id", self._job.run_id),
            # By default a folder in TMPDIR, which stays there.
            *("--log-dir", str(self._log_dir / "torchrun")),
            *("--rdzv-conf", ",".join(f"{key}={value}" for key, value in conf.items())),
            *("--local-addr", self._network.address(node)),
            *("--max-restarts", str(launch.max_restarts + len(scenario.faults))),
            *("--monitor-interval", "0.1", "--shutdown-timeout", "5"),
            *("--no-python", *PYTHON, "capricorn.launch.worker", str(self._job_file)),
        ]

    def _environment(self) -> dict[str, str]:
        # With torch 2.13 restarted ranks read the addresses of the dead attempt from the agent's shared store.
        settings = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONUNBUFFERED": "1"}
        return settings | {"GLOO_SOCKET_IFNAME": self._network.interface}


def _stop(process: ChildProcess, timeout_s: Seconds = STOP_TIMEOUT_S) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout_s)
        return
    kill_child(process, "a process of the run")


def _end_of(process: ChildProcess) -> str:
    code = process.poll() or 0
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
