"""What the launcher asks of the nodes of a run, however they are started and started again."""

from __future__ import annotations

from typing import Final, Protocol

from capricorn.errors import CapricornError
from capricorn.units import Seconds

FAILED: Final = 1
"""Exit code of a rank that has failed, or what is told of one that has left its attempt and waits for the next."""
UNREACHABLE: Final = 4
"""Exit code of a rank that cannot reach the place where the ranks meet."""


class GaveUpError(CapricornError):
    """A node has failed more often than is allowed."""

    def __init__(self, node: int) -> None:
        super().__init__(f"node {node} gave up")
        self.node = node


class Nodes(Protocol):
    """The nodes of a run on this machine."""

    def start(self) -> None:
        """Starts all of them, and in them their ranks."""
        ...

    def wait(self, timeout_s: Seconds) -> None:
        """Returns when something may have happened, or after that time; starts again what has failed.

        Raises:
            GaveUpError: that was once too often.
        """
        ...

    @property
    def are_done(self) -> bool:
        """Whether all ranks have trained to the end."""
        ...

    def progressed(self) -> None:
        """Told that some rank has finished an iteration."""
        ...

    def stop(self) -> None:
        """Ends all processes, also when they are in the middle of something."""
        ...
