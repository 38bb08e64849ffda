"""The nodes of a run that takes place on several machines, one each; machine 0, which conducts, is node 0."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

from capricorn.config.cluster import ClusterConfig
from capricorn.config.scenario import Scenario
from capricorn.emulation.fabric import NamespaceEntry
from capricorn.emulation.testbed import NetworkBackend
from capricorn.files import write_text
from capricorn.launch.forked_nodes import ForkedNodes
from capricorn.launch.launcher import OTHER_MACHINES, OtherMachines, RunListener, launch
from capricorn.machines.conductor import Conductor
from capricorn.machines.control_link import CONDUCTOR
from capricorn.records.job_file import Job
from capricorn.runtime.comm.addresses import family_of, interface_of


class MachineNetwork:
    """The network between real machines; implements `NetworkBackend`."""

    def __init__(self, conductor: Conductor) -> None:
        """Listens for the ranks at once."""
        self._conductor = conductor
        self.interface = interface_of(conductor.address)
        address = conductor.address
        self.listener = socket.create_server((address, 0), family=family_of(address), backlog=256)

    def address(self, node: int) -> str:
        return self._conductor.address_of(node)

    def enter_node(self, node: int) -> NamespaceEntry:
        return NamespaceEntry()

    def enter_switch(self) -> NamespaceEntry:
        return NamespaceEntry()

    def close(self) -> None:
        """Ends the listening."""
        self.listener.close()


class MachineNodes(ForkedNodes):
    """A node on each machine. Stores are made by the machines themselves."""

    def __init__(
        self,
        job: Job,
        network: NetworkBackend,
        log_dir: Path,
        on_replace: Callable[[int], None],
        *,
        conductor: Conductor,
    ) -> None:
        """Starts nothing yet.

        Args:
            job: what is run.
            network: the backend that the nodes are in.
            log_dir: where each process of this machine writes what it prints.
            on_replace: is told of each node that is replaced, before its successor starts.
            conductor: has gathered the machines.
        """
        super().__init__(job, network, log_dir, on_replace, forker=conductor, wait=conductor.wait)
        self._conductor = conductor

    def start(self) -> None:
        self._conductor.begin_run(self._job)
        super().start()

    def stop(self) -> None:
        """Ends all processes; returns when the other machines have sent the last of their records."""
        try:
            super().stop()
        finally:
            hosts, store_bytes = self._conductor.hosts(), self._conductor.end_run()
            others = OtherMachines(hosts=hosts, store_bytes=store_bytes)
            write_text(self._job.run_dir / OTHER_MACHINES, others.model_dump_json())

    def _make_store(self, node: int) -> None:
        if node == CONDUCTOR:
            super()._make_store(node)


def launch_on(conductor: Conductor, scenario: Scenario, out: Path, listener: RunListener) -> Path:
    """Runs the scenario on several machines; see `launch`.

    Args:
        conductor: has gathered them.
        scenario: what is run, resolved.
        out: where the run's folder is made, on this machine.
        listener: hears what happens.
    """

    def network(cluster: ClusterConfig) -> tuple[NetworkBackend, str]:
        return MachineNetwork(conductor), cluster.links

    make_nodes = partial(MachineNodes, conductor=conductor)
    return launch(scenario, out, listener, make_nodes=make_nodes, make_network=network)
