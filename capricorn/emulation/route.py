"""The ways between the nodes of a modelled network: what leaves one takes its time on both uplinks.

Knows links and payloads of bytes, but no socket and no training.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Self

from capricorn.emulation.paced_link import Link, create_links
from capricorn.errors import TransportError
from capricorn.units import KIB, Bytes, BytesPerSecond, Seconds

QUANTUM_BYTES: Final = 64 * KIB
"""What is booked at a time; the longest that a low-class transfer may hold up a high-class one."""


class Route:
    """From one node to another: out of the sender's uplink and into the receiver's, or along any links at once."""

    def __init__(
        self, links: Sequence[Link], *, quantum_bytes: Bytes = QUANTUM_BYTES, has_low_class: bool = True
    ) -> None:
        """Makes a route over these links, whose users must all take the same quantum, or their shares will differ.

        Without a low class what asks for it is treated as all else.
        """
        assert links
        self._links, self._quantum_bytes, self._has_low_class = links, quantum_bytes, has_low_class

    def pass_through(self, num_bytes: Bytes, *, low: bool = False) -> None:
        """Returns when that many bytes would have passed.

        Raises:
            TransportError: a link was closed meanwhile.
        """
        deque(self._passed(num_bytes, low), maxlen=0)

    def pieces(self, view: memoryview, *, low: bool = False) -> Iterator[memoryview]:
        """Yields the parts of a payload of bytes in order, each when it may be handed to the real socket.

        Raises:
            TransportError: a link was closed meanwhile.
        """
        return (view[part] for part in self._passed(len(view), low))

    def _passed(self, num_bytes: Bytes, low: bool) -> Iterator[slice]:
        """Yields the ranges of that many bytes, each when it has left."""
        low = low and self._has_low_class
        # Being one quantum ahead keeps our place while we wake up. The low class cannot be: to book its next quantum
        # it waits for an idle link, and would hold back the one that has left.
        ahead = 0 if low else 1
        booked: deque[tuple[slice, Seconds]] = deque()
        for start in range(0, num_bytes, self._quantum_bytes):
            part = slice(start, min(start + self._quantum_bytes, num_bytes))
            booked.append((part, self._reserve(part.stop - start, low)))
            if len(booked) > ahead:
                yield self._when_left(*booked.popleft())
        for part, finish in booked:
            yield self._when_left(part, finish)

    def _reserve(self, num_bytes: Bytes, low: bool) -> Seconds:
        """Returns when all links will have served these bytes."""
        return max(link.reserve(num_bytes, low=low) for link in self._links)

    def _when_left(self, part: slice, finish: Seconds) -> slice:
        self._links[0].sleep_until(finish)
        return part


class Links:
    """The uplinks of all nodes, in one folder: `out<k>` and `in<k>` of node k."""

    @classmethod
    def create(cls, folder: Path, num_nodes: int, bytes_per_s: BytesPerSecond) -> Self:
        """Makes the folder and in it the links, idle and with the same rate in both directions.

        Raises:
            TransportError: it cannot be made, or is there already.
        """
        names = [f"{way}{node}" for node in range(num_nodes) for way in ("out", "in")]
        create_links(folder, dict.fromkeys(names, bytes_per_s))
        return cls(folder)

    def __init__(self, folder: Path, *, has_low_class: bool = True) -> None:
        """Opens the links that `create` made.

        Raises:
            TransportError: there are none.
        """
        paths = [*folder.glob("out*"), *folder.glob("in*")]
        if not paths:
            raise TransportError(f"there are no links in {folder}")
        self._links = {path.name: Link(path) for path in paths}
        self._has_low_class = has_low_class

    def route(self, source: int, target: int) -> Route | None:
        """Returns the route between two nodes; None within one, where no link is in the way."""
        if source == target:
            return None
        links = [self._links[f"out{source}"], self._links[f"in{target}"]]
        return Route(links, has_low_class=self._has_low_class)

    def routes(self, source: int, targets: Sequence[int]) -> dict[int, Route]:
        """Returns the routes to the nodes `targets`, by position; none to the source itself."""
        found = ((position, self.route(source, target)) for position, target in enumerate(targets))
        return {position: route for position, route in found if route is not None}

    def close(self) -> None:
        """Gives up the links; the files stay."""
        for link in self._links.values():
            link.close()
