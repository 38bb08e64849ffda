"""When an attempt is given up and how often another may follow: pure values, told the time by who holds them.

Must know no process and no socket.
"""

from __future__ import annotations

from typing import Final

from capricorn.launch.nodes import GaveUpError
from capricorn.units import Seconds

FIRST_ITERATION_PATIENCE_S: Final[Seconds] = 300.0
"""How long the first iteration of a run may take to come."""
PATIENCE_ITERATIONS: Final = 10
"""A run is stuck after this many times the longest iteration so far."""
PAUSE_S: Final[Seconds] = 2.0
"""If the launcher's wait took this much longer than it asked for, the launcher itself was stopped."""


class RestartBudget:
    """How often a run may still start something again."""

    def __init__(self, num_restarts: int) -> None:
        self._left = num_restarts

    def spend(self, node: int) -> None:
        """Takes one restart.

        Raises:
            GaveUpError: none is left; it names the node, by which the attempt failed.
        """
        if self._left == 0:
            raise GaveUpError(node)
        self._left -= 1


class ProgressWatchdog:
    """Whether a run is stuck: no iteration comes for longer than its own pace and all bounded waits can explain."""

    def __init__(self, least_patience_s: Seconds) -> None:
        self._least_patience_s = least_patience_s
        self._progress_s: Seconds = 0.0
        """When the newest iteration was heard of, or else the attempt began."""
        self._longest_s: Seconds = 0.0
        """Between two iterations so far; 0 before the first."""
        self._waited_s: Seconds | None = None

    def attempt_began(self, now_s: Seconds) -> None:
        self._progress_s = now_s

    def progressed(self, now_s: Seconds) -> None:
        """Notes that an iteration was finished by some rank."""
        self._longest_s = max(self._longest_s, now_s - self._progress_s)
        self._progress_s = now_s

    def wait_begins(self, now_s: Seconds, timeout_s: Seconds) -> None:
        """Notes a wait of the launcher; a launcher that was stopped since the last one has not seen what was done."""
        paused_s = 0.0 if self._waited_s is None else now_s - self._waited_s - timeout_s
        if paused_s > PAUSE_S:
            self._progress_s += paused_s
        self._waited_s = now_s

    def is_stuck(self, now_s: Seconds) -> bool:
        if not self._longest_s:
            return now_s - self._progress_s > FIRST_ITERATION_PATIENCE_S
        return now_s - self._progress_s > max(self._least_patience_s, PATIENCE_ITERATIONS * self._longest_s)


class SilenceWatchdog:
    """Which nodes have said nothing for too long."""

    def __init__(self, patience_s: Seconds) -> None:
        self._patience_s = patience_s
        self._heard_s: dict[int, Seconds] = {}

    def heard(self, node: int, now_s: Seconds) -> None:
        """Notes that a node has started or said something."""
        self._heard_s[node] = now_s

    def forget(self, node: int) -> None:
        del self._heard_s[node]

    def silent(self, now_s: Seconds) -> list[int]:
        return [node for node, heard_s in self._heard_s.items() if now_s - heard_s > self._patience_s]
