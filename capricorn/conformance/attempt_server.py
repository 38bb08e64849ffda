"""The process that forks the ranks of one attempt after another. It has torch imported, so each is at work at once.

It is told by a line of JSON what the ranks do, watches them until all have ended or stand still, kills them, and
answers with a line of JSON what each has told and which processes have outlived them. Its end ends all of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeAlias

import psutil
import torch
import torch.distributed as dist

from capricorn.conformance.subject import SystemUnderTest
from capricorn.conformance.toy_job import NUM_RANKS
from capricorn.conformance.traces import children_of, describe, polls
from capricorn.process import die_with_parent
from capricorn.systems.registry import load_system
from capricorn.units import Seconds

PR_SET_CHILD_SUBREAPER: Final = 36
ENDED: Final = "ended"
WRITE_S: Final[Seconds] = 0.2
"""For a few lines."""

Facts: TypeAlias = dict[str, Any]
RankFunction: TypeAlias = Callable[..., Iterator[Facts]]


def main() -> None:
    """Answers each line of stdin with one on stdout until stdin is closed; argv[1] is the parent."""
    die_with_parent(int(sys.argv[1]))
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # what a killed rank leaves behind becomes ours to end
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a system prints is no answer
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page it shares with us
    for line in sys.stdin:
        answers.write(json.dumps(_answer(json.loads(line))) + "\n")
        answers.flush()


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        subject = SystemUnderTest.model_validate(request["subject"])
        load_system(subject.system)
        module, _, name = request["function"].partition(":")
        function: RankFunction = getattr(import_module(module), name)
    except Exception as error:  # noqa: BLE001 - the module of a system may raise what it likes
        return {"error": f"{type(error).__name__}: {error}"}
    with TemporaryDirectory() as results:
        run = partial(function, folder=Path(request["folder"]), subject=subject, **request["arguments"])
        attempt = _Attempt(run, subject, Path(request["folder"]), Path(results))
        try:
            late = attempt.wait(request["deadline_s"])
        finally:
            outlived = attempt.end()
        return {"ranks": [attempt.told(rank, late) for rank in range(NUM_RANKS)], "outlived": outlived}


class _Attempt:
    """The ranks of one attempt, forked when this is made."""

    def __init__(self, run: RankFunction, subject: SystemUnderTest, folder: Path, results: Path) -> None:
        self._run, self._subject, self._folder, self._results = run, subject, folder, results
        self._pids: list[int] = []
        self._statuses: dict[int, int] = {}
        server = os.getpid()
        for rank in range(NUM_RANKS):
            if (pid := os.fork()) == 0:
                self._become(rank, server)
            self._pids.append(pid)

    def wait(self, deadline_s: Seconds) -> list[int]:
        """Returns once every rank has ended or stands still, or with those that have not by the deadline."""
        for _ in polls(deadline_s):
            self._reap()
            if not self._late():
                break
            if select.select([0], [], [], 0)[0]:  # nobody waits for the answer any more
                sys.exit()
        return self._late()

    def end(self) -> list[str]:
        """Kills the ranks; says which of their processes do not end by themselves after that, and kills these."""
        for rank in self._late():
            os.kill(self._pids[rank], signal.SIGUSR1)  # it writes down where it is
        time.sleep(WRITE_S if self._late() else 0)
        for pid in self._pids:
            if pid not in self._statuses or os.WIFSTOPPED(self._statuses[pid]):
                os.kill(pid, signal.SIGKILL)
        for _ in polls(self._subject.patience_s):
            self._reap()
            if not psutil.Process().children(recursive=True):
                break
        left = children_of(os.getpid())
        said = list(map(describe, left))
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended in between
                process.kill()
        return said

    def told(self, rank: int, late: list[int]) -> Facts:
        """What a rank has told until it ended, and in `error` why it ended early."""
        file = self._results / f"rank{rank}"
        facts: Facts = {}
        for line in file.read_text().splitlines() if file.exists() else ():
            facts |= json.loads(line)
        if rank in late:
            facts["error"] = f"rank {rank} did not come to an end in time: it is in {self._place_of(rank)}"
        elif not facts.pop(ENDED, False) and "error" not in facts:
            facts["error"] = f"rank {rank} was ended by {self._end_of(rank)}"
        return facts

    def _place_of(self, rank: int) -> str:
        file = self._results / f"place{rank}"
        lines = file.read_text().splitlines() if file.exists() else []
        return next((line.strip() for line in lines if line.startswith("  File")), "no Python code")

    def _end_of(self, rank: int) -> str:
        status = self._statuses[self._pids[rank]]
        if os.WIFEXITED(status):
            return f"exit code {os.WEXITSTATUS(status)}"
        return signal.Signals(os.WSTOPSIG(status) if os.WIFSTOPPED(status) else os.WTERMSIG(status)).name

    def _late(self) -> list[int]:
        return [rank for rank, pid in enumerate(self._pids) if pid not in self._statuses]

    def _reap(self) -> None:
        """Takes note of the ranks that have ended or stand still, and lets orphans that have ended go."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._statuses[pid] = status

    def _become(self, rank: int, server: int) -> None:
        """Turns a forked process into a rank, and kills it when that has ended, as no clean-up must follow."""
        try:
            die_with_parent(server)
            self._redirect(rank)
            faulthandler.register(signal.SIGUSR1, (self._results / f"place{rank}").open("w"), all_threads=False)
            with (self._results / f"rank{rank}").open("a", buffering=1) as out:
                for facts in self._facts(rank):
                    out.write(json.dumps(facts) + "\n")
        finally:
            os.kill(os.getpid(), signal.SIGKILL)

    def _redirect(self, rank: int) -> None:
        """Leaves the rank a place of its own for files that it makes anywhere, and for what it prints."""
        tempfile.tempdir = str(self._folder / "tmp")
        os.chdir(tempfile.tempdir)
        place = {"MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": "0", "TMPDIR": tempfile.tempdir}
        os.environ |= place | self._subject.environment
        output = os.open(self._results / f"output{rank}", os.O_WRONLY | os.O_CREAT)
        for descriptor, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
            os.dup2(descriptor, target)

    def _facts(self, rank: int) -> Iterator[Facts]:
        limit = timedelta(seconds=4 * self._subject.timeout_s)
        store = f"file://{self._results}/store"
        try:
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=NUM_RANKS, timeout=limit)
            yield from self._run(rank)
            yield {ENDED: True}
        except BaseException as error:  # noqa: BLE001 - told to the rules; the process ends after that
            yield {"error": f"rank {rank}: {type(error).__name__}: {error}", "traceback": traceback.format_exc()}


if __name__ == "__main__":
    main()
