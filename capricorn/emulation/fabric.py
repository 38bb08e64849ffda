"""A network of emulated nodes in the kernel: a namespace per node, a switch between them, links of a given rate.

The launcher's side: holds the descriptors that keep it alive. Knows no torch and not what runs on the nodes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from capricorn.emulation.shaping import INTERFACE, node_address
from capricorn.errors import CapricornError
from capricorn.process import PYTHON, kill_child
from capricorn.units import BytesPerSecond, Seconds

BUILD_TIMEOUT_S: Seconds = 10.0
BUILT: Final = b"built"
_MAX_FDS: Final = 253
"""The most descriptors that one message can carry."""


class FabricError(CapricornError):
    """A network between emulated nodes that cannot be made or does not carry what is sent."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The number of nodes and what links each to the switch: a rate in both directions, with or without a low class."""

    num_nodes: int
    bytes_per_s: BytesPerSecond
    qos: bool


@dataclass(frozen=True, slots=True)
class NamespaceEntry:
    """The way of a process into the namespaces of a node or of the switch; by default it stays where the launcher is.

    A command is `[*prefix, MODULE, *ARGS]`, started with `pass_fds` by the process that made the entry, with whose end
    it ends.
    """

    prefix: tuple[str, ...] = PYTHON
    pass_fds: tuple[int, ...] = ()


class Fabric:
    """A switch with nodes around it, each reachable by the others and by nothing else.

    Lives as long as it is not closed or a process is in it; the kernel frees it then, however the launcher ended.
    """

    interface: Final = INTERFACE

    def __init__(self, shape: Shape, fds: Sequence[int]) -> None:
        """Takes over the descriptors that the builder sent."""
        self.listener = socket.socket(fileno=fds[-1])
        """Listens at the switch, where any node reaches it whichever node is lost."""
        self._fds = list(fds[:-1])
        self._user = tuple(fds[: -shape.num_nodes - 2])
        self._switch = fds[-shape.num_nodes - 2]
        self._nodes = fds[-shape.num_nodes - 1 : -1]

    @classmethod
    def build(cls, shape: Shape, *, unprivileged: bool = False) -> Fabric:
        """Builds the network of that shape, if `unprivileged` within a user namespace, which needs no rights.

        Raises:
            FabricError: this machine does not allow it or lacks something; nothing is left of it.
        """
        request = json.dumps({"shape": asdict(shape), "unprivileged": unprivileged})
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            builder = subprocess.Popen(
                [*PYTHON, "capricorn.emulation.builder", str(os.getpid()), str(theirs.fileno()), request],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
            theirs.close()
            try:
                fds = _receive(ours, num_fds=unprivileged + 1 + shape.num_nodes + 1)
            except FabricError as error:
                raise FabricError(f"cannot set up a network of {shape.num_nodes} nodes: {error}") from None
            finally:
                # It has sent all it will, or must stop now, together with the tool it waits for.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(builder.pid, signal.SIGKILL)
                kill_child(builder, "the builder of the network")
        return cls(shape, fds)

    def address(self, node: int) -> str:
        return node_address(node)

    def enter_node(self, node: int) -> NamespaceEntry:
        return self._entry(self._nodes[node])

    def enter_switch(self) -> NamespaceEntry:
        return self._entry(self._switch)

    def close(self) -> None:
        """Lets go of the network: no process can enter any more, and it goes when the last one within has ended."""
        self.listener.close()
        while self._fds:
            os.close(self._fds.pop())

    def _entry(self, net: int) -> NamespaceEntry:
        fds = (*self._user, net)
        inside = ("capricorn.emulation.inside", str(os.getpid()), ",".join(map(str, fds)))
        return NamespaceEntry((*PYTHON, *inside), fds)


def _receive(channel: socket.socket, num_fds: int) -> list[int]:
    """Returns the descriptors that the builder sends, none of them inheritable.

    Raises:
        FabricError: it sent the reason why there are none, or nothing in time.
    """
    channel.settimeout(BUILD_TIMEOUT_S)
    try:
        message, fds, _, _ = socket.recv_fds(channel, 4096, _MAX_FDS)
    except TimeoutError:
        raise FabricError(f"not done within {BUILD_TIMEOUT_S:g} s") from None
    for fd in fds:
        os.set_inheritable(fd, False)
    if len(fds) == num_fds:
        return fds
    for fd in fds:
        os.close(fd)
    if message == BUILT:
        raise FabricError("too few free descriptors, raise ulimit -n")
    raise FabricError(message.decode() or "its builder ended without a word")
