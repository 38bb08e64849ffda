"""The nodes of a run as the launcher sees them, however they are started and restarted; and fake ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from capricorn.errors import CapricornError
from capricorn.records.samples import IterationSample
from capricorn.units import Seconds

FAILED: Final = 1
"""Exit code of a rank that has failed, also of one that has left its attempt and waits for the next."""
UNREACHABLE: Final = 4
"""Exit code of a rank that cannot reach the rendezvous store."""


class GaveUpError(CapricornError):
    """A node has failed more often than is allowed."""

    def __init__(self, node: int) -> None:
        super().__init__(f"node {node} gave up")
        self.node = node


class VacantError(CapricornError):
    """A node has no machine that could start it, and may get one later."""

    def __init__(self, node: int) -> None:
        super().__init__(f"node {node} has no machine")
        self.node = node


class Nodes(Protocol):
    """The nodes of a run."""

    def start(self) -> None:
        """Starts all nodes, and in them their ranks."""
        ...

    def wait(self, timeout_s: Seconds) -> None:
        """Returns when something may have happened, or after that time; starts again what has failed.

        Raises:
            GaveUpError: a restart was needed and none is left.
        """
        ...

    @property
    def are_done(self) -> bool:
        """Says whether all ranks have trained to the end."""
        ...

    def progressed(self, samples: Sequence[IterationSample] = ()) -> None:
        """Is told that some rank has come on: by these iterations, or by a step on its way back to training."""
        ...

    def stop(self) -> None:
        """Ends all processes, also when they are in the middle of something."""
        ...


class FakeNodes:
    """Nodes without processes that play a script: each wait takes its next act, which may write records or raise."""

    def __init__(self, acts: Iterable[Callable[[], object]] = ()) -> None:
        self._acts = deque(acts)
        self.is_running = False
        self.num_progressed = 0

    def start(self) -> None:
        self.is_running = True

    def wait(self, timeout_s: Seconds) -> None:
        self._acts.popleft()()

    @property
    def are_done(self) -> bool:
        return not self._acts

    def progressed(self, samples: Sequence[IterationSample] = ()) -> None:
        self.num_progressed += 1

    def stop(self) -> None:
        self.is_running = False
