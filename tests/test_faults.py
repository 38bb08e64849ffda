"""Injected failures: which can happen to what, and what each does to files, memory, links and processes."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from capricorn.applies import why_not
from capricorn.config import Scenario
from capricorn.emulation.fabric import Entry, Shape
from capricorn.emulation.ground import Loopback
from capricorn.emulation.link import Link, create_links
from capricorn.emulation.reshape import reshape
from capricorn.emulation.shaping import INTERFACE, cutting, mending, slowing
from capricorn.errors import ConfigError
from capricorn.faults import KINDS, FaultSpec
from capricorn.harness import ballast, cgroup, strikes
from capricorn.harness.countdown import Countdown
from capricorn.harness.damage import Wire, damage_copies, damage_files
from capricorn.harness.fault_checks import check_faults
from capricorn.harness.injector import FaultInjector
from capricorn.harness.job import Job
from capricorn.harness.registered import ProcessName, register_worker, registered
from capricorn.harness.repairs import Repairs
from capricorn.harness.strikes import DISK_FRAC, Scene, strike
from capricorn.records import EVENTS, EventSample, read_samples
from capricorn.resolve import load_model, override
from capricorn.runtime.slot import Layout, checksum
from capricorn.runtime.store import NodeStore
from capricorn.topology import Topology
from capricorn.values import build
from tests.mounts import tmpfs
from tests.namespaces import fabric, output, start
from tests.runs import polls

TINY = Scenario(model=load_model("mixtral-tiny"))
LAYOUT = Layout(payload_bytes=10_000, block_bytes=4096, digest=7)
DEADLINE_S = 20.0


def fault(text: str) -> FaultSpec:
    return FaultSpec.parse(text)


def with_faults(*texts: str, scenario: Scenario = TINY) -> Scenario:
    return scenario.model_copy(update={"faults": tuple(map(fault, texts))})


def make_job(folder: Path, *texts: str) -> Job:
    """A job of two nodes of one rank whose stores hold two complete iterations of both ranks."""
    for name in ("run", "store", "files"):
        (folder / name).mkdir()
    job = Job(
        run_id="test",
        scenario=with_faults(*texts),
        run_dir=folder / "run",
        store_dir=folder / "store",
        tokens=folder,
        files_dir=folder / "files",
    )
    job.store_dir.chmod(0o700)
    for node in range(2):
        store = NodeStore.create(job.node_dir(node), "test", node, Topology(2, 1))
        for owner in range(2):
            store.host(owner, LAYOUT)
            for iteration in (3, 4):
                save(store, owner, iteration)
        store.close()
    return job


def save(store: NodeStore, owner: int, iteration: int) -> None:
    slot = store.begin(owner, iteration, keep=0)
    for index in range(LAYOUT.num_blocks):
        slot.payload[LAYOUT.block(index)] = bytes([iteration]) * len(slot.payload[LAYOUT.block(index)])
        slot.table[index] = checksum(slot.payload[LAYOUT.block(index)])
    store.commit(slot)


def in_child(act: Callable[[], object]) -> int:
    """How a process that does this ends: its exit code, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def damaged(job: Job) -> list[tuple[int, int, int]]:
    """Node, owner and iteration of each complete copy that does not match its checksums any more."""
    found = []
    for node in range(2):
        store = NodeStore.open(job.node_dir(node))
        copies = [copy for copy in store.inventory() if copy.state in ("complete", "damaged")]
        found += [(node, copy.owner, copy.iteration) for copy in copies if not store.verify(copy)]
    return found


# --- what can happen to what


def test_every_kind_can_be_made_to_happen() -> None:
    assert strikes.STRIKES.keys() == KINDS.keys()


