"""Injected failures of processes, links and disks: what they do, and how it is undone."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from capricorn.config.fault_kinds import DISK_FRAC
from capricorn.emulation.fabric import NamespaceEntry, Shape
from capricorn.emulation.paced_link import Link, create_links
from capricorn.emulation.reshape import reshape
from capricorn.emulation.shaping import INTERFACE, cutting, mending, slowing
from capricorn.emulation.testbed import Loopback
from capricorn.errors import CapricornError, ConfigError
from capricorn.faults import filler_file
from capricorn.faults import memory_cgroup as cgroup
from capricorn.faults.context import FaultContext, cgroup_name
from capricorn.faults.helper_process import start_helper
from capricorn.faults.inject import inject, prepare
from capricorn.faults.process_registry import register_worker, registered
from capricorn.faults.revert import Reverter
from capricorn.records.job_file import Job
from capricorn.records.samples import EventSample
from tests.support.fault_jobs import DEADLINE_S, fault, in_child, make_job
from tests.support.mounts import tmpfs
from tests.support.namespaces import fabric, output, start
from tests.support.processes import commands
from tests.support.runs import polls

# --- processes


def test_a_stopped_worker_goes_on_after_its_time_and_not_before(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    pid = os.fork()
    if pid == 0:
        register_worker(job.run_dir, 1)
        inject(fault("stop@rank=1,iteration=3"), FaultContext(job, 1))
        os._exit(7)
    assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
    names = registered(job.run_dir, 1)
    assert names is not None
    assert (names.worker.pid, names.agent.pid) == (pid, os.getpid())
    reverter = Reverter(job, Loopback())
    reverter.on_event(event_of("stop@rank=1,iteration=3"))  # for good
    reverter.tick()
    assert os.waitpid(pid, os.WNOHANG | os.WUNTRACED) == (0, 0)
    reverter.on_event(event_of("stop@rank=1,iteration=3,seconds=0.01"))
    for _ in polls(DEADLINE_S):
        reverter.tick()
        if (ended := os.waitpid(pid, os.WNOHANG))[0]:
            break
    assert os.waitstatus_to_exitcode(ended[1]) == 7


def test_a_paused_run_goes_on_together_and_the_launcher_has_stood_still_as_long(tmp_path: Path) -> None:
    job = make_job(tmp_path).model_copy(update={"launcher": os.getpid()})
    pause = "pause@iteration=3,seconds=0.2"
    with subprocess.Popen(["sleep", "60"]) as other:
        pid = os.fork()
        if pid == 0:
            inject(fault(pause), FaultContext(job, 0))
            os._exit(7)
        for stopped in (pid, other.pid):
            assert os.WIFSTOPPED(os.waitpid(stopped, os.WUNTRACED)[1])
        began_s = time.monotonic()
        Reverter(job, Loopback()).on_event(event_of(pause))
        assert time.monotonic() - began_s >= 0.2
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert psutil.Process(other.pid).status() != psutil.STATUS_STOPPED
        other.kill()


@pytest.mark.parametrize(("where", "is_there"), [("killed", False), ("stopped", True)])
def test_a_fork_server_is_taken_away_with_a_node_and_a_stopped_one_goes_on_at_the_end(
    where: str, is_there: bool, tmp_path: Path
) -> None:
    job = make_job(tmp_path).model_copy(update={"launcher": os.getpid()})
    text = f"fork-server@node=1,iteration=3,where={where}"
    server = os.fork()
    if server == 0:  # it forks the agent, which forks the rank
        if os.fork() == 0 and os.fork() == 0:
            register_worker(job.run_dir, 1)
            inject(fault(text), FaultContext(job, 1))
        while True:
            signal.pause()
    _, status = os.waitpid(server, os.WUNTRACED)
    assert os.WIFSTOPPED(status) == is_there
    assert any(not job.node_dir(1).exists() for _ in polls(DEADLINE_S))
    if is_there:
        reverter = Reverter(job, Loopback())
        reverter.on_event(event_of(text))
        reverter.close()
        assert os.WIFCONTINUED(os.waitpid(server, os.WCONTINUED)[1])
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)


def event_of(text: str) -> EventSample:
    return EventSample(event="fault", at_s=0.0, attempt=0, rank=0, iteration=3, detail=text)


def test_the_kernel_kills_who_runs_out_of_its_cgroup_and_nothing_is_left_of_it(tmp_path: Path) -> None:
    if reason := cgroup.why_not():
        pytest.skip(reason)
    job = make_job(tmp_path)
    oom = "oom@rank=1,iteration=3"
    assert in_child(lambda: inject(fault(oom), FaultContext(job, 1))) == -signal.SIGKILL
    assert groups(job)
    reverter = Reverter(job, Loopback())
    reverter.on_event(event_of(oom))
    reverter.close()
    assert not groups(job)


@pytest.mark.parametrize("version", [1, 2])
def test_who_is_to_be_killed_for_memory_may_not_swap_and_who_is_to_swap_may(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, swap, usage = (
        ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else
        ("memory.max", "memory.swap.max", "memory.current")
    )  # fmt: skip
    group = tmp_path / ("memory" if version == 1 else "") / "group"
    monkeypatch.setattr(cgroup, "_ROOT", tmp_path)

    def limits(swaps: bool) -> tuple[int, str]:
        group.mkdir(parents=True, exist_ok=True)
        for name, content in ((limit, "max"), (swap, "max"), (usage, "1000"), ("cgroup.procs", "")):
            (group / name).write_text(content)
        if swaps:
            cgroup.swap_out(group)
        else:
            with pytest.raises(ConfigError, match="nothing happened"):  # as there is no kernel behind it
                cgroup.exhaust(group)
        assert (group / "cgroup.procs").read_text() == str(os.getpid())
        return int((group / limit).read_text()), (group / swap).read_text()

    most, both = limits(swaps=False)
    assert both == (str(most) if version == 1 else "0")
    assert limits(swaps=True) == (most, "max")


def groups(job: Job) -> list[Path]:
    return list(Path("/sys/fs/cgroup").rglob(cgroup_name(job, 1)))


def beside(job: Job, text: str) -> None:
    """Injects a fault of rank 1 beside which something goes on."""
    prepare(fault(text), FaultContext(job, 1))
    inject(fault(text), FaultContext(job, 1))


def test_a_port_squatter_takes_the_ports_of_a_dead_worker_and_goes_with_the_run(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    lock = (job.store_dir / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    taken = "port-taken@rank=1,iteration=3"
    assert in_child(lambda: beside(job, taken)) == -signal.SIGKILL
    listener.close()
    assert any(answers(port) for _ in polls(DEADLINE_S))
    reverter = Reverter(job, Loopback())
    reverter.on_event(event_of(taken))
    reverter.close()
    assert not answers(port)
    lock.close()


def test_a_port_squatter_goes_also_when_the_launcher_just_dies(tmp_path: Path) -> None:
    lock = (tmp_path / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    squatter = subprocess.Popen(
        [sys.executable, "-m", "capricorn.faults.port_squatter", str(tmp_path / "lock"), json.dumps([])],
        stdout=subprocess.PIPE,
    )
    assert squatter.stdout is not None
    with squatter.stdout:
        assert squatter.stdout.readline() == b"ready\n"
    assert squatter.poll() is None
    lock.close()
    assert squatter.wait(DEADLINE_S) == 0


@pytest.mark.parametrize(("program", "says"), [("", "has ended"), ("import time; time.sleep(600)", "did not start in")])
def test_a_helper_that_says_no_word_is_ended_and_named(
    program: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "silent_helper.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("capricorn.faults.helper_process.START_TIMEOUT_S", 0.2 if program else DEADLINE_S)
    with pytest.raises(CapricornError, match=f"^silent_helper {says}"):
        start_helper(make_job(tmp_path), "silent_helper")
    assert not [command for command in commands() if "silent_helper" in command]


def test_a_neighbours_stores_come_and_go_until_the_end_of_the_run_and_none_is_left(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    lock = (job.store_dir / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    text = "neighbour@rank=1,iteration=3,where=stores"
    assert in_child(lambda: beside(job, text)) == -signal.SIGKILL
    seen: set[str] = set()
    for _ in polls(DEADLINE_S, every_s=0.0):
        seen |= {path.name for path in tmp_path.glob("capricorn-neighbour-*")}
        if len(seen) > 1:
            break
    assert len(seen) > 1
    reverter = Reverter(job, Loopback())
    reverter.on_event(event_of(text))
    reverter.close()
    assert not [path for path in tmp_path.iterdir() if "neighbour" in path.name]
    lock.close()


def answers(port: int) -> bool:
    """Whether somebody there says something to whoever comes."""
    try:
        with socket.create_connection(("127.0.0.1", port), 5.0) as sock:
            return bool(sock.recv(16))
    except ConnectionError:
        return False


# --- clocks


@pytest.fixture
def paced(tmp_path: Path) -> Job:
    """A job whose links and storage are modelled."""
    job = make_job(tmp_path)
    cluster = job.scenario.cluster.model_copy(update={"links": "paced", "name": "small"})
    create_links(tmp_path / "links", dict.fromkeys(("out0", "in0", "out1", "in1"), 1e6))
    create_links(tmp_path / "storage", {"node0": 1e6, "total": 2e6})
    return job.model_copy(
        update={
            "scenario": job.scenario.model_copy(update={"cluster": cluster}),
            "links_dir": tmp_path / "links",
            "storage_dir": tmp_path / "storage",
        }
    )


def took(path: Path) -> float:
    """What a million bytes take on the link, alone; nothing is left booked."""
    link = Link(path)
    link.hold(0.0)
    start_s = link.reserve(0)
    duration_s = link.reserve(1_000_000) - start_s
    link.hold(0.0)
    link.close()
    return duration_s


@pytest.mark.parametrize("undo", ["time", "replaced"])
def test_a_slow_link_is_good_again_after_its_time_or_with_a_new_node(undo: str, paced: Job) -> None:
    text = f"slow-link@node=1,iteration=3,seconds={0.01 if undo == 'time' else 100}"
    inject(fault(text), FaultContext(paced, 1))
    out = paced.links_dir
    assert out is not None
    assert took(out / "out1") == pytest.approx(20.0, rel=0.01)
    assert took(out / "out0") == pytest.approx(1.0, rel=0.01)
    reverter = Reverter(paced, Loopback())
    reverter.on_event(event_of(text))
    if undo == "time":
        assert any(reverter.tick() or took(out / "out1") == pytest.approx(1.0, rel=0.1) for _ in polls(DEADLINE_S))
    else:
        reverter.tick()
        reverter.node_replaced(0)
        assert took(out / "out1") == pytest.approx(20.0, rel=0.01)
        reverter.node_replaced(1)
        assert took(out / "out1") == pytest.approx(1.0, rel=0.1)


def test_nothing_leaves_a_cut_node_until_it_is_replaced(paced: Job) -> None:
    text = "partition@node=1,iteration=3,seconds=0"
    inject(fault(text), FaultContext(paced, 1))
    assert paced.links_dir is not None
    link = Link(paced.links_dir / "out1")
    assert link.reserve(1) > time.monotonic() + 1000
    reverter = Reverter(paced, Loopback())
    reverter.on_event(event_of(text))
    reverter.node_replaced(1)
    assert link.reserve(1) < time.monotonic() + 1000
    link.close()


def test_a_slow_disk_takes_a_hundred_times_as_long_for_its_time(paced: Job) -> None:
    inject(fault("disk-slow@iteration=3"), FaultContext(paced, 0))
    assert paced.storage_dir is not None
    assert took(paced.storage_dir / "node0") == pytest.approx(1 / DISK_FRAC)
    assert took(paced.storage_dir / "total") == pytest.approx(0.5 / DISK_FRAC)
    reverter = Reverter(paced, Loopback())
    reverter.on_event(event_of("disk-slow@iteration=3,seconds=0.01"))
    assert any(reverter.tick() or took(paced.storage_dir / "node0") == pytest.approx(1.0) for _ in polls(DEADLINE_S))


@pytest.mark.parametrize(("kind", "folder"), [("disk-full", "files_dir"), ("records-full", "run_dir")])
def test_a_full_file_system_has_room_again_after_its_time(kind: str, folder: str, tmp_path: Path) -> None:
    job = make_job(tmp_path)
    with tmpfs("1M") as root:
        job = job.model_copy(update={folder: root})
        inject(fault(f"{kind}@iteration=3"), FaultContext(job, 0))
        assert not os.statvfs(root).f_bavail
        reverter = Reverter(job, Loopback())
        reverter.on_event(event_of(f"{kind}@iteration=3,seconds=0.01"))
        assert any(reverter.tick() or os.statvfs(root).f_bavail for _ in polls(DEADLINE_S))


def test_a_link_in_the_kernel_is_slowed_cut_and_mended_from_outside_its_node() -> None:
    rate = 25e6
    with fabric(Shape(2, rate, qos=True)) as built:
        node = built.enter_node(1)
        as_made = shaped(node)
        reshape(node, slowing(INTERFACE, rate / 20, qos=True))
        slow = shaped(node)
        assert slow.keys() == as_made.keys() == {"1:1", "1:5", "1:10", "1:20"}
        assert (as_made["1:1"], slow["1:1"]) == ("200Mbit", "10Mbit")
        reshape(node, slowing(INTERFACE, rate, qos=True))
        assert shaped(node) == as_made
        reshape(node, cutting(INTERFACE))
        assert not shaped(node)
        reshape(node, mending(INTERFACE, rate, qos=True))
        assert shaped(node) == as_made
        assert shaped(built.enter_node(0)) == as_made


def shaped(node: NamespaceEntry) -> dict[str, str]:
    """By class of the node's device: its rate."""
    said = output(start(node, "run", "tc", "class", "show", "dev", INTERFACE))
    words = [line.split() for line in said.splitlines()]
    return {line[2]: line[line.index("rate") + 1] for line in words}


def test_a_file_system_without_a_limit_is_never_filled() -> None:
    with tmpfs("0") as folder:
        assert "has no limit" in filler_file.why_not_fill(folder)
        with pytest.raises(ConfigError, match="has no limit"):
            filler_file.fill(folder)
        assert list(folder.iterdir()) == []
