"""The launcher's side of the fork server: starts it and has it fork processes; and a fake of it.

Knows no torch. What is forked says what happens to it over a link of its own, see `launch_messages`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol, Self, TypeVar

from capricorn.config.fields import FrozenModel
from capricorn.emulation.fabric import NamespaceEntry
from capricorn.errors import CapricornError, note_once
from capricorn.files import memory_file
from capricorn.launch.launch_messages import (
    Forked,
    ForkRequest,
    ForkServerReady,
    NodeAlive,
    RunNodeAgent,
    ServeRendezvous,
    StartAttempt,
    receive,
    to_bytes,
)
from capricorn.launch.nodes import VacantError
from capricorn.process import (
    KILL_TIMEOUT_S,
    PYTHON,
    STOPPED_S,
    AnswerWait,
    end_child,
    kill_child,
    tell_undead,
    thread_states,
)
from capricorn.units import Seconds

READY_TIMEOUT_S: Final[Seconds] = 120.0
POLL_S: Final[Seconds] = 0.1
STOP_TIMEOUT_S: Final[Seconds] = 10.0

Answer = TypeVar("Answer", bound=FrozenModel)


class ForkedProcess(Protocol):
    """A process that is no child of this one."""

    def signal(self, number: signal.Signals) -> None:
        """Sends the signal, if the process is still there."""
        ...

    def end(self, timeout_s: Seconds) -> None:
        """Returns when it has ended, by force if it takes longer."""
        ...

    @property
    def has_ended(self) -> bool: ...

    def states(self) -> str:
        """Returns the states of its threads, as `thread_states` does."""
        ...


class Forker(Protocol):
    """Forks processes on request."""

    def fork(
        self, role: RunNodeAgent | ServeRendezvous, *, fds: Sequence[int], entry: NamespaceEntry, log: Path
    ) -> ForkedProcess:
        """Has a process forked.

        Args:
            role: what it becomes.
            fds: the descriptors of its role, of which it gets copies.
            entry: the namespaces it enters.
            log: the file it prints to.

        Raises:
            CapricornError: there is nobody who could fork it.
        """
        ...


class PidfdProcess:
    """A process held by its pidfd, so that its number cannot come to mean another one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd: int | None = None
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            self._pidfd = os.pidfd_open(pid)

    def signal(self, number: signal.Signals) -> None:
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def end(self, timeout_s: Seconds) -> None:
        if self._pidfd is None:
            return
        if not self._has_ended_within(timeout_s):
            self.signal(signal.SIGKILL)
            if not self._has_ended_within(KILL_TIMEOUT_S):
                tell_undead("a process of the run", self.pid)
        os.close(self._pidfd)
        self._pidfd = None

    @property
    def has_ended(self) -> bool:
        return self._has_ended_within(0)

    def states(self) -> str:
        return thread_states(self.pid)

    def _has_ended_within(self, timeout_s: Seconds) -> bool:
        return self._pidfd is None or bool(select.select([self._pidfd], [], [], timeout_s)[0])


