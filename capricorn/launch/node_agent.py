"""One node of a run: forks its ranks, watches them, and tells the launcher at once when one has ended or is frozen.

Forked itself from a warm process, so that its ranks have torch imported; the launcher decides what happens next.
"""

from __future__ import annotations

import contextlib
import json
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from capricorn.launch.nodes import FAILED
from capricorn.launch.rank_context import ForkedPlace
from capricorn.process import die_with_parent
from capricorn.records.job_file import Job
from capricorn.units import Seconds

BEAT_S: Final = 0.25
"""Between two signs of life of a rank to its node, and of a node to the launcher."""
LEAVE_S: Final = 1.0
"""What a rank is given to leave an attempt by itself before it is killed and forked anew."""
STOP_S: Final = 1.0
"""What the ranks are given to end at the end of the run."""
_MESSAGE_BYTES: Final = 1024


def run_node(link_fd: int, job_file: str, node: int, endpoint: tuple[str, int], interface: str) -> None:
    """Runs a node until the launcher closes the link with that descriptor."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    link = socket.socket(fileno=link_fd)
    Node(Job.read(Path(job_file)), node, (endpoint[0], endpoint[1]), link).run()


@dataclass(slots=True)
class _Rank:
    """A rank's process as its node sees it."""

    rank: int
    pid: int
    pidfd: int
    orders: socket.socket
    attempt: int
    has_left: bool = False
    """Whether it waits for the next attempt."""
    leave_by: Seconds | None = None
    """When it is killed if it has not left."""
    is_killed: bool = False


class Node:
    """The ranks of one node."""

    def __init__(self, job: Job, node: int, endpoint: tuple[str, int], link: socket.socket) -> None:
        self._job, self._endpoint, self._link = job, endpoint, link
        self._ranks = job.scenario.topology.ranks_of(node)
        self._processes: dict[int, _Rank] = {}
        self._attempt = -1
        self._frozen_s = job.scenario.launch.frozen_s
        self._board = mmap.mmap(-1, mmap.PAGESIZE)
        self._beats = memoryview(self._board).cast("d")
        """Shared with the ranks: when each gave its last sign of life, by local rank."""
        self._told_s = 0.0
        self._selector = selectors.DefaultSelector()
        self._selector.register(link, selectors.EVENT_READ, None)

    def run(self) -> None:
        signal.signal(signal.SIGTERM, _end)
        try:
            while self._turn():
                self._watch()
        finally:
            self._stop()

    def _turn(self) -> bool:
        """Acts upon what has happened; whether the launcher is still there."""
        for key, _ in self._selector.select(BEAT_S):
            process: _Rank | None = key.data
            if process is None:
                order = self._link.recv(_MESSAGE_BYTES)
                if not order:
                    return False
                self._begin(json.loads(order)["attempt"])
            elif self._processes.get(process.rank) is not process:
                continue  # it has been reaped in this turn
            elif key.fileobj is process.orders:
                self._hear(process)
            else:
                self._reap(process)
        return True

    def _begin(self, attempt: int) -> None:
        """Has all ranks take part in that attempt; those that still run in another leave it first."""
        self._attempt = attempt
        for rank in self._ranks:
            process = self._processes.get(rank)
            if process is None:
                self._fork(rank)
            elif process.has_left:
                self._send_on(process)
            else:
                process.leave_by = time.monotonic() + LEAVE_S
                os.kill(process.pid, signal.SIGTERM)

    def _fork(self, rank: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._beats[rank - self._ranks.start] = time.monotonic()
        # A signal that ends an attempt must find a child that is ready for it, or Python may drop it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        pid = os.fork()
        if pid == 0:
            ours.close()
            self._become(rank, theirs)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        process = self._processes[rank] = _Rank(rank, pid, os.pidfd_open(pid), ours, self._attempt)
        self._selector.register(ours, selectors.EVENT_READ, process)
        self._selector.register(process.pidfd, selectors.EVENT_READ, process)

    def _become(self, rank: int, orders: socket.socket) -> None:
        from capricorn.launch.worker import run_forked

        code = FAILED
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            die_with_parent()
            self._selector.close()
            self._link.close()
            for process in self._processes.values():
                process.orders.close()
                os.close(process.pidfd)
            threading.Thread(target=self._beat, args=(rank,), name="capricorn-beat", daemon=True).start()
            code = run_forked(self._job, ForkedPlace(self._job, rank, self._attempt, self._endpoint), orders)
        except BaseException as error:  # noqa: BLE001 - the process ends here, and says in the log why
            traceback.print_exception(error)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            # Threads of a process group that lost a peer may never join; the state they served is in the store.
            os._exit(code)

    def _beat(self, rank: int) -> None:
        """In a rank's process: shows that it is not frozen, as long as it is not."""
        while True:
            self._beats[rank - self._ranks.start] = time.monotonic()
            time.sleep(BEAT_S)

    def _hear(self, process: _Rank) -> None:
        """A rank has left its attempt, of its own accord or because it was told to."""
        try:
            message = process.orders.recv(_MESSAGE_BYTES)
        except ConnectionError:
            message = b""
        if not message:  # its end is told by its pidfd
            self._selector.unregister(process.orders)
            return
        process.has_left, process.leave_by = True, None
        if process.attempt == self._attempt:
            self._tell(rank=process.rank, attempt=process.attempt, code=FAILED)
        else:
            self._send_on(process)

    def _send_on(self, process: _Rank) -> None:
        with contextlib.suppress(ConnectionError):  # it has just ended, of which its pidfd tells; it is forked anew
            process.orders.send(str(self._attempt).encode())
            process.has_left, process.attempt = False, self._attempt

    def _reap(self, process: _Rank) -> None:
        """A rank's process has ended: if it was of an attempt that is over, it is forked anew for that of now."""
        del self._processes[process.rank]
        for end in (process.orders, process.pidfd):
            if end in self._selector.get_map():
                self._selector.unregister(end)
        process.orders.close()
        os.close(process.pidfd)
        _, status = os.waitpid(process.pid, 0)
        if process.attempt == self._attempt:
            self._tell(rank=process.rank, attempt=process.attempt, code=os.waitstatus_to_exitcode(status))
        else:
            self._fork(process.rank)

    def _watch(self) -> None:
        """Kills ranks that do not leave in time or are frozen, which `_reap` then hears of; shows that we live."""
        now_s = time.monotonic()
        for process in self._processes.values():
            is_late = process.leave_by is not None and now_s > process.leave_by
            is_frozen = now_s - self._beats[process.rank - self._ranks.start] > self._frozen_s
            if is_frozen and not process.is_killed:
                self._tell(rank=process.rank, attempt=process.attempt, frozen_s=self._frozen_s)
            if (is_late or is_frozen) and not process.is_killed:
                process.is_killed = True
                os.kill(process.pid, signal.SIGKILL)
        if now_s - self._told_s > BEAT_S:
            self._tell()

    def _tell(self, **facts: Any) -> None:
        self._told_s = time.monotonic()
        self._link.send(json.dumps(facts).encode())

    def _stop(self) -> None:
        """Ends all ranks, by force those that take too long."""
        for process in self._processes.values():
            os.kill(process.pid, signal.SIGTERM)
            process.orders.close()
        end_s = time.monotonic() + STOP_S
        for process in self._processes.values():
            if not select.select([process.pidfd], [], [], max(0.0, end_s - time.monotonic()))[0]:
                os.kill(process.pid, signal.SIGKILL)
            os.waitpid(process.pid, 0)


def _end(signum: int, frame: object) -> None:
    raise SystemExit(f"signal {signum}")
