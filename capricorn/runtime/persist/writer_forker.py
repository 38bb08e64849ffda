"""Forks the writers of one rank of the persistent tier, attempt after attempt, so that none has to import torch.

The rank forks the forker at its own birth, before it starts any thread; the forker runs nothing, and is the parent of
each writer. A rank that was not forked itself starts its writers afresh, see `writer_process`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import traceback
from collections.abc import Sequence
from typing import Final, NoReturn

from capricorn.errors import note_once
from capricorn.process import PolledChild, die_with_parent, name_process
from capricorn.runtime.persist.messages import ForkerAnswer, ForkerRequest, WriterTask
from capricorn.runtime.persist.writer_process import WRITER_NAME, run_writer, spawn_writer
from capricorn.units import Seconds

FORKER_NAME: Final = "persist-forker"
"""The name of the process, as `ps` and `top` show it."""
ANSWER_S: Final[Seconds] = 3.0
"""How long the forker may take to answer, which does nothing that could take long."""
_MAX_BYTES: Final = 1 << 16


class WriterForker:
    """The rank's side of it: has writers forked and reaped."""

    def __init__(self) -> None:
        """Forks the forker, before this process has any thread but its main one."""
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(ANSWER_S)
        rank = os.getpid()
        if os.fork() == 0:
            _become_forker(theirs, rank)
        theirs.close()

    def start(self, task: WriterTask, ends: Sequence[int]) -> PolledChild:
        """Has a writer forked, or starts one afresh if the forker is gone; see `writer_process.WriterStarter`."""
        try:
            return ForkedWriter(self, self._ask(ForkerRequest(task=task), ends).number)
        except OSError as error:
            self._channel.close()  # what comes too late must not be taken for another answer
            note_once(f"no writer of the persistent tier can be forked ({error}): each has to import torch")
            return spawn_writer(task, ends)

    def reap(self, pid: int) -> int:
        """Returns the exit code of a writer that has ended, negative for the signal that ended it."""
        try:
            return self._ask(ForkerRequest(reap=pid)).number
        except OSError:  # the forker is gone, and all writers have ended with it
            return -signal.SIGKILL

    def _ask(self, request: ForkerRequest, fds: Sequence[int] = ()) -> ForkerAnswer:
        socket.send_fds(self._channel, [request.model_dump_json().encode()], fds)
        if not (answer := self._channel.recv(_MAX_BYTES)):
            raise ConnectionResetError("their parent has ended")
        return ForkerAnswer.model_validate_json(answer)


class ForkedWriter:
    """A writer that was forked, with what `subprocess.Popen` has to watch and end a process."""

    def __init__(self, forker: WriterForker, pid: int) -> None:
        self.pid, self._forker = pid, forker
        self._pidfd = os.pidfd_open(pid)  # until it is reaped, its number means no other process
        self._code: int | None = None

    def kill(self) -> None:
        if self._code is None:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def poll(self) -> int | None:
        """Returns the exit code, None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: Seconds | None = None) -> int:
        """Returns the exit code; raises `subprocess.TimeoutExpired` if it has not ended by then."""
        if self._code is None:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(WRITER_NAME, timeout or 0)
            self._code = self._forker.reap(self.pid)
            os.close(self._pidfd)
        return self._code


def _become_forker(channel: socket.socket, rank: int) -> NoReturn:
    """Turns a forked process into the forker, and ends it with the rank."""
    try:
        die_with_parent(rank)
        name_process(FORKER_NAME)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # that of a terminal is for the trainer
        _let_go_of_all_but(channel)
        while True:
            message, fds, _, _ = socket.recv_fds(channel, _MAX_BYTES, 2)
            if not message:
                break
            request = ForkerRequest.model_validate_json(message)
            number = _fork(request.task, fds, channel) if request.task else _reap(request.reap)
            channel.send(ForkerAnswer(number=number).model_dump_json().encode())
    except BaseException as error:  # noqa: BLE001 - the process ends here, and says in the log why
        traceback.print_exception(error)
    finally:
        os._exit(0)


def _let_go_of_all_but(channel: socket.socket) -> None:
    """Closes what else the rank has open, so that its end is seen at once; only errors are still printed."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.closerange(3, channel.fileno())
    os.closerange(channel.fileno() + 1, os.sysconf("SC_OPEN_MAX"))


def _fork(task: WriterTask, ends: Sequence[int], channel: socket.socket) -> int:
    """Returns the pid of a new writer with these descriptors."""
    forker, pid = os.getpid(), os.fork()
    if pid == 0:
        code = 1
        try:
            channel.close()
            orders, answers = ends
            run_writer(task, orders, answers, forker)
            code = 0
        except BaseException as error:  # noqa: BLE001 - as above
            traceback.print_exception(error)
        finally:
            os._exit(code)
    for end in ends:
        os.close(end)
    return pid


def _reap(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
