"""The nodes of a run as forked processes: what fails is started again at once, what is lost is replaced.

Decides, by what the node agents report, when an attempt is over and which nodes take part in the next:

| what is heard                                         | node is given up | the attempt is over |
|-------------------------------------------------------|------------------|---------------------|
| a rank ended with 0                                   | no               | no; the run is done once all ranks have |
| a rank failed or was killed                           | no               | yes                 |
| a rank cannot reach the rendezvous store              | yes              | yes                 |
| a link was closed                                     | yes              | yes                 |
| nothing from a node for twice `launch.frozen_s`       | yes              | yes                 |
| nothing new from any rank for too long                | no               | yes                 |
| a rank is frozen, or anything of an attempt before    | no               | no; its node kills it and reports its end |
| the rendezvous store has ended or is stopped          | no               | no; another takes its place |

A node that is given up is killed, its store is made anew, and another agent is forked. Then all nodes are told to start
the next attempt, as often as the restart budget allows. A node on another machine may be vacant until one comes.

For how long nothing has come is counted while the launcher itself was awake to hear it, and a node that still starts or
that the machine does not let run has longer; see `restart_policy`. Knows no torch.
"""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from capricorn.emulation.testbed import NetworkBackend
from capricorn.errors import CapricornError
from capricorn.launch.fork_client import STOP_TIMEOUT_S, ForkedProcess, Forker
from capricorn.launch.launch_messages import (
    NodeAlive,
    RankFrozen,
    RunNodeAgent,
    ServeRendezvous,
    StartAttempt,
    node_report,
    receive,
    to_bytes,
)
from capricorn.launch.nodes import UNREACHABLE, VacantError
from capricorn.launch.restart_policy import MAX_GAP_S, RENDEZVOUS, ProgressWatchdog, RestartBudget, SilenceWatchdog
from capricorn.process import AwakeClock, is_stopped
from capricorn.records.job_file import Job
from capricorn.records.samples import EVENTS, EventName, EventSample, IterationSample, append
from capricorn.runtime.store.node_store import NodeStore
from capricorn.units import Seconds

GATHER_S: Final = 0.03
"""After a node was lost, how long to look whether others are, too."""
VACANT_TIMEOUT_S: Final[Seconds] = 300.0
"""How long a node may be without a machine before the run ends."""


class Waiting(Protocol):
    """Waits until one of the sockets has something to read, or for that time; returns those that have."""

    def __call__(self, sockets: Sequence[socket.socket], timeout_s: Seconds) -> list[socket.socket]: ...


class _Node(NamedTuple):
    """A node as the launcher sees it."""

    link: socket.socket
    process: ForkedProcess


def wait_readable(sockets: Sequence[socket.socket], timeout_s: Seconds) -> list[socket.socket]:
    """Returns the sockets that have something to read, as soon as there are any."""
    return select.select(sockets, [], [], timeout_s)[0]


