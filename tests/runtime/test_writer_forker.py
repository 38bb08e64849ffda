"""Writers of the persistent tier that are forked: watched, ended and replaced like those that are started afresh."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from capricorn.process import PolledChild
from capricorn.runtime.persist.messages import Answer, Order, WriterTask
from capricorn.runtime.persist.writer_forker import FORKER_NAME, WriterForker
from capricorn.runtime.persist.writer_process import WRITER_NAME, WriterStarter, spawn_writer
from tests.support.processes import children_of, command_of, name_of
from tests.support.runs import polls
from tests.support.spawn import CONTEXT

PATIENCE_S = 60.0


def task_in(folder: Path) -> WriterTask:
    """Of a writer that finds no layout, and says so of each order."""
    return WriterTask(
        run_id="run",
        attempt=0,
        rank=0,
        num_nodes=1,
        ranks_per_node=1,
        model="",
        root=folder,
        layout=folder / "no-layout",
        keep=1,
        timeout_s=1.0,
    )


class Lines:
    """A writer with the near ends of its pipes."""

    def __init__(self, start: WriterStarter, folder: Path) -> None:
        orders, near = os.pipe()
        self._answers, answers = os.pipe()
        self.process: PolledChild = start(task_in(folder), (orders, answers))
        os.close(orders)
        os.close(answers)
        self.orders: IO[str] = os.fdopen(near, "w")
        self.answers: IO[str] = os.fdopen(self._answers)

    def ask(self) -> str:
        """Gives it an order and returns its answer; nothing if it has ended."""
        print(Order(iteration=3, slot=Path("slot")).model_dump_json(), file=self.orders, flush=True)
        line = self.answers.readline()
        return Answer.model_validate_json(line).failure if line else ""

    def close(self) -> None:
        self.orders.close()
        self.answers.close()


def in_a_process(fn: Any, folder: Path) -> dict[str, Any]:
    """Returns what the function returns in a process that has a single thread, as a rank at its birth."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_run, args=(fn, folder, theirs))
    process.start()
    theirs.close()
    try:
        assert ours.poll(PATIENCE_S), "no result"
        result: dict[str, Any] = ours.recv()
        return result
    finally:
        process.kill()
        process.join()


def _run(fn: Any, folder: Path, result: Any) -> None:
    result.send(fn(folder))


def use_two_writers(folder: Path) -> dict[str, Any]:
    forker = WriterForker()
    with ExitStack() as stack:
        first, second = (stack.enter_context(closing(Lines(forker.start, folder))) for _ in range(2))
        answers = [first.ask(), second.ask()]
        names = sorted(map(name_of, children_of(os.getpid())))
        both_run = [first.process.poll(), second.process.poll()]
        with pytest.raises(subprocess.TimeoutExpired):
            first.process.wait(0.01)
        first.process.kill()
        killed = first.process.wait(PATIENCE_S), first.process.poll()
        first.process.kill()  # an end once more is no error
        second.orders.close()
        return {
            "answers": answers,
            "names": names,
            "both run": both_run,
            "killed": killed,
            "without orders": second.process.wait(PATIENCE_S),
            "left": list(map(name_of, children_of(os.getpid()))),
        }


def test_a_forked_writer_is_watched_and_ended_like_one_that_is_started_afresh(tmp_path: Path) -> None:
    seen = in_a_process(use_two_writers, tmp_path)
    for answer in seen.pop("answers"):
        assert "no-layout" in answer
    assert seen == {
        "names": sorted([FORKER_NAME, WRITER_NAME, WRITER_NAME]),
        "both run": [None, None],
        "killed": (-signal.SIGKILL, -signal.SIGKILL),
        "without orders": 0,
        "left": [FORKER_NAME],
    }


def forker_of(rank: int) -> psutil.Process:
    return next(child for child in children_of(rank, recursive=False) if name_of(child) == FORKER_NAME)


def lose_the_forker(folder: Path, number: signal.Signals) -> dict[str, Any]:
    forker = WriterForker()
    with closing(Lines(forker.start, folder)) as before:
        before.ask()
        forker_of(os.getpid()).send_signal(number)
        with closing(Lines(forker.start, folder)) as after:
            answer = after.ask()
            after.process.kill()
            code = after.process.wait(PATIENCE_S)
            return {"answer": answer, "is afresh": isinstance(after.process, subprocess.Popen), "code": code}


def lose_it_to_a_kill(folder: Path) -> dict[str, Any]:
    return lose_the_forker(folder, signal.SIGKILL)


def lose_it_to_a_stop(folder: Path) -> dict[str, Any]:
    return lose_the_forker(folder, signal.SIGSTOP)


@pytest.mark.parametrize("lose", [lose_it_to_a_kill, pytest.param(lose_it_to_a_stop, marks=pytest.mark.slow)])
def test_where_writers_cannot_be_forked_they_are_started_afresh(tmp_path: Path, lose: Any) -> None:
    seen = in_a_process(lose, tmp_path)
    assert "no-layout" in seen.pop("answer")
    assert seen == {"is afresh": True, "code": -signal.SIGKILL}


def end_with_its_forker(folder: Path) -> dict[str, Any]:
    forker = WriterForker()
    with closing(Lines(forker.start, folder)) as writer:
        writer.ask()
        forker_of(os.getpid()).kill()
        return {"code": writer.process.wait(PATIENCE_S), "again": writer.process.poll()}


def test_a_writer_ends_with_its_forker(tmp_path: Path) -> None:
    assert in_a_process(end_with_its_forker, tmp_path) == {"code": -signal.SIGKILL, "again": -signal.SIGKILL}


PROGRAM = """
import os, sys, time
from pathlib import Path
from capricorn.runtime.persist.writer_forker import WriterForker
from tests.runtime.test_writer_forker import Lines
writer = Lines(WriterForker().start, Path(sys.argv[1]))
writer.ask()
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_forker_and_writers_end_with_their_rank_however_it_ends(tmp_path: Path, number: signal.Signals) -> None:
    rank = subprocess.Popen([sys.executable, "-c", PROGRAM, tmp_path], stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    assert rank.stdout.readline() == "ready\n"
    children = children_of(rank.pid)
    assert sorted(map(name_of, children)) == [FORKER_NAME, WRITER_NAME]
    rank.send_signal(number)
    rank.wait()
    next(None for _ in polls(PATIENCE_S) if not any(map(command_of, children)))


@pytest.mark.slow
def test_a_writer_that_is_started_afresh_has_a_name_and_answers(tmp_path: Path) -> None:
    with closing(Lines(spawn_writer, tmp_path)) as writer:
        assert "no-layout" in writer.ask()
        assert list(map(name_of, children_of(os.getpid(), recursive=False))).count(WRITER_NAME) == 1
        writer.orders.close()
        assert writer.process.wait(PATIENCE_S) == 0
