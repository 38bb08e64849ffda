"""When an attempt is given up and how often another may follow: pure values, told the time by who holds them.

The time is that for which the launcher was awake (`AwakeClock`): one that was stopped has not seen what was done.
Must know no process and no socket.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

from capricorn.launch.nodes import GaveUpError
from capricorn.process import is_stopped
from capricorn.units import Seconds

MAX_GAP_S: Final[Seconds] = 0.5
"""Between two looks of the launcher; it was busy or stopped itself if it is longer."""
RENDEZVOUS: Final = -1
"""The number of the rendezvous store among the nodes that are watched."""
FIRST_ITERATION_PATIENCE_S: Final[Seconds] = 300.0
"""How long an iteration may take in which something happens for the first time."""
PATIENCE_ITERATIONS: Final = 10
"""A run is stuck after this many times the longest iteration so far."""
START_PATIENCE_S: Final[Seconds] = 60.0
"""How long a process may be silent that starts: it imports or waits for a device, and lets no thread run meanwhile."""
CUDA_START_PATIENCE_S: Final[Seconds] = 180.0
"""The same on CUDA: ranks that load its libraries at once, pin the store and make communicators take longer."""
STARVED_FACTOR: Final = 4
"""A silent process that the machine does not let run has this many times the patience for one that sleeps."""

Key = TypeVar("Key", bound=Hashable)


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
    """Whether a run is stuck: nothing comes for longer than its own pace and all bounded waits can explain.

    | what comes next                                    | how long it may take                                      |
    |----------------------------------------------------|-----------------------------------------------------------|
    | the first iteration of the run                     | `FIRST_ITERATION_PATIENCE_S`                              |
    | an iteration that the first checkpoint may hold up | the same, or as any other if that is longer               |
    | any other, or a rank that comes back               | `PATIENCE_ITERATIONS` times the longest so far, and as    |
    |                                                    | long as waits are bounded by                              |

    A checkpoint may hold up the iteration that it is of, and the one after it.
    """

    def __init__(self, least_patience_s: Seconds, *, every: int = 0) -> None:
        """Begins before the first attempt.

        `every` is the number of iterations from one checkpoint to the next; 0 is no checkpoint at all.
        """
        self._least_patience_s, self._every = least_patience_s, every
        self._progress_s: Seconds = 0.0
        """When a rank has last come on, or else the attempt began."""
        self._longest_s: Seconds = 0.0
        """From one sign of progress to the next, so far."""
        self._iteration = 0
        """The newest that was finished."""
        self._first_saved: int | None = None
        """The first of which a checkpoint was requested."""

    def attempt_began(self, now_s: Seconds) -> None:
        self._progress_s = now_s

    def progressed(self, now_s: Seconds, *, iteration: int = 0, is_saved: bool = False) -> None:
        """Notes that some rank has come on.

        `iteration` is the one it has finished, if that was it, and `is_saved` whether a checkpoint of it was requested.
        """
        self._longest_s = max(self._longest_s, now_s - self._progress_s)
        self._progress_s = now_s
        self._iteration = max(self._iteration, iteration)
        if is_saved and self._first_saved is None:
            self._first_saved = iteration

    def is_stuck(self, now_s: Seconds) -> bool:
        return now_s - self._progress_s > self._patience_s()

    def _patience_s(self) -> Seconds:
        if self._iteration == 0:
            return FIRST_ITERATION_PATIENCE_S
        usual_s = max(self._least_patience_s, PATIENCE_ITERATIONS * self._longest_s)
        return max(usual_s, FIRST_ITERATION_PATIENCE_S) if self._may_save_first() else usual_s

    def _may_save_first(self) -> bool:
        if self._first_saved is None:  # a system may leave out the first that are due
            return self._every > 0 and (self._iteration + 1) % self._every == 0
        return self._iteration == self._first_saved


class SilenceWatchdog(Generic[Key]):
    """Which of those that are watched have said nothing for too long."""

    def __init__(self, frozen_s: Seconds, start_s: Seconds = START_PATIENCE_S) -> None:
        """Watches nobody yet; one may be silent for `frozen_s` that is at work, and for `start_s` that starts."""
        self._frozen_s, self._start_s = frozen_s, start_s
        self._heard_s: dict[Key, Seconds] = {}
        self._starting: set[Key] = set()

    def heard(self, key: Key, now_s: Seconds, *, is_starting: bool = False) -> None:
        """Notes that one was started or has said something, and whether it is still starting."""
        self._heard_s[key] = now_s
        (self._starting.add if is_starting else self._starting.discard)(key)

    def forget(self, key: Key) -> None:
        del self._heard_s[key]

    def silent(self, now_s: Seconds, states_of: Callable[[Key], str]) -> dict[Key, Seconds]:
        """Returns who has been silent for too long, and what is too long for it.

        `states_of` is asked only for those that may be: it returns what `thread_states` does.
        """
        silences_s = {key: now_s - heard_s for key, heard_s in self._heard_s.items()}
        patiences_s = {
            key: patience_s(self._frozen_s, states_of(key), start_s=self._start_s if key in self._starting else None)
            for key, silence_s in silences_s.items()
            if silence_s > self._frozen_s
        }
        return {key: patience_s for key, patience_s in patiences_s.items() if silences_s[key] > patience_s}


def patience_s(frozen_s: Seconds, states: str, *, start_s: Seconds | None) -> Seconds:
    """Returns for how long a process may be silent, by the states of its threads; `start_s` is of one that starts.

    | threads                       | starts             | is at work                    |
    |-------------------------------|--------------------|-------------------------------|
    | are stopped                   | `frozen_s`         | `frozen_s`                    |
    | one would run if it were let  | `start_s`          | `STARVED_FACTOR` x `frozen_s` |
    | all sleep                     | `start_s`          | `frozen_s`                    |
    """
    if is_stopped(states):
        return frozen_s
    if start_s is not None:
        return max(frozen_s, start_s)
    return frozen_s if set(states).isdisjoint("RD") else STARVED_FACTOR * frozen_s


def start_patience_s(device: str) -> Seconds:
    """Returns for how long a rank that starts on that device may be silent."""
    return CUDA_START_PATIENCE_S if device == "cuda" else START_PATIENCE_S
