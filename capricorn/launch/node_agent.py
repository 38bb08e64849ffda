"""One node of a run: forks its ranks, watches them, and reports at once when one has ended or is frozen.

Forked itself by the fork server, so that its ranks have torch imported. The launcher decides what happens next; the
agent keeps each rank's process in one of these states, and moves it on:

| state    | the process                      | what happens                                    | next               |
|----------|----------------------------------|-------------------------------------------------|--------------------|
| none     | has ended                        | launcher starts an attempt: it is forked anew   | STARTING           |
| STARTING | has finished no iteration yet    | rank has finished one                           | TRAINING           |
| TRAINING | takes part in its attempt        | rank leaves a failed attempt: reported as ended | LEFT               |
| either   |                                  | launcher starts the next attempt: SIGTERM       | LEAVING            |
| LEAVING  | was told to leave its attempt    | rank has left: it is sent on at once            | STARTING           |
|          |                                  | `LEAVE_S` are over: SIGKILL                     | KILLED             |
| LEFT     | waits for another attempt        | launcher starts the next attempt: it is sent on | STARTING           |
| any      | gives no heartbeat for too long  | reported as frozen, SIGKILL                     | KILLED             |
| KILLED   | is about to end                  | `KILL_TIMEOUT_S` are over: named, left alone    | as if it had ended |
| any      | ends in the attempt of now       | reported as ended                               | none               |
| any      | ends in an attempt that is over  | it is forked anew for that of now               | none, then STARTING |

All times are those for which the agent was awake: what it did not hear while it was stopped itself is nobody's fault.
How long a heartbeat may be missing is told in `restart_policy.patience_s`.

The agent ends, and with it its ranks, when the launcher closes the link.
"""

from __future__ import annotations

import contextlib
import enum
import mmap
import os
import select
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from capricorn.config.fields import FrozenModel
from capricorn.launch.launch_messages import (
    NodeAlive,
    RankEnded,
    RankFrozen,
    RunNodeAgent,
    StartAttempt,
    TrainingBegan,
    rank_report,
    receive,
    to_bytes,
)
from capricorn.launch.nodes import FAILED
from capricorn.launch.rank_context import ForkedContext
from capricorn.launch.restart_policy import SilenceWatchdog, start_patience_s
from capricorn.process import KILL_TIMEOUT_S, AwakeClock, die_with_parent, tell_undead, thread_states
from capricorn.records.job_file import Job
from capricorn.runtime.persist.writer_process import WriterStarter
from capricorn.units import Seconds

HEARTBEAT_S: Final = 0.25
"""Between two heartbeats of a rank to its node, and of a node to the launcher."""
LEAVE_S: Final = 1.0
"""How long a rank may take to leave an attempt by itself before it is killed and forked anew."""
CUDA_LEAVE_S: Final = 10.0
"""The same on CUDA, where communicators are aborted and kernels run to their end first."""
STOP_S: Final = 1.0
"""How long the ranks may take to end at the end of the run."""


class RankState(enum.Enum):
    """See the table at the top."""

    STARTING = enum.auto()
    TRAINING = enum.auto()
    LEAVING = enum.auto()
    LEFT = enum.auto()
    KILLED = enum.auto()


def run_node_agent(role: RunNodeAgent, link_fd: int) -> None:
    """Runs a node until the launcher closes the link with that descriptor."""
    os.environ["GLOO_SOCKET_IFNAME"] = role.interface
    NodeAgent(Job.read(role.job_file), role.node, role.endpoint, socket.socket(fileno=link_fd)).run()


