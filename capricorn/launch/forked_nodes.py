"""The nodes of a run as processes forked from a warm one: what fails is started again at once, what is lost replaced.

Decides when an attempt is over and which nodes take part in the next. Knows no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from capricorn.emulation.testbed import Ground
from capricorn.launch.fork_client import Standby
from capricorn.launch.nodes import UNREACHABLE, GaveUpError
from capricorn.records.job_file import Job
from capricorn.records.samples import EVENTS, EventSample, append
from capricorn.runtime.store.node_store import NodeStore
from capricorn.units import Seconds

STOP_TIMEOUT_S: Final[Seconds] = 10.0
START_PATIENCE_S: Final[Seconds] = 300.0
"""How long the first iteration of a run may take to come."""
PAUSE_S: Final[Seconds] = 2.0
"""Between two waits of the launcher, beyond their own time: it was stopped."""
GATHER_S: Final[Seconds] = 0.03
"""After a node was lost, how long to look whether others are, too."""
_MESSAGE_BYTES: Final = 1024


@dataclass(slots=True)
class _Process:
    """A process that the warm one has forked."""

    pid: int
    pidfd: int = field(init=False)

    def __post_init__(self) -> None:
        self.pidfd = os.pidfd_open(self.pid)

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def end(self, timeout_s: Seconds) -> None:
        """Returns when it has ended, by force if it takes longer."""
        if not select.select([self.pidfd], [], [], timeout_s)[0]:
            self.signal(signal.SIGKILL)
            select.select([self.pidfd], [], [])
        os.close(self.pidfd)


@dataclass(slots=True)
class _Link:
    """A node as the launcher sees it."""

    socket: socket.socket
    process: _Process
    heard_s: Seconds


class WarmNodes:
    """All nodes on this machine; implements `Nodes`."""

    def __init__(
        self, job: Job, ground: Ground, log_dir: Path, standby: Standby, on_replace: Callable[[int], None]
    ) -> None:
        """`on_replace` is told of each node that is replaced, before its successor starts."""
        self._job, self._ground, self._log_dir, self._standby = job, ground, log_dir, standby
        self._on_replace = on_replace
        scenario = job.scenario
        self._topology, self._launch = scenario.topology, scenario.launch
        self._restarts_left = self._launch.max_restarts + 2 * len(scenario.faults)
        waits_s = (scenario.system.timeout_s, scenario.persist.timeout_s if scenario.persist.every else 0.0)
        self._least_patience_s = 1.5 * max(waits_s)
        self._links: dict[int, _Link] = {}
        self._attempt = -1
        self._store: _Process | None = None
        self._waited_s: Seconds | None = None
        self._done: set[int] = set()
        self._progress_s: Seconds = 0.0
        """When the newest iteration was heard of, or else the attempt began."""
        self._longest_s: Seconds = 0.0

    def start(self) -> None:
        self._job_file = self._job.write()
        with self._ground.listener as listener:
            self._endpoint = listener.getsockname()
            log, entry = self._log_dir / "rendezvous.log", self._ground.enter_switch()
            self._store = _Process(self._standby.fork("store", fds=[listener.fileno()], entry=entry, log=log))
        for node in range(self._topology.num_nodes):
            self._start_node(node)
        self._begin()

    def wait(self, timeout_s: Seconds) -> None:
        self._forgive_pause(timeout_s)
        num_nodes = len(self._links)
        failed = self._listen(timeout_s) + self._silent()
        if len(self._links) < num_nodes:
            failed += self._gather()
        if failed:
            self._again(failed[0])
        elif self._is_stuck():
            self._note(-1, "no rank has made progress")
            self._again(0)

    @property
    def are_done(self) -> bool:
        return len(self._done) == self._topology.world_size

    def progressed(self) -> None:
        now_s = time.monotonic()
        self._longest_s = max(self._longest_s, now_s - self._progress_s)
        self._progress_s = now_s

    def stop(self) -> None:
        for link in self._links.values():
            link.socket.close()
        end_s = time.monotonic() + STOP_TIMEOUT_S
        for link in self._links.values():
            link.process.end(max(0.1, end_s - time.monotonic()))
        self._links.clear()
        if self._store is not None:
            self._store.signal(signal.SIGTERM)
            self._store.end(STOP_TIMEOUT_S)

    def _start_node(self, node: int) -> None:
        NodeStore.create(self._job.node_dir(node), self._job.run_id, node, self._topology)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            pid = self._standby.fork(
                "node",
                *(str(self._job_file), node, self._endpoint, self._ground.interface),
                fds=[theirs.fileno()],
                entry=self._ground.enter_node(node),
                log=self._log_dir / f"node{node}.log",
                system=self._job.scenario.system.name,
            )
        self._links[node] = _Link(ours, _Process(pid), time.monotonic())

    def _begin(self) -> None:
        """Has all nodes start the next attempt."""
        self._attempt += 1
        self._done.clear()
        self._progress_s = time.monotonic()
        order = json.dumps({"attempt": self._attempt}).encode()
        for link in self._links.values():
            with contextlib.suppress(OSError):  # it has just been lost, which `wait` will hear of
                link.socket.send(order)

    def _again(self, node: int) -> None:
        if self._restarts_left == 0:
            raise GaveUpError(node)
        self._restarts_left -= 1
        for lost in set(range(self._topology.num_nodes)) - self._links.keys():
            self._on_replace(lost)
            self._start_node(lost)
        self._begin()

    def _forgive_pause(self, timeout_s: Seconds) -> None:
        """A launcher that was stopped itself, and went on, has not seen what was done meanwhile."""
        now_s = time.monotonic()
        paused_s = 0.0 if self._waited_s is None else now_s - self._waited_s - timeout_s
        if paused_s > PAUSE_S:
            self._progress_s += paused_s
        self._waited_s = now_s

    def _gather(self) -> list[int]:
        """Nodes that fail together with one that was lost, so that they are replaced together."""
        end_s, failed = time.monotonic() + GATHER_S, list[int]()
        while (left_s := end_s - time.monotonic()) > 0:
            failed += self._listen(left_s)
        return failed

    def _listen(self, timeout_s: Seconds) -> list[int]:
        """Nodes by which the attempt has failed, as they say within that time, or as soon as one says something."""
        by_socket = {link.socket: node for node, link in self._links.items()}
        ready, _, _ = select.select(list(by_socket), [], [], timeout_s)
        return [node for sock in ready if self._hear(node := by_socket[sock])]

    def _hear(self, node: int) -> bool:
        """Takes what a node says; whether the attempt has failed by it."""
        link = self._links[node]
        try:
            message = link.socket.recv(_MESSAGE_BYTES)
        except ConnectionError:
            message = b""
        if not message:
            self._lose(node, "was lost")
            return True
        link.heard_s = time.monotonic()
        facts: dict[str, Any] = json.loads(message)
        if facts.get("attempt") != self._attempt:
            return False  # no more than a sign of life, or of an attempt that is over
        if "frozen_s" in facts:
            self._note(facts["rank"], f"frozen for {facts['frozen_s']:g} s")
            return False  # it is killed, and told of once more when it has ended
        if facts["code"] == 0:
            self._done.add(facts["rank"])
            return False
        if facts["code"] < 0:
            self._note(facts["rank"], f"killed by signal {-facts['code']}")
        if facts["code"] == UNREACHABLE:
            self._lose(node, "cannot reach the others")
        return True

    def _silent(self) -> list[int]:
        """Nodes that have given no sign of life for too long; they are given up."""
        now_s = time.monotonic()
        silent = [node for node, link in self._links.items() if now_s - link.heard_s > 2 * self._launch.frozen_s]
        for node in silent:
            self._lose(node, "is frozen")
        return silent

    def _lose(self, node: int, how: str) -> None:
        """Ends what may be left of a node."""
        link = self._links.pop(node)
        link.socket.close()
        link.process.signal(signal.SIGKILL)
        link.process.end(STOP_TIMEOUT_S)
        self._note(self._topology.ranks_of(node).start, f"node {node} {how}")

    def _is_stuck(self) -> bool:
        """Whether no iteration has come for ten times as long as any took, and for longer than waits are bounded."""
        patience_s = max(self._least_patience_s, 10 * self._longest_s) if self._longest_s else START_PATIENCE_S
        return time.monotonic() - self._progress_s > patience_s

    def _note(self, rank: int, detail: str) -> None:
        event = EventSample(event="failed", at_s=time.time(), attempt=self._attempt, rank=rank, detail=detail)
        append(self._job.run_dir / EVENTS, event)
