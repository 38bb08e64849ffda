"""What processes may rely on about each other: how they start, who ends with whom, who was asleep, who is the same one.

Modules are never looked for in the working folder first: a user's `random.py` there would stand in for Python's own.
A process is judged by others in three ways, none of which trusts the clock on the wall:

| question                        | answered by                                                                   |
|---------------------------------|-------------------------------------------------------------------------------|
| is my parent still there?       | `die_with_parent`, to which the parent's pid is told                          |
| has it been silent for long?    | `AwakeClock`, which stands still while the judge itself does not run          |
| is it the one I know?           | `start_ticks`, which no other process with its pid has                        |
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Final, Protocol

from capricorn.units import Seconds

PYTHON: Final = (sys.executable, "-P", "-m")
"""Starts a module: `[*PYTHON, MODULE, *ARGS]`."""
STOPPED_S: Final[Seconds] = 3.0
"""How long a process that forks others may be stopped while it owes an answer."""
KILL_TIMEOUT_S: Final[Seconds] = 5.0
"""How long a process may take to end that was killed; one that takes longer waits within the kernel."""
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process, from now on, when its parent ends, however the parent ends.

    Who started this process tells its own pid: in a container it may be process 1, which else is what adopts orphans.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent was gone before the call
        os.kill(os.getpid(), signal.SIGKILL)


def name_process(name: str) -> None:
    """Gives this process a name of at most 15 letters, by which `ps`, `top` and `pkill` know it."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


class AwakeClock:
    """Tells the time for which its holder was awake, if it looks often: a longer gap between two looks counts as short.

    Who judges others by their silence must not count the time in which it could not have heard them: when the whole job
    was stopped (a paused container, a suspended machine), or when all of it gets little of one core.
    """

    def __init__(self, max_gap_s: Seconds, clock: Callable[[], Seconds] = time.monotonic) -> None:
        """Begins at 0.

        `clock` may stand still or go on while the machine is suspended, as CLOCK_MONOTONIC and CLOCK_BOOTTIME do: that
        is one gap.
        """
        self._max_gap_s, self._clock = max_gap_s, clock
        self._looked_s, self._awake_s = clock(), 0.0

    def __call__(self) -> Seconds:
        now_s = self._clock()
        self._awake_s += min(now_s - self._looked_s, self._max_gap_s)
        self._looked_s = now_s
        return self._awake_s


class AnswerWait:
    """How long a process has owed an answer, by the time for which the one that waits was awake to hear it."""

    def __init__(self, pid: int, poll_s: Seconds) -> None:
        """Begins now; the process is looked at every `poll_s`."""
        self._pid, self._awake, self._ran_s = pid, AwakeClock(2 * poll_s), 0.0

    def look(self) -> tuple[Seconds, Seconds]:
        """Returns for how long it has owed the answer, and for how long of that it has been stopped until now."""
        now_s = self._awake()
        if not is_stopped(thread_states(self._pid)):
            self._ran_s = now_s
        return now_s, now_s - self._ran_s


def thread_states(pid: int) -> str:
    """Returns a letter for the state of each thread as the kernel tells it, such as `RSS`; empty if there is none."""
    states = ""
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended in between
                states += _stat(task)[0]
    return states


def is_stopped(states: str) -> bool:
    """Returns whether a process with such threads was stopped, by a signal or a debugger."""
    return not set(states).isdisjoint("Tt")


def start_ticks(pid: int) -> int:
    """Returns when the process started, in ticks since the machine did: the same however the wall clock is set.

    Raises:
        ProcessLookupError: there is no such process.
    """
    try:
        return int(_stat(Path(f"/proc/{pid}"))[19])
    except FileNotFoundError:
        raise ProcessLookupError(pid) from None


def _stat(folder: Path) -> list[str]:
    """Returns the fields of a process or thread from its state on; what comes before may hold anything."""
    return (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()


class Child(Protocol):
    """A child of this process; `subprocess.Popen` is one."""

    def wait(self, timeout: Seconds | None = None) -> int: ...

    def kill(self) -> None: ...


class PolledChild(Child, Protocol):
    """A child that is also watched; `subprocess.Popen` is one."""

    def poll(self) -> int | None: ...


def kill_child(child: Child, name: str) -> None:
    """Kills a child and waits for its end; names one that does not end even so, and leaves it."""
    from subprocess import TimeoutExpired  # who has a child has it; a process that enters a namespace must stay small

    with contextlib.suppress(ProcessLookupError):
        child.kill()
    try:
        child.wait(KILL_TIMEOUT_S)
    except TimeoutExpired:
        tell_undead(name, getattr(child, "pid", 0))


def end_child(child: Child, pid: int, timeout_s: Seconds, name: str) -> None:
    """Waits for the end of a child that was told to end; kills it if it takes longer, or is stopped and hears nothing.

    Args:
        child: of this process.
        pid: its own.
        timeout_s: to wait at most.
        name: by which it is named if it does not end even so.
    """
    from subprocess import TimeoutExpired  # as above

    with contextlib.suppress(TimeoutExpired):
        child.wait(0 if is_stopped(thread_states(pid)) else timeout_s)
    kill_child(child, name)


def tell_undead(name: str, pid: int) -> None:
    """Says on stderr that a process was killed and does not end, which is so while it waits for a device."""
    states = thread_states(pid)
    where = f"process {pid}, state {states}" if states else f"process {pid}"
    print(f"note: {name} ({where}) does not end though it was killed; it is left behind", file=sys.stderr, flush=True)


@contextlib.contextmanager
def deferred_sigterm() -> Iterator[None]:
    """Holds SIGTERM back until the block is over.

    By the handler: a signal that one thread blocks goes to another one, and Python then hears of it all the same.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # which never hears of a signal
        return
    has_come = False

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal has_come
        has_come = True

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if has_come:
            signal.raise_signal(signal.SIGTERM)
