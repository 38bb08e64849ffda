"""What one process may conclude about another, with real processes that live for a moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from capricorn import process as process_module
from capricorn.process import (
    AwakeClock,
    deferred_sigterm,
    die_with_parent,
    is_stopped,
    kill_child,
    start_ticks,
    thread_states,
)
from tests.support.runs import polls

DEADLINE_S = 20.0


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as child:
        yield child
        child.kill()


# --- who is my parent


def end_of_child(parent: int) -> int:
    """The exit code of a child of this process that takes that one for its parent."""
    if (pid := os.fork()) == 0:
        die_with_parent(parent)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_child_lives_while_its_parent_is_who_started_it() -> None:
    assert end_of_child(os.getpid()) == 0


@pytest.mark.parametrize("parent", [1, 2**22])
def test_a_child_whose_parent_has_gone_before_it_looked_ends(parent: int) -> None:
    assert end_of_child(parent) == -signal.SIGKILL


def test_a_child_ends_with_its_parent() -> None:
    reading, writing = os.pipe()
    if (parent := os.fork()) == 0:
        me = os.getpid()
        if os.fork() == 0:
            os.close(reading)
            die_with_parent(me)
            os.write(writing, b"1")
            signal.pause()
        os.close(writing)
        signal.pause()
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert pipe.read(1) == b"1"
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        assert pipe.read() == b"", "it ends when nobody has the other end any more"


# --- who was asleep


def test_time_in_which_nobody_looked_counts_as_short() -> None:
    now_s = 100.0
    clock = AwakeClock(0.5, lambda: now_s)
    assert clock() == 0.0
    for gap_s, awake_s in [(0.25, 0.25), (0.5, 0.75), (3600.0, 1.25), (0.0, 1.25), (0.25, 1.5)]:
        now_s += gap_s
        assert clock() == awake_s


def test_a_stopped_process_is_known_from_one_that_sleeps(sleeper: subprocess.Popen[bytes]) -> None:
    assert any(thread_states(sleeper.pid) == "S" for _ in polls(DEADLINE_S))
    sleeper.send_signal(signal.SIGSTOP)
    assert any(is_stopped(thread_states(sleeper.pid)) for _ in polls(DEADLINE_S))


def test_each_thread_has_a_state() -> None:
    end = threading.Event()
    before = len(thread_states(os.getpid()))
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        assert len(thread_states(os.getpid())) == before + 1
    finally:
        end.set()
        thread.join()


def test_a_process_that_has_ended_has_no_state() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert thread_states(child.pid) == ""
    with pytest.raises(ProcessLookupError):
        start_ticks(child.pid)


# --- who is it


def test_the_start_of_a_process_is_the_same_whenever_it_is_asked(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = start_ticks(sleeper.pid)
    monkeypatch.setattr("time.time", lambda: 0.0)
    assert start_ticks(sleeper.pid) == before >= start_ticks(os.getpid())


def test_a_name_with_brackets_and_spaces_is_no_part_of_what_is_read() -> None:
    code = "import ctypes, sys; ctypes.CDLL(None).prctl(15, b') R (x'); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert any(thread_states(child.pid) == "S" for _ in polls(DEADLINE_S))
        assert start_ticks(child.pid) > 1000


# --- waits that end


class Undead:
    """A child that no signal ends."""

    pid = 0

    def kill(self) -> None:
        pass

    def wait(self, timeout: float | None = None) -> int:
        assert timeout is not None, "it would be waited for for ever"
        raise subprocess.TimeoutExpired("undead", timeout)


def test_a_child_that_does_not_end_though_it_was_killed_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    kill_child(Undead(), "the writer")
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("note: the writer (process 0) does not end")


def test_a_child_is_killed_and_waited_for(
    sleeper: subprocess.Popen[bytes], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "KILL_TIMEOUT_S", DEADLINE_S)
    for _ in range(2):
        kill_child(sleeper, "the sleeper")
        assert sleeper.returncode == -signal.SIGKILL
    assert capfd.readouterr().err == ""


# --- signals


class ToldError(Exception):
    """SIGTERM came."""


def test_sigterm_waits_until_what_must_not_be_cut_is_over_also_with_other_threads() -> None:
    def tell(signum: int, frame: object) -> None:
        raise ToldError

    end = threading.Event()
    other = threading.Thread(target=end.wait)  # to which the kernel may hand the signal
    other.start()
    before, done = signal.signal(signal.SIGTERM, tell), []
    try:
        with pytest.raises(ToldError), deferred_sigterm(), deferred_sigterm():
            done.append(os.kill(os.getpid(), signal.SIGTERM))
        assert done
        with deferred_sigterm():
            pass
    finally:
        signal.signal(signal.SIGTERM, before)
        end.set()
        other.join()


def test_a_block_on_another_thread_is_run_as_it_is() -> None:
    done: list[int] = []

    def act() -> None:
        with deferred_sigterm():
            done.append(1)

    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
    assert done