@dataclass(slots=True)
class RankProcess:
    """A rank's process as its node sees it."""

    rank: int
    attempt: int
    pid: int
    pidfd: int
    """A descriptor that can be read once the process has ended."""
    link: socket.socket
    state: RankState = RankState.STARTING
    due_s: Seconds = 0.0
    """When it is killed if it is still LEAVING, or left alone if it is still KILLED."""
    beat: float = 0.0
    """Its newest heartbeat."""

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def exit_code(self) -> int:
        """Returns the exit code of the process once it has ended, negative for the signal that ended it."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def states(self) -> str:
        """Returns the states of its threads, as `thread_states` does."""
        return thread_states(self.pid)


class NodeAgent:
    """The ranks of one node."""

    def __init__(
        self,
        job: Job,
        node: int,
        endpoint: tuple[str, int],
        link: socket.socket,
        *,
        fork: Callable[[int, int], RankProcess] | None = None,
        clock: Callable[[], Seconds] = time.monotonic,
    ) -> None:
        """Forks nothing yet.

        Args:
            job: what is run.
            node: the number of this node.
            endpoint: host and port of the rendezvous store.
            link: the link to the launcher.
            fork: makes the process of a rank for an attempt; by default forks this one.
            clock: tells the time.
        """
        self._job, self._endpoint, self._link = job, endpoint, link
        self._fork, self._clock = fork or self._fork_self, clock
        self._awake = AwakeClock(2 * HEARTBEAT_S, clock)
        self._ranks = job.scenario.topology.ranks_of(node)
        self._processes: dict[int, RankProcess] = {}
        self._attempt = -1
        scenario = job.scenario
        self._silence = SilenceWatchdog[int](scenario.launch.frozen_s, start_patience_s(scenario.cluster.device))
        self._leave_s = CUDA_LEAVE_S if scenario.cluster.device == "cuda" else LEAVE_S
        self._board = mmap.mmap(-1, mmap.PAGESIZE)
        self._heartbeats = memoryview(self._board).cast("d")
        """Shared with the ranks: another number with each heartbeat, by local rank."""
        self._reported_s = 0.0
        self._selector = selectors.DefaultSelector()
        self._selector.register(link, selectors.EVENT_READ, None)

    def run(self) -> None:
        signal.signal(signal.SIGTERM, _end)
        try:
            with contextlib.suppress(ConnectionError):  # the launcher went while something was told to it
                while self.turn():
                    pass
        finally:
            self._stop()

    def turn(self, timeout_s: Seconds = HEARTBEAT_S) -> bool:
        """Acts upon what happens within that time; returns whether the launcher is still there."""
        if not self._handle_events(timeout_s):
            return False
        self._watch()
        return True

    def _handle_events(self, timeout_s: Seconds) -> bool:
        for key, _ in self._selector.select(timeout_s):
            process: RankProcess | None = key.data
            if process is None:
                if not (order := receive(self._link)):
                    return False
                self._start_attempt(StartAttempt.model_validate_json(order).attempt)
            elif self._processes.get(process.rank) is not process:
                continue  # it has been reaped in this turn
            elif key.fileobj is process.link:
                self._hear(process)
            else:
                self._reap(process)
        return True

    def _start_attempt(self, attempt: int) -> None:
        """Has all ranks take part in that attempt; those that still run in another leave it first."""
        self._attempt = attempt
        for rank in self._ranks:
            process = self._processes.get(rank)
            if process is None:
                self._start(rank)
            elif process.state is RankState.LEFT:
                self._send_on(process)
            elif process.state is not RankState.KILLED:
                process.state, process.due_s = RankState.LEAVING, self._awake() + self._leave_s
                process.signal(signal.SIGTERM)

    def _start(self, rank: int) -> None:
        """Has a new process take part in the attempt of now."""
        process = self._processes[rank] = self._fork(rank, self._attempt)
        self._silence.heard(rank, self._awake(), is_starting=True)
        self._selector.register(process.link, selectors.EVENT_READ, process)
        self._selector.register(process.pidfd, selectors.EVENT_READ, process)

    def _fork_self(self, rank: int, attempt: int) -> RankProcess:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A signal that ends an attempt must find a child that is ready for it, or Python may drop it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        agent, pid = os.getpid(), os.fork()
        if pid == 0:
            ours.close()
            self._become(rank, attempt, theirs, agent)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        return RankProcess(rank, attempt, pid, os.pidfd_open(pid), ours)

    def _become(self, rank: int, attempt: int, link: socket.socket, agent: int) -> None:
        """Turns a forked process into a rank, and ends it with that; `agent` is the process that forked it."""
        from capricorn.launch.worker import run_forked

        code = FAILED
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            die_with_parent(agent)
            self._selector.close()
            self._link.close()
            for process in self._processes.values():
                process.link.close()
                os.close(process.pidfd)
            start_writer = self._writer_starter()  # before there is any thread
            threading.Thread(target=self._beat, args=(rank,), name="capricorn-heartbeat", daemon=True).start()
            context = ForkedContext(self._job, rank, attempt, self._endpoint, start_writer)
            code = run_forked(self._job, context, link)
        except BaseException as error:  # noqa: BLE001 - the process ends here, and says in the log why
            traceback.print_exception(error)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            # Threads of a process group that lost a peer may never join; the state they served is in the store.
            os._exit(code)

    def _writer_starter(self) -> WriterStarter | None:
        """Returns what forks writers of the persistent tier; None if there is no tier, or no process more to be had."""
        from capricorn.runtime.persist.writer_forker import WriterForker

        with contextlib.suppress(OSError):  # each writer is then started afresh, and its failure told
            return WriterForker().start if self._job.scenario.persist.every else None
        return None

    def _beat(self, rank: int) -> None:
        """Gives the heartbeats of a rank, in a thread of its process, as long as it is not frozen."""
        while True:
            self._heartbeats[rank - self._ranks.start] = time.monotonic()
            time.sleep(HEARTBEAT_S)

    def _hear(self, process: RankProcess) -> None:
        """Notes that a rank trains, or has left its attempt, of its own accord or because it was told to."""
        if not (message := receive(process.link)):  # its end is told by its pidfd
            self._selector.unregister(process.link)
            return
        report = rank_report(message)
        if isinstance(report, TrainingBegan):
            if process.state is RankState.STARTING and report.attempt == process.attempt:
                process.state = RankState.TRAINING
                self._silence.heard(process.rank, self._awake())
        elif process.state is not RankState.KILLED:
            self._let_go(process)

    def _let_go(self, process: RankProcess) -> None:
        """Reports a rank that has left the attempt of now, or sends it on to that."""
        process.state = RankState.LEFT
        if process.attempt == self._attempt:
            self._report(RankEnded(rank=process.rank, attempt=process.attempt, exit_code=FAILED))
        else:
            self._send_on(process)

    def _send_on(self, process: RankProcess) -> None:
        with contextlib.suppress(ConnectionError):  # it has just ended, of which its pidfd tells; it is forked anew
            process.link.send(to_bytes(StartAttempt(attempt=self._attempt)))
            process.state, process.attempt = RankState.STARTING, self._attempt
            self._silence.heard(process.rank, self._awake(), is_starting=True)

    def _reap(self, process: RankProcess, code: int | None = None) -> None:
        """Lets go of a process that has ended, or is left alone with that exit code.

        If its attempt is over, the rank is forked anew for that of now.
        """
        del self._processes[process.rank]
        self._silence.forget(process.rank)
        for end in (process.link, process.pidfd):
            if end in self._selector.get_map():
                self._selector.unregister(end)
        process.link.close()
        os.close(process.pidfd)
        code = process.exit_code() if code is None else code
        if process.attempt == self._attempt:
            self._report(RankEnded(rank=process.rank, attempt=process.attempt, exit_code=code))
        else:
            self._start(process.rank)

    def _watch(self) -> None:
        """Kills ranks that do not leave in time or are frozen, which are reaped then; gives our own heartbeat."""
        now_s = self._awake()
        self._hear_heartbeats(now_s)
        frozen = self._silence.silent(now_s, lambda rank: self._processes[rank].states())
        for process in list(self._processes.values()):
            is_late = now_s > process.due_s
            if process.state is RankState.KILLED:
                if is_late:
                    tell_undead(f"rank {process.rank}", process.pid)
                    self._reap(process, -signal.SIGKILL)
                continue
            if process.rank in frozen:
                silent_s = frozen[process.rank]
                self._report(RankFrozen(rank=process.rank, attempt=process.attempt, silent_s=silent_s))
            if process.rank in frozen or (process.state is RankState.LEAVING and is_late):
                process.state, process.due_s = RankState.KILLED, now_s + KILL_TIMEOUT_S
                process.signal(signal.SIGKILL)
        if self._clock() - self._reported_s > HEARTBEAT_S:
            self._report(NodeAlive())

    def _hear_heartbeats(self, now_s: Seconds) -> None:
        for rank, process in self._processes.items():
            beat = self._heartbeats[rank - self._ranks.start]
            if beat != process.beat:
                process.beat = beat
                self._silence.heard(rank, now_s, is_starting=process.state is RankState.STARTING)

    def _report(self, report: FrozenModel) -> None:
        self._reported_s = self._clock()
        self._link.send(to_bytes(report))

    def _stop(self) -> None:
        """Ends all ranks, by force those that take too long; one that does not end even so is named and left."""
        for process in self._processes.values():
            process.signal(signal.SIGTERM)
            process.link.close()
        end_s = self._clock() + STOP_S
        for process in self._processes.values():
            if not _is_readable(process.pidfd, end_s - self._clock()):
                process.signal(signal.SIGKILL)
        end_s = self._clock() + KILL_TIMEOUT_S
        for process in self._processes.values():
            if _is_readable(process.pidfd, end_s - self._clock()):
                process.exit_code()
            else:
                tell_undead(f"rank {process.rank}", process.pid)


def _is_readable(fd: int, timeout_s: Seconds) -> bool:
    return bool(select.select([fd], [], [], max(0.0, timeout_s))[0])


def _end(signum: int, frame: object) -> None:
    raise SystemExit(f"signal {signum}")