class ForkedNodes:
    """All nodes on this machine; implements `Nodes`."""

    def __init__(
        self,
        job: Job,
        network: NetworkBackend,
        log_dir: Path,
        on_replace: Callable[[int], None],
        *,
        forker: Forker,
        clock: Callable[[], Seconds] = time.monotonic,
        wait: Waiting = wait_readable,
    ) -> None:
        """Starts nothing yet.

        Args:
            job: what is run.
            network: the backend that the nodes are in.
            log_dir: where each process writes what it prints.
            on_replace: is told of each node that is replaced, before its successor starts.
            forker: the fork server.
            clock: tells the time.
            wait: waits for what the nodes say.
        """
        self._job, self._network, self._log_dir, self._on_replace = job, network, log_dir, on_replace
        self._forker, self._clock, self._wait = forker, clock, wait
        self._awake = AwakeClock(MAX_GAP_S, clock)
        scenario = job.scenario
        self._topology = scenario.topology
        self._budget = RestartBudget(scenario.launch.max_restarts + 2 * len(scenario.faults))
        waits_s = (scenario.system.timeout_s, scenario.persist.timeout_s if scenario.persist.every else 0.0)
        self._progress = ProgressWatchdog(1.5 * max(waits_s), every=scenario.system.every)
        self._silence = SilenceWatchdog[int](2 * scenario.launch.frozen_s)
        self._nodes: dict[int, _Node] = {}
        self._rendezvous: ForkedProcess | None = None
        self._attempt = -1
        self._vacant_s: Seconds | None = None
        """Since when some node has no machine."""
        self._done: set[int] = set()
        """The ranks that have trained to the end."""

    def start(self) -> None:
        self._job_file = self._job.write()
        host, port = self._network.listener.getsockname()[:2]
        self._endpoint = (str(host), int(port))
        self._start_rendezvous()
        self._fill()

    def wait(self, timeout_s: Seconds) -> None:
        if self._vacant_s is not None:
            self._listen(timeout_s)
            self._fill()
            return
        num_nodes = len(self._nodes)
        failed = self._listen(timeout_s) + self._end_silent()
        if len(self._nodes) < num_nodes:
            failed += self._gather()
        if failed:
            self._restart(failed[0])
        elif self._progress.is_stuck(self._awake()):
            self._record_failure(-1, "no rank has made progress")
            self._restart(0)

    @property
    def are_done(self) -> bool:
        return len(self._done) == self._topology.world_size

    def progressed(self, samples: Sequence[IterationSample] = ()) -> None:
        newest = max((sample.iteration for sample in samples), default=0)
        saved = [sample.iteration for sample in samples if sample.requested]
        self._progress.progressed(self._awake(), iteration=newest, is_saved=bool(saved))

    def stop(self) -> None:
        for node in self._nodes.values():
            node.link.close()
        end_s = self._clock() + STOP_TIMEOUT_S
        for node in self._nodes.values():
            node.process.end(max(0.1, end_s - self._clock()))
        self._nodes.clear()
        if self._rendezvous is not None:
            self._rendezvous.signal(signal.SIGTERM)
            self._rendezvous.end(STOP_TIMEOUT_S)

    def _start_rendezvous(self) -> None:
        """Has the rendezvous store served, also after its process has ended: the listener is still ours."""
        self._rendezvous = self._forker.fork(
            ServeRendezvous(),
            fds=[self._network.listener.fileno()],
            entry=self._network.enter_switch(),
            log=self._log_dir / "rendezvous.log",
        )
        self._silence.heard(RENDEZVOUS, self._awake())

    def _make_store(self, node: int) -> None:
        """Makes an empty store for a node."""
        NodeStore.create(self._job.node_dir(node), self._job.run_id, node, self._topology)

    def _start_node(self, node: int) -> None:
        self._make_store(node)
        role = RunNodeAgent(
            job_file=self._job_file,
            node=node,
            endpoint=self._endpoint,
            interface=self._network.interface,
            system=self._job.scenario.system.name,
        )
        entry, log = self._network.enter_node(node), self._log_dir / f"node{node}.log"
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = self._forker.fork(role, fds=[theirs.fileno()], entry=entry, log=log)
        self._nodes[node] = _Node(ours, process)
        self._silence.heard(node, self._awake(), is_starting=True)

    def _start_attempt(self) -> None:
        """Has all nodes start the next attempt."""
        self._attempt += 1
        self._done.clear()
        self._progress.attempt_began(self._awake())
        order = to_bytes(StartAttempt(attempt=self._attempt))
        for node in self._nodes.values():
            with contextlib.suppress(OSError):  # it has just been lost, which `wait` will hear of
                node.link.send(order)

    def _restart(self, node: int) -> None:
        """Replaces the nodes that were given up and starts the next attempt.

        Raises:
            GaveUpError: this one, by which that node failed, was the last; it names the node.
        """
        self._budget.spend(node)
        for lost in self._missing():
            self._on_replace(lost)
        self._fill()

    def _fill(self) -> None:
        """Starts the nodes that are missing, and the next attempt once all are there.

        Raises:
            CapricornError: a node has had no machine for too long.
        """
        vacant = [node for node in self._missing() if not self._starts(node)]
        if not vacant:
            self._vacant_s = None
            self._start_attempt()
            return
        now_s = self._awake()
        self._vacant_s = now_s if self._vacant_s is None else self._vacant_s
        if now_s - self._vacant_s > VACANT_TIMEOUT_S:
            raise CapricornError(
                f"no machine has taken the place of node {vacant[0]} within {VACANT_TIMEOUT_S:g} s; start one with "
                "the same command and --node-rank, or allow spares by --nnodes MIN:MAX"
            )

    def _missing(self) -> list[int]:
        return sorted(set(range(self._topology.num_nodes)) - self._nodes.keys())

    def _starts(self, node: int) -> bool:
        """Starts a node, anew if there was one; returns whether there is a machine for it."""
        try:
            self._start_node(node)
        except VacantError:
            return False
        return True

    def _gather(self) -> list[int]:
        """Returns nodes that fail together with one that was lost, so that they are replaced together."""
        end_s, failed = self._clock() + GATHER_S, list[int]()
        while (left_s := end_s - self._clock()) > 0:
            failed += self._listen(left_s)
        return failed

    def _listen(self, timeout_s: Seconds) -> list[int]:
        """Returns nodes by which the attempt has failed, as they say within that time, or as soon as one speaks."""
        by_link = {node.link: number for number, node in self._nodes.items()}
        ready = self._wait(list(by_link), timeout_s)
        return [node for link in ready if self._hear(node := by_link[link])]

    def _hear(self, node: int) -> bool:
        """Takes what a node says; returns whether the attempt has failed by it."""
        message = receive(self._nodes[node].link)
        if not message:
            self._give_up(node, "was lost")
            return True
        self._silence.heard(node, self._awake())
        report = node_report(message)
        if isinstance(report, NodeAlive) or report.attempt != self._attempt:
            return False
        if isinstance(report, RankFrozen):
            self._record_failure(report.rank, f"frozen for {report.silent_s:g} s")
            return False
        if report.exit_code == 0:
            self._done.add(report.rank)
            return False
        if report.exit_code < 0:
            self._record_failure(report.rank, f"killed by signal {-report.exit_code}")
        if report.exit_code == UNREACHABLE:
            self._give_up(node, "cannot reach the others")
        return True

    def _end_silent(self) -> list[int]:
        """Ends what has been silent for too long; returns the nodes that are given up by it."""
        assert self._rendezvous is not None
        if not self._rendezvous.has_ended and not is_stopped(self._rendezvous.states()):
            self._silence.heard(RENDEZVOUS, self._awake())
        silent = self._silence.silent(self._awake(), self._states_of)
        if self._rendezvous.has_ended or RENDEZVOUS in silent:
            self._replace_rendezvous()
        nodes = [key for key in silent if key != RENDEZVOUS]
        for node in nodes:
            self._give_up(node, "is frozen")
        return nodes

    def _states_of(self, key: int) -> str:
        process = self._rendezvous if key == RENDEZVOUS else self._nodes[key].process
        return process.states() if process is not None else ""

    def _replace_rendezvous(self) -> None:
        """Has another process serve the rendezvous store, of which ranks that train have no need."""
        assert self._rendezvous is not None
        why = "has ended" if self._rendezvous.has_ended else "is stopped"
        self._rendezvous.signal(signal.SIGKILL)
        self._rendezvous.end(STOP_TIMEOUT_S)
        self._start_rendezvous()
        self._record("replaced", RENDEZVOUS, f"the rendezvous store {why}")

    def _give_up(self, node: int, why: str) -> None:
        """Ends what may be left of a node."""
        lost = self._nodes.pop(node)
        self._silence.forget(node)
        lost.link.close()
        lost.process.signal(signal.SIGKILL)
        lost.process.end(STOP_TIMEOUT_S)
        self._record_failure(self._topology.ranks_of(node).start, f"node {node} {why}")

    def _record_failure(self, rank: int, detail: str) -> None:
        self._record("failed", rank, detail)

    def _record(self, event: EventName, rank: int, detail: str) -> None:
        sample = EventSample(event=event, at_s=self._job.now_s(), attempt=self._attempt, rank=rank, detail=detail)
        append(self._job.run_dir / EVENTS, sample)
