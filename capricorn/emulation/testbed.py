"""The testbed of a run: which network its nodes live in, this machine's loopback or namespaces with shaped links.

Decides which of them this machine can give. Must not know what is run on the nodes.
"""

from __future__ import annotations

import socket
from typing import Protocol

from capricorn.config.cluster import ClusterConfig
from capricorn.emulation.fabric import Fabric, FabricError, NamespaceEntry, Shape
from capricorn.errors import ConfigError

NAMESPACES, USER_NAMESPACES, PACED = "namespaces", "user-namespaces", "paced"
WAYS = (NAMESPACES, USER_NAMESPACES, PACED)
"""The ways to make links, the most faithful first."""


class NetworkBackend(Protocol):
    """A network of nodes with an address each, and a place outside of all of them."""

    @property
    def interface(self) -> str:
        """The name of each node's network interface."""
        ...

    @property
    def listener(self) -> socket.socket:
        """A listening socket outside of all nodes, for their rendezvous."""
        ...

    def address(self, node: int) -> str: ...

    def enter_node(self, node: int) -> NamespaceEntry:
        """Returns how a process of the node is started."""
        ...

    def enter_switch(self) -> NamespaceEntry:
        """Returns how a process outside of all nodes is started."""
        ...

    def close(self) -> None: ...


def loopback_address(node: int) -> str:
    """Returns a node's own address; torchrun sorts nodes by it as text, so all have three digits at the end."""
    return f"127.0.0.{100 + node}"


class Loopback:
    """The loopback of this machine, which all nodes share; links, if there are any, are paced in user space."""

    interface = "lo"

    def __init__(self) -> None:
        """Listens at once.

        Raises:
            ConfigError: the loopback is down.
        """
        # It listens before any process starts, so no port can be taken in between and no agent comes too early.
        try:
            self.listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        except OSError as error:
            raise ConfigError(f"this machine's loopback carries nothing: {error.strerror}; ip link set lo up") from None

    def address(self, node: int) -> str:
        return loopback_address(node)

    def enter_node(self, node: int) -> NamespaceEntry:
        return NamespaceEntry()

    def enter_switch(self) -> NamespaceEntry:
        return self.enter_node(0)

    def close(self) -> None:
        """Ends the listening."""
        self.listener.close()


def create_network(cluster: ClusterConfig) -> tuple[NetworkBackend, str]:
    """Creates the network of a cluster; returns it and how its links are made: the first way that works here.

    Raises:
        ConfigError: the way that was asked for does not work here.
    """
    if not cluster.is_emulated:
        return Loopback(), cluster.links
    shape = Shape(cluster.nodes, cluster.rate, cluster.qos)
    reasons = []
    for way in WAYS if cluster.links == "auto" else (cluster.links,):
        if way == PACED:
            return Loopback(), PACED
        try:
            return Fabric.build(shape, unprivileged=way == USER_NAMESPACES), way
        except FabricError as error:
            reasons.append(str(error))
    raise ConfigError(f"cluster.links={cluster.links} does not work here: {reasons[0]}; use cluster.links=auto")