@pytest.mark.parametrize(
    ("text", "settings", "reason"),
    [
        ("kill@rank=0,iteration=3", ("system.name=none",), ""),
        ("corrupt@rank=0,iteration=3", (), ""),
        ("corrupt@rank=0,iteration=3", ("system.name=torch-save",), "no copies in the memory store"),
        ("corrupt@rank=0,iteration=3", ("system.name=lm-resiliency",), "no copies in the memory store"),
        ("truncate@rank=0,iteration=3,where=replica", ("system.replicas=1",), "--replicas 2"),
        ("corrupt@rank=0,iteration=3,where=wire", ("system.replicas=1",), "--replicas 2"),
        ("corrupt@rank=0,iteration=3,where=disk", (), "--persist-every"),
        ("corrupt@rank=0,iteration=3,where=disk", ("persist.every=2",), ""),
        ("disk-full@iteration=3", ("system.name=torch-save",), ""),
        ("disk-slow@iteration=3", (), "--persist-every"),
        ("torn-commit@rank=0,iteration=3", ("system.name=none",), "nothing that a kill could tear"),
        ("torn-commit@rank=0,iteration=3", ("system.name=dcp",), ""),
        ("tmpfs-full@rank=0,iteration=3", ("system.name=dcp",), "nothing in memory"),
        ("tmpfs-full@rank=0,iteration=3", ("system.name=dcp", "storage.medium=tmpfs"), ""),
        ("partition@node=0,iteration=3", (), "--cluster"),
    ],
)
def test_a_failure_that_cannot_happen_to_a_system_is_told_with_the_reason(
    text: str, settings: tuple[str, ...], reason: str
) -> None:
    told = why_not(fault(text), override(TINY, list(settings)))
    assert reason in told
    assert bool(told) == bool(reason)


def test_a_scenario_without_links_refuses_failures_of_links() -> None:
    with pytest.raises(ConfigError, match="name another --cluster"):
        build(Scenario, TINY.model_dump() | {"faults": (fault("slow-link@node=0,iteration=3"),)}, "the scenario")