class ForkServer:
    """A process that waits with everything imported. May serve many runs, one after the other.

    One that has died, or is stopped when it is needed, is replaced by another; all that it has forked dies with it.
    """

    def __init__(self) -> None:
        """Starts it; the first fork waits until it is ready."""
        self._start()

    def _start(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(READY_TIMEOUT_S)
        self._is_ready = False
        self._errors = memory_file()  # a pipe that nobody reads may fill up and block
        with theirs:
            self._process = subprocess.Popen(
                [*PYTHON, "capricorn.launch.fork_server", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                # Read when torch is imported: ranks that share a machine must not each take all of its cores.
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def fork(
        self, role: RunNodeAgent | ServeRendezvous, *, fds: Sequence[int], entry: NamespaceEntry, log: Path
    ) -> PidfdProcess:
        """Has a process forked; see `Forker`."""
        request = ForkRequest(become=role, num_namespaces=len(entry.pass_fds), log=log)
        try:
            return self._ask(request, [*entry.pass_fds, *fds])
        except CapricornError as error:
            if not self._is_ready:  # it has never forked anything, and nor would another one
                raise
            note_once(f"{error}; another one takes its place")
        self.close()
        self._start()
        return self._ask(request, [*entry.pass_fds, *fds])

    def _ask(self, request: ForkRequest, fds: Sequence[int]) -> PidfdProcess:
        """Has the process of now fork.

        Raises:
            CapricornError: it has ended, or was ended since it gave no answer.
        """
        try:
            if not self._is_ready:
                self._expect(ForkServerReady)
                self._is_ready = True
            socket.send_fds(self._channel, [to_bytes(request)], fds)
            return PidfdProcess(self._expect(Forked).pid)
        except TimeoutError as error:
            kill_child(self._process, "the process that forks the workers")
            raise CapricornError(f"the process that forks the workers {error}, and was ended") from None
        except OSError:
            reason = self._last_words()
            raise CapricornError(f"the process that forks the workers has ended: {reason}") from None

    def close(self) -> None:
        """Ends it, and with it all that it has forked."""
        self._channel.close()
        end_child(self._process, self._process.pid, STOP_TIMEOUT_S, "the process that forks the workers")
        self._errors.close()

    def _expect(self, kind: type[Answer]) -> Answer:
        """Returns its next answer.

        Raises:
            TimeoutError: there is none in time; with the reason.
            ConnectionError: it has ended.
        """
        wait = AnswerWait(self._process.pid, POLL_S)
        while not select.select([self._channel], [], [], POLL_S)[0]:
            owed_s, stopped_s = wait.look()
            if stopped_s > STOPPED_S:
                raise TimeoutError("is stopped")
            if owed_s > READY_TIMEOUT_S:
                raise TimeoutError(f"does not answer within {READY_TIMEOUT_S:g} s")
        if not (message := receive(self._channel)):
            raise ConnectionError
        return kind.model_validate_json(message)

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            if (code := self._process.wait(POLL_S)) < 0:  # what it has printed before has nothing to do with it
                return f"killed by signal {-code}"
        kill_child(self._process, "the process that forks the workers")
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self._process.returncode}"


# --- fakes, by which restarts are tried out without processes and without time


class FakeProcess:
    """Ends when it is told to, and remembers by which signals."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self.signals: list[signal.Signals] = []
        self.has_ended = False
        self.is_stopped = False

    def signal(self, number: signal.Signals) -> None:
        self.signals.append(number)

    def end(self, timeout_s: Seconds) -> None:
        self.has_ended = True
        self._on_end()

    def states(self) -> str:
        return "T" if self.is_stopped else "S"


class FakeNodeAgent:
    """A node agent that is played over the real link."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._link.setblocking(False)
        self.process = FakeProcess(self.die)
        self.is_beating = True

    def say(self, report: FrozenModel) -> None:
        self._link.send(to_bytes(report))

    def die(self) -> None:
        """Closes the link, as the end of a process does."""
        self.is_beating = False
        self._link.close()

    def attempts(self) -> list[int]:
        """Returns the attempts it was told to start since the last call."""
        started = []
        with contextlib.suppress(BlockingIOError):
            while message := receive(self._link):
                started.append(StartAttempt.model_validate_json(message).attempt)
        return started


class FakeForkServer:
    """Forks nothing: it plays the node agents, and the time, which passes only while somebody waits for them."""

    def __init__(self) -> None:
        self.now_s: Seconds = 1000.0
        self.agents: dict[int, FakeNodeAgent] = {}
        """The newest agent of each node."""
        self.processes: list[FakeProcess] = []
        """All that were forked, in order."""
        self.vacant: set[int] = set()
        """Nodes that have no machine."""
        self._acts: list[tuple[Seconds, Callable[[], object]]] = []

    def fork(
        self, role: RunNodeAgent | ServeRendezvous, *, fds: Sequence[int], entry: NamespaceEntry, log: Path
    ) -> FakeProcess:
        if isinstance(role, RunNodeAgent):
            if role.node in self.vacant:
                raise VacantError(role.node)
            agent = self.agents[role.node] = FakeNodeAgent(socket.socket(fileno=os.dup(fds[0])))
            process = agent.process
        else:
            process = FakeProcess(lambda: None)
        self.processes.append(process)
        return process

    def clock(self) -> Seconds:
        return self.now_s

    def after(self, delay_s: Seconds, act: Callable[[], object]) -> None:
        """Has something done when that time has passed."""
        self._acts.append((self.now_s + delay_s, act))
        self._acts.sort(key=lambda each: each[0])

    def wait_readable(self, sockets: Sequence[socket.socket], timeout_s: Seconds) -> list[socket.socket]:
        """Returns the sockets that have something to read; without one, lets time pass up to the timeout.

        Nodes that are alive have given a heartbeat by then.
        """
        end_s = self.now_s + timeout_s
        while not (ready := select.select(sockets, [], [], 0)[0]) and self._acts and self._acts[0][0] <= end_s:
            self.now_s, act = self._acts.pop(0)
            act()
        if not ready:
            self.now_s = end_s
            for agent in self.agents.values():
                if agent.is_beating:
                    agent.say(NodeAlive())
        return ready
