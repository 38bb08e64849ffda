"""Who ends with whom, who counts as hung, and who takes the place of what has ended: with all the real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from capricorn.emulation.testbed import NAMESPACES, PACED, USER_NAMESPACES
from capricorn.records.samples import EventSample
from tests.support.namespaces import CLUSTER, refusal
from tests.support.processes import children_of, command_of
from tests.support.runs import LiveRun, Run, assert_ok, assert_same_losses, polls, run

pytestmark = pytest.mark.timeout(300)

SLOW = pytest.mark.slow
SHORT = ("--iterations", "8", "--warmup", "2")
TORCHRUN = ("--set", "launch.restart=torchrun")
NEW_PIDS = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
CHILD_OF_1 = (*NEW_PIDS, "sh", "-c", '"$@"; exit $?', "sh")


def failures(events: list[EventSample]) -> list[str]:
    return [event.detail for event in events if event.event == "failed"]


def pid_of(live: LiveRun, rank: int) -> int:
    started = [event for event in live.events() if event.event == "started" and event.rank == rank]
    return int(started[-1].detail.removeprefix("pid "))


def wait_until_it_trains(live: LiveRun) -> None:
    """Also where torchrun starts the ranks on a busy machine, as each of its processes imports torch anew."""
    live.wait(lambda: any(sample.iteration >= 5 for sample in live.samples()), "iteration 5", deadline_s=150.0)


def child(live: LiveRun, module: str) -> psutil.Process:
    """The process of a run that is started with that module and serves the launcher."""
    found = [each for each in children_of(live.process.pid, recursive=False) if module in command_of(each)]
    return found[0]


def assert_one_line(ended: Run, *words: str) -> None:
    assert ended.exit_code == 1, ended.stderr
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("error: "), ended.stderr
    assert all(word in last for word in words), last
    assert "Traceback" not in ended.stderr


# --- process 1 of a container


def refusal_of_new_pids() -> str:
    done = subprocess.run([*NEW_PIDS, "true"], capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else ""


@pytest.mark.parametrize(
    "prefix", [pytest.param(NEW_PIDS, id="as 1"), pytest.param(CHILD_OF_1, id="under 1", marks=SLOW)]
)
@pytest.mark.parametrize(
    "mode", [USER_NAMESPACES, *(pytest.param(way, marks=SLOW) for way in ("torchrun", NAMESPACES, PACED))]
)
def test_a_launcher_may_be_process_1_or_its_child_however_it_starts_others(
    mode: str, prefix: tuple[str, ...], tmp_path: Path
) -> None:
    if reason := refusal_of_new_pids():
        pytest.skip(reason)
    options = TORCHRUN
    if mode != "torchrun":
        if mode != PACED and (reason := refusal(unprivileged=mode == USER_NAMESPACES)):
            pytest.skip(reason)
        (tmp_path / "small.toml").write_text(CLUSTER)
        options = ("--cluster", str(tmp_path / "small.toml"), "--set", f"cluster.links={mode}")
    ended = run(tmp_path / "out", *SHORT, *options, prefix=prefix)
    verdict = ended.record["verdict"]
    assert verdict == "ok" or verdict.startswith("invalid: "), ended.stderr  # a busy machine may not keep the pace
    assert ended.summary["iterations"] == 8
    assert not failures(ended.events)


# --- a pause of the whole job, and of one rank


def stop(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


@pytest.mark.parametrize(
    "is_training", [pytest.param(True, id="while it trains"), pytest.param(False, id="while it starts", marks=SLOW)]
)
def test_a_pause_of_the_whole_job_is_nobodys_fault(is_training: bool, tmp_path: Path, reference: Run) -> None:
    with LiveRun(tmp_path, "--iterations", "30", "--set", "launch.frozen_s=1") as live:
        if is_training:
            wait_until_it_trains(live)
        else:
            live.wait(lambda: any(event.event == "started" for event in live.events()), "the start of a rank")
        processes = live.processes()
        stop(processes, signal.SIGSTOP)
        time.sleep(3.0)
        # Those who judge come first, and hear nothing yet from those who are judged.
        ranks = [each for each in processes if each.pid in {pid_of(live, event.rank) for event in live.events()}]
        stop([each for each in processes if each not in ranks], signal.SIGCONT)
        time.sleep(0.3)
        stop(ranks, signal.SIGCONT)
        ended = live.finish()
    assert_ok(ended)
    assert not failures(ended.events)
    assert not ended.resumed
    assert_same_losses(ended, reference)


# --- what the nodes and ranks stand on


def test_a_rendezvous_store_that_dies_is_there_again_for_the_next_restart(tmp_path: Path, reference: Run) -> None:
    with LiveRun(tmp_path, "--iterations", "30") as live:
        wait_until_it_trains(live)
        server = child(live, "fork_server")
        agents = {psutil.Process(pid_of(live, rank)).ppid() for rank in (0, 1)}
        (store,) = (each for each in children_of(server.pid, recursive=False) if each.pid not in agents)
        store.kill()
        live.wait(lambda: any(event.event == "replaced" for event in live.events()), "the new store")
        os.kill(pid_of(live, 1), signal.SIGKILL)
        ended = live.finish()
    assert_ok(ended)
    assert failures(ended.events)[-1:] == ["killed by signal 9"] or "killed by signal 9" in failures(ended.events)
    assert len(ended.recoveries) == 1
    assert_same_losses(ended, reference)


@pytest.mark.slow
def test_a_fork_server_that_is_stopped_is_replaced_when_it_is_needed(tmp_path: Path, reference: Run) -> None:
    with LiveRun(tmp_path, "--iterations", "60") as live:
        wait_until_it_trains(live)
        child(live, "fork_server").suspend()
        psutil.Process(psutil.Process(pid_of(live, 1)).ppid()).kill()
        ended = live.finish()
    assert_ok(ended)
    assert_same_losses(ended, reference)
    assert "is stopped, and was ended; another one takes its place" in ended.stderr


def kill_store(live: LiveRun) -> None:
    child(live, "launch.rendezvous").kill()


def stop_store(live: LiveRun) -> None:
    child(live, "launch.rendezvous").suspend()


@pytest.mark.slow
@pytest.mark.parametrize("act", [kill_store, stop_store])
def test_torchruns_rendezvous_store_ends_the_run_with_it(act: Callable[[LiveRun], None], tmp_path: Path) -> None:
    with LiveRun(tmp_path, "--iterations", "5000", "-q", *TORCHRUN) as live:
        wait_until_it_trains(live)
        act(live)
        ended = live.finish(deadline_s=40)
    assert_one_line(ended, "the rendezvous store", "has ended: killed by signal 9")


@pytest.mark.slow
def test_an_agent_of_torchrun_that_is_stopped_is_replaced(tmp_path: Path) -> None:
    with LiveRun(tmp_path, "--iterations", "600", *TORCHRUN) as live:
        wait_until_it_trains(live)
        psutil.Process(psutil.Process(pid_of(live, 1)).ppid()).suspend()
        ended = live.finish(deadline_s=200)
    assert_ok(ended)
    (recovery,) = ended.recoveries
    assert recovery.lost_iterations <= 1


# --- deaths that come together, or in between


@pytest.mark.slow
def test_a_rank_that_dies_while_the_others_leave_and_one_that_dies_at_its_start(tmp_path: Path, reference: Run) -> None:
    with LiveRun(tmp_path, "--iterations", "30") as live:
        wait_until_it_trains(live)
        first, second = pid_of(live, 0), pid_of(live, 1)
        os.kill(first, signal.SIGKILL)
        for _ in polls(20.0):
            if not psutil.pid_exists(first):
                break
        with contextlib.suppress(ProcessLookupError):
            os.kill(second, signal.SIGKILL)
        live.wait(lambda: pid_of(live, 0) != first, "the successor")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid_of(live, 0), signal.SIGKILL)
        ended = live.finish()
    assert_ok(ended)
    assert max(recovery.lost_iterations for recovery in ended.recoveries) <= 1
    assert_same_losses(ended, reference)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), TORCHRUN], ids=["forked", "torchrun"])
def test_the_error_of_a_run_names_the_rank_that_died_and_not_what_the_others_saw(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    with LiveRun(tmp_path, "--iterations", "5000", "-q", "--set", "launch.max_restarts=0", *options) as live:
        wait_until_it_trains(live)
        os.kill(pid_of(live, 1), signal.SIGKILL)
        ended = live.finish(deadline_s=60)
    assert_one_line(ended, "gave up: rank 1")
