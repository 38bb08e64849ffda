"""Another machine as the conductor sees it: its connection, its place, and how far it is with the run of now."""

from __future__ import annotations

import signal
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from capricorn.machines.control_link import ControlLink
from capricorn.machines.control_messages import Refused
from capricorn.units import Bytes, Seconds


@dataclass(slots=True, eq=False)
class Machine:
    """Another machine as the conductor sees it."""

    number: int
    host: str
    address: str
    link: ControlLink
    clock_ahead_s: Seconds
    node: int | None
    """The node that it is; None for a spare."""
    heard_s: Seconds
    relay: socket.socket | None = None
    """Our end of the link whose other end the launcher takes for that of the node agent."""
    to_launcher: deque[bytes] = field(default_factory=deque)
    """What the node agent has said and the launcher has not taken yet."""
    num_starts: int = 0
    is_ready: bool = False
    """Whether it has all it needs for the run of now."""
    refusal: Refused | None = None
    has_ended_run: bool = False
    store_bytes: Bytes = 0

    def __str__(self) -> str:
        return f"machine {self.number} ({self.host})"


class RemoteAgent:
    """A node agent on another machine; implements `ForkedProcess`."""

    def __init__(self, machine: Machine, end_node: Callable[..., None]) -> None:
        """`end_node` has a machine end its node agent, by force or not."""
        self._machine, self._end_node = machine, end_node

    def signal(self, number: signal.Signals) -> None:
        self._end_node(self._machine, is_forced=number is signal.SIGKILL)

    def end(self, timeout_s: Seconds) -> None:
        """Tells it to end and does not wait: what is told to its machine later happens after that."""
        self._end_node(self._machine, is_forced=False)

    @property
    def has_ended(self) -> bool:
        return self._machine.relay is None

    def states(self) -> str:
        return "S"  # what its threads do is not known here
