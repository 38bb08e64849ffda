"""Which machines are there, and which node each is. Pure."""

from __future__ import annotations

from capricorn.machines.machine import Machine


class Roster:
    """The machines that have joined machine 0."""

    def __init__(self, num_nodes: int, num_spares: int) -> None:
        """Has nobody yet; `num_spares` may come beyond those that are nodes."""
        self._num_nodes, self._num_spares = num_nodes, num_spares
        self.machines: list[Machine] = []

    def vacant(self) -> list[int]:
        """Returns the nodes that have no machine."""
        return [node for node in range(1, self._num_nodes) if self.of_node(node) is None]

    def of_node(self, node: int) -> Machine | None:
        """Returns the machine that is that node."""
        return next((machine for machine in self.machines if machine.node == node), None)

    def of_number(self, number: int) -> Machine | None:
        """Returns the machine that was given that number."""
        return next((machine for machine in self.machines if machine.number == number), None)

    def hosts(self) -> tuple[str, ...]:
        """Returns what they are called: the nodes in their order, then spares."""
        ordered = sorted(self.machines, key=lambda machine: (machine.node is None, machine.node or machine.number))
        return tuple(each.host if each.node is not None else f"{each.host} (spare)" for each in ordered)

    def spare(self) -> Machine | None:
        """Returns the spare that is to take a place next."""
        spares = (machine for machine in self.machines if machine.node is None and machine.is_ready)
        return min(spares, key=lambda machine: machine.number, default=None)

    def place_of(self, number: int) -> int | None:
        """Returns the node that a machine of that number becomes: its own, if that is vacant; None makes it a spare."""
        return number if number in self.vacant() else None

    def why_no_place(self, number: int) -> str:
        """Returns why a machine of that number cannot take part; nothing if it can."""
        most = self._num_nodes + self._num_spares
        if (same := self.of_number(number)) is not None:
            return f"--node-rank {number}: {same} is there already; give each machine a number of its own"
        if number >= most:
            more = f"allow more spares by --nnodes {self._num_nodes}:MAX"
            return f"--node-rank {number}: {most} machines take part; {more}"
        return ""
