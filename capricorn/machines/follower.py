"""A machine that another one conducts: joins it, takes part in its runs, and ends as it says.

What is done here is told in `machine_run`; this carries what is said, and ends all of it whatever happens.
"""

from __future__ import annotations

import contextlib
import math
import platform
import select
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from pydantic import ValidationError

from capricorn.config.endpoint import Endpoint, parse_endpoint
from capricorn.config.launch_config import LaunchConfig
from capricorn.config.scenario import Scenario
from capricorn.errors import CapricornError, ConfigError, TransportError, note_once, told
from capricorn.launch.fork_client import ForkServer
from capricorn.launch.interrupts import Interrupts
from capricorn.machines.control_link import CONDUCTOR, SECRET, ControlLink, control_identity
from capricorn.machines.control_messages import (
    AskClock,
    BeginRun,
    ClockReading,
    EndNode,
    EndRun,
    Goodbye,
    Join,
    MachineAlive,
    Ready,
    Refused,
    RunEnded,
    StartNode,
    ToAgent,
    Welcome,
    conductor_message,
)
from capricorn.machines.machine_run import MachineRun
from capricorn.runtime.comm.addresses import CONNECT_TIMEOUT_S, address_on, resolve
from capricorn.runtime.comm.handshake import HANDSHAKE_TIMEOUT_S, greet
from capricorn.units import Seconds

JOIN_TIMEOUT_S: Final[Seconds] = 300.0
"""How long machine 0 may take to be there."""
NAME_TIMEOUT_S: Final[Seconds] = 60.0
"""How long its name may be unknown: that of a pod is there with the pod, a wrong one never."""
RETRY_S: Final[Seconds] = 0.5
GREETINGS: Final = 3
"""Times that a machine proves itself: one that is flooded may have closed the connection before it came to that."""
TICK_S: Final[Seconds] = 0.1
HEARTBEAT_S: Final[Seconds] = 1.0


