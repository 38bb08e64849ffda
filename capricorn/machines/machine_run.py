"""One run as a machine that follows takes part in it: its part of the store, its records, and its node agent."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from capricorn.config.fields import FrozenModel
from capricorn.config.scenario import Scenario
from capricorn.emulation.fabric import NamespaceEntry
from capricorn.errors import TransportError
from capricorn.faults.injector import claim_faults
from capricorn.launch.fork_client import ForkedProcess, Forker
from capricorn.launch.launch_messages import RunNodeAgent, receive
from capricorn.launch.preflight import require_machine
from capricorn.machines.control_messages import AgentEnded, BeginRun, FileGrew, FromAgent, RunEnded, StartNode
from capricorn.machines.record_stream import RecordReader
from capricorn.machines.shared_folders import check_shared, shared_folders
from capricorn.runtime.comm.addresses import interface_of
from capricorn.runtime.store.node_store import NodeStore, RunLock, store_at
from capricorn.trainer.data import prepare
from capricorn.units import Seconds

AGENT_STOP_S: Final[Seconds] = 8.0
"""How long a node agent that was told to end may take to end its ranks."""
RECORDS: Final = "records"
"""The folder in the run's store for what is to go to machine 0."""


class MachineRun:
    """A run on this machine, from its begin to its end."""

    def __init__(self, begin: BeginRun, own: Scenario, machine: int, address: str) -> None:
        """Makes ready: what the run needs of this machine is checked and made.

        Args:
            begin: what machine 0 says of the run.
            own: what this machine was told: its store, its data, its place.
            machine: the number of this machine.
            address: of this machine, by which the others reach it.

        Raises:
            ConfigError: something is missing by a mistake of the user's.
            CapricornError: something cannot be made here.
        """
        update = {"launch": own.launch, "store": own.store, "data": own.data}
        scenario = begin.job.scenario.model_copy(update=update)
        require_machine(scenario)
        check_shared(shared_folders(begin.job), begin.token)
        tokens = prepare(scenario.data, scenario.model.vocab_size, seq_len=scenario.model.seq_len)
        # A name of its own: two machines may share a store's file system, as containers on one host do.
        self._lock = RunLock(Path(scenario.store.root), f"{begin.job.run_id}-machine{machine}")
        self._keeps_store = scenario.store.keep
        self._address = address
        run_dir = self._lock.folder / RECORDS
        (run_dir / "log").mkdir(parents=True)
        self._job = begin.job.model_copy(
            update={
                "scenario": scenario,
                "run_dir": run_dir,
                "store_dir": self._lock.folder,
                "tokens": tokens,
                "launcher": os.getpid(),
                "epoch_s": begin.epoch_s,
            }
        )
        self._reader = RecordReader(run_dir)
        self._agent: ForkedProcess | None = None
        self._start = 0
        self.link: socket.socket | None = None
        """The link to the node agent, if this machine is a node."""

    def start_node(self, order: StartNode, forker: Forker) -> None:
        """Starts the node agent, with an empty store."""
        self._start = order.start
        addresses = list(self._job.addresses)
        addresses[order.node] = self._address
        job = self._job.model_copy(update={"addresses": tuple(addresses)})
        claim_faults(job.run_dir, order.claimed_faults)
        NodeStore.create(job.node_dir(order.node), job.run_id, order.node, job.scenario.topology)
        role = RunNodeAgent(
            job_file=job.write(),
            node=order.node,
            endpoint=order.endpoint,
            interface=interface_of(self._address),
            system=job.scenario.system.name,
        )
        log = job.run_dir / "log" / f"node{order.node}.log"
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._agent = forker.fork(role, fds=[theirs.fileno()], entry=NamespaceEntry(), log=log)

    def tell_agent(self, message: str) -> None:
        """Carries a message to the node agent."""
        if self.link is not None:
            with contextlib.suppress(ConnectionError):  # it has ended, of which its link tells next
                self.link.send(message.encode())

    def hear_agent(self) -> FrozenModel:
        """Returns what the node agent has to say, which is then on its link; also that it has ended."""
        assert self.link is not None
        if message := receive(self.link):
            return FromAgent(message=message.decode())
        self.end_node(is_forced=True)
        return AgentEnded(start=self._start)

    def end_node(self, *, is_forced: bool) -> None:
        """Ends the node agent and its ranks, if there are any."""
        if self.link is None or self._agent is None:
            return
        self.link.close()
        self.link = None
        if is_forced:
            self._agent.signal(signal.SIGKILL)
        self._agent.end(AGENT_STOP_S)
        self._agent = None

    def records(self, *, is_last: bool = False) -> Iterator[FileGrew]:
        """Yields what was written since the last call."""
        return self._reader.grown(is_last=is_last)

    def end(self) -> RunEnded:
        """Ends what runs; returns what machine 0 is told when all records have been sent. `remove` comes last."""
        self.end_node(is_forced=False)
        store = store_at(self._lock.folder)
        return RunEnded(store_bytes=0 if store is None else store.num_bytes)

    def remove(self) -> None:
        """Removes this machine's part of the run; a second time does nothing."""
        with contextlib.suppress(TransportError):
            self.end_node(is_forced=True)
        self._lock.release(keep=self._keeps_store)
