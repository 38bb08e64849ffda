"""Machine 0 of a command that runs on several: gathers the others, has them start nodes, and brings their records here.

To the launcher it is what forks (`Forker`) and what waits (`Waiting`): a node on another machine looks like one that
was forked here. What the launcher reads and writes on the link of a node is carried over the connection to its machine,
by whoever waits; so no thread is needed but those of the `Door`. A machine is in one of these places:

| place   | is            | what happens                          | next                                             |
|---------|---------------|---------------------------------------|--------------------------------------------------|
| joining | at the door   | it was told to run something else     | gone; before the first run all are, by an error  |
|         |               | its node has no machine               | node                                             |
|         |               | its number is beyond the nodes        | spare                                            |
| node    | node K        | its connection is closed, or it is    | gone, and the node is vacant                     |
|         |               | silent while its node is given up     |                                                  |
| spare   | waits         | a node is vacant and to be started    | node                                             |

A machine that was lost may join again. Knows no torch.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from pydantic import ValidationError

from capricorn.config.endpoint import parse_endpoint
from capricorn.config.fields import FrozenModel
from capricorn.config.launch_config import LaunchConfig
from capricorn.emulation.fabric import NamespaceEntry
from capricorn.errors import CapricornError, ConfigError, TransportError, note_once, told
from capricorn.faults.injector import claimed_faults
from capricorn.files import named
from capricorn.launch.fork_client import ForkedProcess, Forker, ForkServer
from capricorn.launch.forked_nodes import wait_readable
from capricorn.launch.launch_messages import RunNodeAgent, ServeRendezvous, receive
from capricorn.launch.nodes import VacantError
from capricorn.machines.agreement import difference
from capricorn.machines.control_link import CONDUCTOR, control_identity, has_secret
from capricorn.machines.control_messages import (
    AgentEnded,
    BeginRun,
    EndNode,
    EndRun,
    FileGrew,
    FromAgent,
    Goodbye,
    MachineAlive,
    Ready,
    Refused,
    RunEnded,
    StartNode,
    ToAgent,
    Welcome,
    farewell_of,
    follower_message,
)
from capricorn.machines.door import Arrival, Door
from capricorn.machines.machine import Machine, RemoteAgent
from capricorn.machines.record_stream import append_to
from capricorn.machines.roster import Roster
from capricorn.machines.shared_folders import shared_folders, token_in
from capricorn.records.job_file import Job
from capricorn.runtime.comm.addresses import conductor_address, family_of
from capricorn.units import Seconds

GATHER_TIMEOUT_S: Final[Seconds] = 300.0
"""How long machines may take to come, at the start."""
READY_TIMEOUT_S: Final[Seconds] = 120.0
"""How long a machine may take to make ready for a run: it may have to read the data."""
END_TIMEOUT_S: Final[Seconds] = 20.0
"""How long machines may take to end a run and send what is left of its records."""
SILENT_S: Final[Seconds] = 3.0
"""After a silence of that long a machine whose node is given up is given up, too."""
TICK_S: Final[Seconds] = 0.25


class Conductor:
    """The machines of a command, of which this is number 0."""

    def __init__(
        self,
        launch: LaunchConfig,
        facts: Mapping[str, Any],
        say: Callable[[str], None],
        *,
        forker: Forker | None = None,
    ) -> None:
        """Listens for them.

        Args:
            launch: how many there are, and where they meet.
            facts: what all of them must have been told to run; see `agreement`.
            say: prints a line.
            forker: forks what is of this machine; by default a fork server of its own.

        Raises:
            ConfigError: nobody can listen there.
        """
        self._launch, self._facts, self._say = launch, facts, say
        self.address = conductor_address(launch)
        """Of this machine, by which the others reach it."""
        self._roster = Roster(launch.nnodes, launch.spares)
        self._job: Job | None = None
        self._has_gathered = False
        """Whether all nodes have had a machine; from then on one that differs is sent away alone."""
        self._awaited: set[int] = set()
        """Nodes that could not be started for want of a machine."""
        self._token, self._tokens = "", contextlib.ExitStack()
        port = parse_endpoint(launch.rdzv_endpoint, "--rdzv-endpoint").port
        with named(f"listen at {launch.rdzv_endpoint}"):
            listener = socket.create_server((self.address, port), family=family_of(self.address), backlog=256)
        self._door = Door(listener, control_identity(launch.job))
        self._resources = contextlib.ExitStack()
        self._forker = forker or self._resources.enter_context(ForkServer())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        self.close(farewell_of(error))

    def close(self, farewell: Goodbye) -> None:
        """Dismisses all machines with that word; a second time does nothing."""
        for machine in self._roster.machines:
            with contextlib.suppress(TransportError):
                machine.link.send(farewell)
            machine.link.close()
        self._roster.machines.clear()
        self._door.close()
        self._resources.close()

    # --- who is there ---------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Waits until every node has a machine.

        Raises:
            ConfigError: one was told to run something else.
            CapricornError: they do not come in time.
        """
        end_s = time.monotonic() + GATHER_TIMEOUT_S
        if not has_secret():
            note_once("CAPRICORN_SECRET is not set: whoever reaches the endpoint can join")
        if vacant := self._roster.vacant():
            self._say(
                f"machine 0 of {self._launch.nnodes}: waits for {len(vacant)} more at {self._launch.rdzv_endpoint}"
            )
        while vacant := self._roster.vacant():
            if time.monotonic() > end_s:
                raise CapricornError(
                    f"machine {', '.join(map(str, vacant))} of {self._launch.nnodes} did not come to "
                    f"{self._launch.rdzv_endpoint} within {GATHER_TIMEOUT_S:g} s; start the same command there"
                )
            self.wait([], TICK_S)
        self._has_gathered = True

    def address_of(self, node: int) -> str:
        """Returns the address of the machine that is that node; empty if there is none."""
        machine = self._roster.of_node(node)
        return self.address if node == CONDUCTOR else machine.address if machine is not None else ""

    def hosts(self) -> tuple[str, ...]:
        """Returns what the other machines are called: the nodes in their order, then spares."""
        return self._roster.hosts()

    def _admit(self, arrival: Arrival) -> None:
        """Gives a machine its place, or sends it away.

        Raises:
            ConfigError: it was told to run something else than this one, and not all machines are there yet.
        """
        number, link = arrival.join.machine, arrival.link
        silent = self._roster.of_number(number)
        if silent is not None and time.monotonic() - silent.heard_s > SILENT_S:
            self._lose(silent)  # it has come again, and nobody has noticed that it was gone
        is_mistaken = difference(self._facts, number, arrival.join.facts)
        if why := is_mistaken or self._roster.why_no_place(number):
            with contextlib.suppress(TransportError):
                link.send(Goodbye(exit_code=ConfigError.exit_code, why=why))
            link.close()
            if is_mistaken and not self._has_gathered:
                raise ConfigError(why)
            return
        machine = Machine(
            number, arrival.join.host, arrival.join.address, link, arrival.clock_ahead_s,
            node=self._roster.place_of(number), heard_s=time.monotonic(),
        )  # fmt: skip
        self._roster.machines.append(machine)
        self._tell(machine, Welcome(node=machine.node))
        if self._job is not None:
            self._tell_run(machine)

    def _lose(self, machine: Machine) -> None:
        """Forgets a machine, by which its node, if it is one, is lost."""
        if machine in self._roster.machines:
            self._roster.machines.remove(machine)
        machine.link.close()
        self._close_relay(machine)

    def _close_relay(self, machine: Machine) -> None:
        if machine.relay is not None:
            machine.relay.close()
            machine.relay = None
            machine.to_launcher.clear()

    # --- a run ----------------------------------------------------------------------------------------------------

    def begin_run(self, job: Job) -> None:
        """Has all machines make ready for a run.

        Raises:
            ConfigError: one lacks something, by a mistake of the user's.
            CapricornError: one cannot, or does not answer.
        """
        self._job = job
        self._token = self._tokens.enter_context(token_in(shared_folders(job)))
        for machine in list(self._roster.machines):
            machine.is_ready, machine.refusal, machine.has_ended_run, machine.store_bytes = False, None, False, 0
            self._tell_run(machine)
        self._await(lambda machine: machine.is_ready or machine.node is None, READY_TIMEOUT_S, "make ready for the run")

    def end_run(self) -> int:
        """Has all machines end the run; returns what their parts of the memory store came to, in bytes."""
        if self._job is None:
            return 0
        for machine in list(self._roster.machines):
            self._close_relay(machine)
            self._tell(machine, EndRun())
        with contextlib.suppress(CapricornError):
            self._await(lambda machine: machine.has_ended_run, END_TIMEOUT_S, "end the run")
        for machine in [each for each in self._roster.machines if not each.has_ended_run]:
            note_once(f"{machine} did not end the run within {END_TIMEOUT_S:g} s: its records may lack their end")
            self._lose(machine)
        self._job = None
        self._tokens.close()
        return sum(machine.store_bytes for machine in self._roster.machines)

    def _tell_run(self, machine: Machine) -> None:
        assert self._job is not None
        epoch_s = self._job.epoch_s + machine.clock_ahead_s
        self._tell(machine, BeginRun(job=self._job, token=self._token, epoch_s=epoch_s))

    def _await(self, is_through: Callable[[Machine], bool], timeout_s: Seconds, act: str) -> None:
        """Waits until all machines are through with something.

        Raises:
            CapricornError: one refused, was lost, or takes longer.
        """
        end_s, before = time.monotonic() + timeout_s, list(self._roster.machines)
        while not all(map(is_through, before)):
            self.wait([], TICK_S)
            for machine in before:
                if (refusal := machine.refusal) is not None:
                    raise told(f"{machine}: {refusal.why}", is_users_mistake=refusal.is_users_mistake)
                if machine not in self._roster.machines and not is_through(machine):
                    raise CapricornError(f"{machine} was lost before it could {act}")
            if time.monotonic() > end_s:
                late = ", ".join(str(machine) for machine in before if not is_through(machine))
                raise CapricornError(f"{late} did not {act} within {timeout_s:g} s")

    # --- nodes on other machines -----------------------------------------------------------------------------------

    def fork(
        self, role: RunNodeAgent | ServeRendezvous, *, fds: Sequence[int], entry: NamespaceEntry, log: Path
    ) -> ForkedProcess:
        """Has the node start on its machine; forks what is of this machine. See `Forker`.

        Args:
            role: what it becomes.
            fds: the descriptors of its role; of a node on another machine, the other end of its link.
            entry: the namespaces it enters, on this machine.
            log: the file it prints to, on this machine.

        Raises:
            VacantError: no machine is there for the node.
        """
        if not isinstance(role, RunNodeAgent) or role.node == CONDUCTOR:
            return self._forker.fork(role, fds=fds, entry=entry, log=log)
        assert self._job is not None
        machine = self._machine_for(role.node)
        machine.relay = socket.socket(fileno=os.dup(fds[0]))
        machine.relay.setblocking(False)
        machine.num_starts += 1
        marks = claimed_faults(self._job.run_dir)
        start = StartNode(node=role.node, start=machine.num_starts, endpoint=role.endpoint, claimed_faults=marks)
        self._tell(machine, start)
        return RemoteAgent(machine, self.end_node)

    def end_node(self, machine: Machine, *, is_forced: bool) -> None:
        """Has a machine end its node agent, by force if that is silent; a machine that is silent itself is given up."""
        self._close_relay(machine)
        if is_forced and time.monotonic() - machine.heard_s > SILENT_S:
            self._lose(machine)
        elif machine in self._roster.machines:
            self._tell(machine, EndNode(is_forced=is_forced))

    def _machine_for(self, node: int) -> Machine:
        """Returns the machine that is that node; if there is none, a spare takes its place."""
        self._look()
        machine = self._roster.of_node(node) or self._roster.spare()
        if machine is None or not machine.is_ready:
            if node not in self._awaited:
                self._awaited.add(node)
                self._say(f"node {node} has no machine; waits for one")
            raise VacantError(node)
        self._awaited.discard(node)
        if machine.node is None:
            machine.node = node
            self._say(f"{machine} takes the place of node {node}")
        return machine

    # --- what is said ----------------------------------------------------------------------------------------------

    def wait(self, sockets: Sequence[socket.socket], timeout_s: Seconds) -> list[socket.socket]:
        """Returns the sockets that have something to read; carries meanwhile what machines and launcher say.

        Returns early, with nothing, when something else has happened. See `Waiting`.
        """
        if ready := self._look(sockets, timeout_s):
            return ready
        return wait_readable(sockets, 0)

    def _look(self, sockets: Sequence[socket.socket] = (), timeout_s: Seconds = 0.0) -> list[socket.socket]:
        by_link = {machine.link: machine for machine in self._roster.machines}
        by_relay = {machine.relay: machine for machine in self._roster.machines if machine.relay is not None}
        readable: list[Any] = [*sockets, *by_link, *by_relay, self._door]
        ready = select.select(readable, [], [], timeout_s)[0]
        if self._door in ready:
            for arrival in self._door.arrivals():
                self._admit(arrival)
        for link in by_link.keys() & set(ready):
            self._hear(by_link[link])
        for relay in by_relay.keys() & set(ready):
            self._carry(by_relay[relay])
        for machine in self._roster.machines:
            self._deliver(machine)
        return [each for each in ready if each in sockets]

    def _carry(self, machine: Machine) -> None:
        """Carries to a node agent what the launcher says."""
        if machine.relay is None:
            return
        if message := receive(machine.relay):
            self._tell(machine, ToAgent(message=message.decode()))
        else:
            self.end_node(machine, is_forced=False)

    def _deliver(self, machine: Machine) -> None:
        """Hands to the launcher what a node agent has said, as far as there is room; it reads in this thread, too."""
        with contextlib.suppress(BlockingIOError, ConnectionError):  # the rest later; or never, if it has given it up
            while machine.to_launcher and machine.relay is not None:
                machine.relay.send(machine.to_launcher[0])
                machine.to_launcher.popleft()

    def _hear(self, machine: Machine) -> None:
        if machine not in self._roster.machines:
            return
        try:
            for message in machine.link.receive():
                self._take(machine, message)
        except (TransportError, ValidationError):
            self._lose(machine)

    def _take(self, machine: Machine, data: bytes) -> None:
        machine.heard_s = time.monotonic()
        message = follower_message(data)
        match message:
            case MachineAlive():
                return
            case FromAgent():
                machine.to_launcher.append(message.message.encode())
            case AgentEnded() if message.start == machine.num_starts:
                self._deliver(machine)
                self._close_relay(machine)
            case FileGrew():
                if self._job is not None:
                    append_to(self._job.run_dir, message)
            case Ready():
                machine.is_ready = True
            case Refused():
                machine.refusal = message
            case RunEnded():
                machine.has_ended_run, machine.is_ready, machine.store_bytes = True, False, message.store_bytes

    def _tell(self, machine: Machine, message: FrozenModel) -> None:
        try:
            machine.link.send(message)
        except TransportError:
            self._lose(machine)