def follow(own: Scenario, facts: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Takes part in the command of machine 0 until that is over.

    Args:
        own: what this machine was told to run; its store, its data and its place count.
        facts: what all machines must have been told; see `agreement`.
        say: prints a line.

    Raises:
        ConfigError: it was told something else than machine 0, or lacks something by the user's mistake.
        CapricornError: the command has failed on machine 0, or that is gone.
        KeyboardInterrupt: it was interrupted; its part of the run has been ended and removed.
    """
    link = connect(own.launch)
    with contextlib.closing(link), contextlib.closing(ForkServer()) as fork_server, Interrupts() as interrupts:
        address = address_on(own.launch.interface) if own.launch.interface else link.address
        link.send(Join(machine=own.launch.node_rank, host=platform.node(), address=address, facts=dict(facts)))
        MachineLoop(own, link, fork_server, address, say).run(interrupts)
        interrupts.check()


def connect(launch: LaunchConfig) -> ControlLink:
    """Returns a proven connection to machine 0, which may come later than this one.

    Raises:
        ConfigError: its name stays unknown, or what answers there is none of this job.
        CapricornError: nobody is there in time.
    """
    what = f"--rdzv-endpoint {launch.rdzv_endpoint!r}"
    endpoint, reason = parse_endpoint(launch.rdzv_endpoint, "--rdzv-endpoint"), ""
    for _ in range(GREETINGS):
        sock = _connected(endpoint, what)
        try:
            greet(sock, control_identity(launch.job), launch.node_rank, CONDUCTOR)
        except TransportError as error:
            sock.close()
            reason = str(error)
            time.sleep(RETRY_S)
        else:
            return ControlLink(sock)
    raise ConfigError(
        f"{what}: machine 0 of job {launch.job} is not what answers there ({reason}); give all machines the same "
        f"endpoint, job and {SECRET}"
    )


def _connected(endpoint: Endpoint, what: str) -> socket.socket:
    begin_s, cause = time.monotonic(), ""
    while (waited_s := time.monotonic() - begin_s) < JOIN_TIMEOUT_S:
        try:
            for _, address in resolve(endpoint.host, endpoint.port, what):
                try:
                    sock = socket.create_connection((address, endpoint.port), CONNECT_TIMEOUT_S)
                except OSError as error:
                    cause = error.strerror or str(error)
                else:
                    sock.settimeout(HANDSHAKE_TIMEOUT_S)
                    return sock
        except ConfigError:
            if waited_s > NAME_TIMEOUT_S:
                raise
            note_once(f"{what}: host {endpoint.host!r} cannot be resolved yet; waiting for it")
        time.sleep(RETRY_S)
    raise CapricornError(f"{what}: machine 0 was not there within {JOIN_TIMEOUT_S:g} s: {cause}; start it, too")


class MachineLoop:
    """This machine while it follows."""

    def __init__(
        self, own: Scenario, link: ControlLink, fork_server: ForkServer, address: str, say: Callable[[str], None]
    ) -> None:
        """Has joined.

        Args:
            own: what this machine was told.
            link: to machine 0.
            fork_server: forks the node agents of all runs.
            address: of this machine.
            say: prints a line.
        """
        self._own, self._link, self._fork_server, self._address, self._say = own, link, fork_server, address, say
        self._run: MachineRun | None = None
        self._node: int | None = -1
        """Which node this machine is, None for a spare; -1 before that is known."""
        self._told_s = math.inf
        """When machine 0 has last heard of us without having asked; it is not told before it has welcomed us."""
        self._is_over = False

    def run(self, interrupts: Interrupts) -> None:
        """Does what machine 0 says until that says goodbye, or an interrupt comes.

        Raises:
            CapricornError: it says that the command failed, or is gone.
        """
        try:
            while not self._is_over:
                interrupts.check()
                self._turn()
        except TransportError as error:
            raise CapricornError(f"machine 0 was lost: {error}; the run is over here") from None
        finally:
            self._remove_run()

    def _turn(self) -> None:
        agent = self._run.link if self._run is not None else None
        heard: list[Any] = [self._link] if agent is None else [self._link, agent]
        ready = select.select(heard, [], [], TICK_S)[0]
        if agent is not None and agent in ready and self._run is not None:
            # What the ranks wrote before it goes ahead: who hears that one has failed reads why.
            self._send_records()
            self._link.send(self._run.hear_agent())
        if self._link in ready:
            for data in self._link.receive():
                self._obey(data)
        self._send_records()
        if time.monotonic() - self._told_s > HEARTBEAT_S:
            self._told_s = time.monotonic()
            self._link.send(MachineAlive())

    def _send_records(self, *, is_last: bool = False) -> None:
        if self._run is not None:
            for grown in self._run.records(is_last=is_last):
                self._link.send(grown)

    def _obey(self, data: bytes) -> None:
        try:
            order = conductor_message(data)
        except ValidationError:
            raise TransportError("it says what this version does not know") from None
        match order:
            case AskClock():
                self._link.send(ClockReading(at_s=time.monotonic()))
            case Welcome(node=node):
                self._told_s = time.monotonic()
                self._take_place(node)
            case BeginRun():
                self._begin_run(order)
            case StartNode(node=node) if self._run is not None:
                self._take_place(node)
                self._run.start_node(order, self._fork_server)
            case ToAgent(message=message) if self._run is not None:
                self._run.tell_agent(message)
            case EndNode(is_forced=is_forced) if self._run is not None:
                self._run.end_node(is_forced=is_forced)
            case EndRun():
                self._end_run()
            case Goodbye():
                self._part(order)

    def _take_place(self, node: int | None) -> None:
        """Says which node this machine is, None for a spare, if that is news."""
        if node != self._node:
            place = f"node {node}" if node is not None else "a spare"
            self._say(f"machine {self._own.launch.node_rank}: {place}, conducted by {self._own.launch.rdzv_endpoint}")
        self._node = node

    def _begin_run(self, order: BeginRun) -> None:
        self._remove_run()
        try:
            self._run = MachineRun(order, self._own, self._own.launch.node_rank, self._address)
        except CapricornError as error:
            why = " ".join(str(error).split())
            self._link.send(Refused(why=why, is_users_mistake=isinstance(error, ConfigError)))
        else:
            self._link.send(Ready())

    def _end_run(self) -> None:
        ended = self._run.end() if self._run is not None else RunEnded(store_bytes=0)
        self._send_records(is_last=True)
        self._remove_run()
        self._link.send(ended)

    def _remove_run(self) -> None:
        if self._run is not None:
            self._run.remove()
            self._run = None

    def _part(self, farewell: Goodbye) -> None:
        """Ends as machine 0 did.

        Raises:
            ConfigError: it says that the user has made a mistake.
            CapricornError: it says that the command has failed.
        """
        self._is_over = True
        if farewell.exit_code:
            why = farewell.why or f"the command ended with exit code {farewell.exit_code} on machine 0"
            raise told(why, is_users_mistake=farewell.exit_code == ConfigError.exit_code)
