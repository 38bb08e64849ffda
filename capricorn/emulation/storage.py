"""The clock of a modelled file system: a rate for each node, and one that all nodes share.

Knows how long bytes take, not where they go, nor whether they are written or read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from capricorn.emulation.paced_link import Link, create_links
from capricorn.emulation.route import Route
from capricorn.units import MIB, Bytes, BytesPerSecond, Seconds

QUANTUM_BYTES: Final = MIB
QUANTUM_S: Final = 0.02
"""A quantum takes no longer than this, so that those who write at once take turns often."""
_TOTAL: Final = "total"


class Storage:
    """One node's access; threads may share it."""

    @classmethod
    def create(
        cls, folder: Path, num_nodes: int, node_bytes_per_s: BytesPerSecond, total_bytes_per_s: BytesPerSecond | None
    ) -> None:
        """Makes the folder of the clocks; what is stored lies elsewhere. Without a total each node has its own rate.

        Raises:
            TransportError: it cannot be made, or is there already.
        """
        nodes = {_node_name(node): node_bytes_per_s for node in range(num_nodes)}
        create_links(folder, {**nodes, _TOTAL: total_bytes_per_s or num_nodes * node_bytes_per_s})

    def __init__(
        self,
        folder: Path,
        node: int,
        *,
        clock: Callable[[], Seconds] = time.monotonic,
        sleep: Callable[[Seconds], object] = time.sleep,
    ) -> None:
        """Opens what `create` made.

        Raises:
            TransportError: it is not there, or not for that node.
        """
        names = _node_name(node), _TOTAL
        self._node, self._total = (Link(folder / name, clock=clock, sleep=sleep) for name in names)
        slower = min(self._node.bytes_per_s, self._total.bytes_per_s)
        quantum_bytes = int(max(1, min(QUANTUM_BYTES, QUANTUM_S * slower)))
        self._route = Route([self._node, self._total], quantum_bytes=quantum_bytes)

    def charge(self, num_bytes: Bytes) -> None:
        """Returns when that many bytes would have been written or read.

        Raises:
            TransportError: it was closed meanwhile.
        """
        self._route.pass_through(num_bytes)

    def close(self) -> None:
        """Gives up the clocks; the files stay."""
        self._node.close()
        self._total.close()


def _node_name(node: int) -> str:
    return f"node{node}"