@pytest.mark.parametrize(
    ("text", "settings"),
    [("tmpfs-full@rank=0,iteration=3", ()), ("disk-full@iteration=3", ("system.name=torch-save",))],
)
def test_a_large_file_system_is_never_filled(text: str, settings: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mount a small tmpfs"):
        check_faults(with_faults(text, scenario=override(TINY, list(settings))), tmp_path / "new" / "out")
    with pytest.raises(ConfigError, match="mount a small tmpfs"):
        ballast.fill(tmp_path)
    assert not list(tmp_path.iterdir())


# --- when


def test_a_failure_strikes_once_however_often_the_rank_starts(tmp_path: Path) -> None:
    job = make_job(tmp_path, "clock-jump@rank=1,iteration=3,op=after_update")
    before = time.time
    try:
        for attempt in range(2):
            injector = FaultInjector(job, 1, attempt)
            injector.on_iteration_begin(3)
            injector.after_update(3)
            assert before() + 3500 < time.time() < before() + 3700
    finally:
        time.time = before
    (event,) = read_samples(job.run_dir / EVENTS, EventSample)
    assert (event.event, event.rank, event.iteration, event.detail) == ("fault", 1, 3, str(job.scenario.faults[0]))


def test_nothing_stands_in_the_way_of_a_rank_without_failures(tmp_path: Path) -> None:
    job = make_job(tmp_path, "torn-commit@rank=1,iteration=3", "corrupt@rank=1,iteration=3,where=wire")
    routes: dict[int, object] = {}
    assert FaultInjector(job, 0, 0).store_tap is None
    assert FaultInjector(job, 0, 0).routes(routes) is routes  # type: ignore[arg-type]
    assert FaultInjector(job, 1, 0).store_tap is not None
    assert FaultInjector(job, 1, 0).routes(routes).keys() == {0}  # type: ignore[arg-type]


def test_nodes_that_are_lost_at_the_same_moment_are_lost_by_whoever_comes_first(tmp_path: Path) -> None:
    job = make_job(tmp_path, "node-loss@node=0,iteration=3", "node-loss@node=1,iteration=3")
    with sleeper() as agent:
        (job.run_dir / "workers").mkdir()
        name = ProcessName.of(agent.pid)
        (job.run_dir / "workers" / "0").write_text(f"{name.pid} {name.created_s} " * 2)

        def come_to_the_moment() -> None:
            injector = FaultInjector(job, 1, 0)
            injector.on_iteration_begin(3)
            injector.before_update(3)

        assert in_child(come_to_the_moment) == -signal.SIGKILL
        assert agent.wait(DEADLINE_S) == -signal.SIGKILL
    assert not job.node_dir(0).exists()
    assert not job.node_dir(1).exists()
    assert len(list(read_samples(job.run_dir / EVENTS, EventSample))) == 2


# --- copies and files


@pytest.mark.parametrize("kind", ["corrupt", "truncate"])
@pytest.mark.parametrize(("where", "node"), [("slot", 1), ("replica", 0)])
def test_only_the_newest_copy_of_that_rank_in_that_place_is_damaged(
    kind: str, where: str, node: int, tmp_path: Path
) -> None:
    job = make_job(tmp_path)
    damage_copies(fault(f"{kind}@rank=1,iteration=5,where={where}"), job, 1)
    assert damaged(job) == [(node, 1, 4 if kind == "corrupt" else 0)]


def test_the_same_bit_is_flipped_whenever_the_run_is_repeated(tmp_path: Path) -> None:
    contents = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        job = make_job(tmp_path / name)
        before = [path.read_bytes() for path in sorted(job.node_dir(1).glob("*slot*"))]
        damage_copies(fault("corrupt@rank=1,iteration=5"), job, 1)
        contents.append([path.read_bytes() for path in sorted(job.node_dir(1).glob("*slot*"))])
        flipped = [a ^ b for old, new in zip(before, contents[-1], strict=True) for a, b in zip(old, new, strict=True)]
        assert sum(bits.bit_count() for bits in flipped) == 1
    assert contents[0] == contents[1]


@pytest.mark.parametrize("kind", ["corrupt", "truncate"])
def test_of_the_newest_complete_checkpoint_on_disk_the_largest_file_is_damaged(kind: str, tmp_path: Path) -> None:
    for iteration, names in ((3, ("commit.json",)), (4, ("commit.json",)), (5, ())):
        folder = tmp_path / f"iteration-{iteration:08}"
        folder.mkdir()
        for name, size in [("small", 10), ("large", 1001), *((name, 1) for name in names)]:
            (folder / name).write_bytes(bytes(size))
    damage_files(fault(f"{kind}@rank=0,iteration=6,where=disk"), tmp_path)
    changed = [path for path in sorted(tmp_path.rglob("large")) if path.read_bytes() != bytes(1001)]
    assert [path.parent.name for path in changed] == ["iteration-00000004"]
    assert changed[0].stat().st_size == (1001 if kind == "corrupt" else 500)
    assert not any((tmp_path / "iteration-00000004" / "small").read_bytes())


def test_one_piece_on_the_wire_is_damaged_and_the_sender_keeps_its_own(tmp_path: Path) -> None:
    wire, payload = Wire(), memoryview(bytes(1000))
    route = wire.routes({}, [1])[1]
    assert list(route.pieces(payload)) == [payload]
    wire.damage_next(fault("corrupt@rank=0,iteration=6,where=wire"))
    (sent,) = route.pieces(payload)
    assert sum(byte.bit_count() for byte in sent) == 1
    assert payload == bytes(1000)
    assert list(route.pieces(payload)) == [payload]


def test_a_copy_that_was_cut_short_is_given_up_and_its_place_used_again(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    damage_copies(fault("truncate@rank=1,iteration=5"), job, 1)
    store = NodeStore.open(job.node_dir(1))
    store.host(1, LAYOUT)
    assert store.iterations(1) == [3]
    save(store, 1, 5)
    assert store.iterations(1) == [5, 3] or store.iterations(1) == [3, 5]
    store.close()


def test_a_layout_that_is_stored_already_needs_no_room(tmp_path: Path) -> None:
    with tmpfs("1M") as root:
        store = NodeStore.create(root / "node", "run", 0, Topology(1, 1))
        store.write_manifest(0, "{}")
        ballast.fill(root)
        store.write_manifest(0, "{}")
        ballast.empty(root)
        assert os.statvfs(root).f_bavail


# --- torn commits


def test_a_store_tells_of_every_change_before_it_is_made(tmp_path: Path) -> None:
    calls: list[str] = []
    NodeStore.create(tmp_path / "node", "run", 0, Topology(1, 1))
    store = NodeStore.open(tmp_path / "node", calls.append)
    store.write_manifest(0, "{}")
    store.host(0, LAYOUT)
    save(store, 0, 1)
    store.forget_after(0)
    store.close()
    assert calls == ["manifest", "create", "create", "begin", *["block"] * 3, "commit", "abort"]


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_process_is_killed_right_before_the_change_of_its_files_that_was_asked_for(call: int, tmp_path: Path) -> None:
    (tmp_path / "tier").mkdir()
    (tmp_path / "tier" / "there").touch()

    def write() -> None:
        countdown = Countdown()
        countdown.start(call, [tmp_path / "tier"])
        (tmp_path / "elsewhere").touch()
        (tmp_path / "tier" / "there").read_text()
        (tmp_path / "tier" / "a").write_text("1")
        (tmp_path / "tier" / "a").rename(tmp_path / "tier" / "b")
        folder = os.open(tmp_path / "tier", os.O_RDONLY)
        os.remove("b", dir_fd=folder)

    assert in_child(write) == -signal.SIGKILL
    left = {path.name for path in (tmp_path / "tier").iterdir()}
    assert left == {"there"} | [set(), {"a"}, {"b"}][call - 1]
    assert (tmp_path / "elsewhere").exists()


def test_a_process_is_killed_right_before_the_change_of_its_store_that_was_asked_for(tmp_path: Path) -> None:
    NodeStore.create(tmp_path / "node", "run", 0, Topology(1, 1))

    def write() -> None:
        countdown = Countdown()
        store = NodeStore.open(tmp_path / "node", countdown.tap)
        store.host(0, LAYOUT)
        save(store, 0, 1)
        countdown.start(5, [])
        save(store, 0, 2)

    assert in_child(write) == -signal.SIGKILL
    states = {copy.iteration: copy.state for copy in NodeStore.open(tmp_path / "node").inventory()}
    assert states == {1: "complete", 2: "writing"}


# --- processes


class sleeper:  # noqa: N801 - used as a function
    """A process that waits, and is gone at the end."""

    def __enter__(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(["sleep", "60"])
        return self._process

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.wait()


def test_a_stopped_worker_goes_on_after_its_time_and_not_before(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    pid = os.fork()
    if pid == 0:
        register_worker(job.run_dir, 1)
        strike(fault("stop@rank=1,iteration=3"), Scene(job, 1))
        os._exit(7)
    assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
    names = registered(job.run_dir, 1)
    assert names is not None
    assert (names.worker.pid, names.agent.pid) == (pid, os.getpid())
    repairs = Repairs(job, Loopback())
    repairs.on_event(struck("stop@rank=1,iteration=3"))  # for good
    repairs.tick()
    assert os.waitpid(pid, os.WNOHANG | os.WUNTRACED) == (0, 0)
    repairs.on_event(struck("stop@rank=1,iteration=3,seconds=0.01"))
    for _ in polls(DEADLINE_S):
        repairs.tick()
        if (ended := os.waitpid(pid, os.WNOHANG))[0]:
            break
    assert os.waitstatus_to_exitcode(ended[1]) == 7


def struck(text: str) -> EventSample:
    return EventSample(event="fault", at_s=0.0, attempt=0, rank=0, iteration=3, detail=text)


def test_the_kernel_kills_who_runs_out_of_its_cgroup_and_nothing_is_left_of_it(tmp_path: Path) -> None:
    if reason := cgroup.why_not():
        pytest.skip(reason)
    job = make_job(tmp_path)
    oom = "oom@rank=1,iteration=3"
    assert in_child(lambda: strike(fault(oom), Scene(job, 1))) == -signal.SIGKILL
    assert groups(job)
    repairs = Repairs(job, Loopback())
    repairs.on_event(struck(oom))
    repairs.close()
    assert not groups(job)


def groups(job: Job) -> list[Path]:
    return list(Path("/sys/fs/cgroup").rglob(strikes.cgroup_name(job, 1)))


def test_a_stranger_takes_the_ports_of_a_dead_worker_and_goes_with_the_run(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    lock = (job.store_dir / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    taken = "port-taken@rank=1,iteration=3"
    assert in_child(lambda: strike(fault(taken), Scene(job, 1))) == -signal.SIGKILL
    listener.close()
    assert any(answers(port) for _ in polls(DEADLINE_S))
    repairs = Repairs(job, Loopback())
    repairs.on_event(struck(taken))
    repairs.close()
    assert not answers(port)
    lock.close()


def test_a_stranger_goes_also_when_the_launcher_just_dies(tmp_path: Path) -> None:
    lock = (tmp_path / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    stranger = subprocess.Popen(
        [sys.executable, "-m", "capricorn.harness.stranger", str(tmp_path / "lock"), json.dumps([])],
        stdout=subprocess.PIPE,
    )
    assert stranger.stdout is not None
    with stranger.stdout:
        assert stranger.stdout.readline() == b"ready\n"
    assert stranger.poll() is None
    lock.close()
    assert stranger.wait(DEADLINE_S) == 0


def answers(port: int) -> bool:
    """Whether somebody there says something to whoever comes."""
    try:
        with socket.create_connection(("127.0.0.1", port), 5.0) as sock:
            return bool(sock.recv(16))
    except ConnectionError:
        return False


# --- clocks


@pytest.fixture
def paced(tmp_path: Path) -> Iterator[Job]:
    """A job whose links and storage are modelled."""
    job = make_job(tmp_path)
    cluster = job.scenario.cluster.model_copy(update={"links": "paced", "name": "small"})
    create_links(tmp_path / "links", {name: 1e6 for name in ("out0", "in0", "out1", "in1")})
    create_links(tmp_path / "storage", {"node0": 1e6, "total": 2e6})
    yield job.model_copy(
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
    strike(fault(text), Scene(paced, 1))
    out = paced.links_dir
    assert out is not None
    assert took(out / "out1") == pytest.approx(20.0)
    assert took(out / "out0") == pytest.approx(1.0)
    repairs = Repairs(paced, Loopback())
    repairs.on_event(struck(text))
    if undo == "time":
        assert any(repairs.tick() or took(out / "out1") == pytest.approx(1.0) for _ in polls(DEADLINE_S))
    else:
        repairs.tick()
        repairs.node_replaced(0)
        assert took(out / "out1") == pytest.approx(20.0)
        repairs.node_replaced(1)
        assert took(out / "out1") == pytest.approx(1.0)


def test_nothing_leaves_a_cut_node_until_it_is_replaced(paced: Job) -> None:
    text = "partition@node=1,iteration=3,seconds=0"
    strike(fault(text), Scene(paced, 1))
    assert paced.links_dir is not None
    link = Link(paced.links_dir / "out1")
    assert link.reserve(1) > time.monotonic() + 1000
    repairs = Repairs(paced, Loopback())
    repairs.on_event(struck(text))
    repairs.node_replaced(1)
    assert link.reserve(1) < time.monotonic() + 1000
    link.close()


def test_a_slow_disk_takes_a_hundred_times_as_long_for_its_time(paced: Job) -> None:
    strike(fault("disk-slow@iteration=3"), Scene(paced, 0))
    assert paced.storage_dir is not None
    assert took(paced.storage_dir / "node0") == pytest.approx(1 / DISK_FRAC)
    assert took(paced.storage_dir / "total") == pytest.approx(0.5 / DISK_FRAC)
    repairs = Repairs(paced, Loopback())
    repairs.on_event(struck("disk-slow@iteration=3,seconds=0.01"))
    assert any(repairs.tick() or took(paced.storage_dir / "node0") == pytest.approx(1.0) for _ in polls(DEADLINE_S))


def test_a_full_disk_has_room_again_after_its_time(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    with tmpfs("1M") as root:
        job = job.model_copy(update={"files_dir": root})
        strike(fault("disk-full@iteration=3"), Scene(job, 0))
        assert not os.statvfs(root).f_bavail
        repairs = Repairs(job, Loopback())
        repairs.on_event(struck("disk-full@iteration=3,seconds=0.01"))
        assert any(repairs.tick() or os.statvfs(root).f_bavail for _ in polls(DEADLINE_S))


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


def shaped(node: Entry) -> dict[str, str]:
    """By class of the node's device: its rate."""
    said = output(start(node, "run", "tc", "class", "show", "dev", INTERFACE))
    words = [line.split() for line in said.splitlines()]
    return {line[2]: line[line.index("rate") + 1] for line in words}
