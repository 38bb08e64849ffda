"""Injected failures: which can happen to what, when they come, and what they do to copies and files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from capricorn.config.cluster import ClusterConfig
from capricorn.config.fault_kinds import KINDS
from capricorn.config.fault_spec import FaultSpec
from capricorn.config.fields import validate
from capricorn.config.scenario import Scenario
from capricorn.errors import ConfigError
from capricorn.faults import filler_file
from capricorn.faults.applicability import why_not
from capricorn.faults.corrupt import LossyRoutes, damage_copies, damage_files
from capricorn.faults.feasibility import check_faults
from capricorn.faults.inject import INJECTIONS
from capricorn.faults.injector import FaultInjector
from capricorn.faults.kill_point import KillPoint
from capricorn.faults.persisted import MOST_S, PersistedWait
from capricorn.faults.process_registry import ProcessName
from capricorn.records.failures import injected
from capricorn.records.job_file import Job
from capricorn.records.samples import EVENTS, EventSample, read_samples
from capricorn.runtime.store.node_store import NodeStore
from capricorn.runtime.store.slot import AUDIT_EVENT
from capricorn.systems.settings import override
from capricorn.topology import Topology
from tests.support.fault_jobs import DEADLINE_S, LAYOUT, TINY, damaged, fault, in_child, make_job, save, with_faults
from tests.support.mounts import tmpfs

# --- what can happen to what


def test_every_kind_can_be_made_to_happen() -> None:
    assert INJECTIONS.keys() == KINDS.keys()


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
        ("group-loss@node=0,iteration=3", (), ""),
        ("pause@iteration=3", (), ""),
        ("pause@iteration=3,seconds=0", (), "use seconds=S"),
        ("fork-server@node=0,iteration=3", (), ""),
        ("fork-server@node=0,iteration=3", ("launch.restart=torchrun",), "torchrun starts the ranks here"),
        ("truncate@rank=0,iteration=3,where=previous", ("system.replicas=1",), "--replicas 2"),
        ("group-loss@node=0,iteration=3", ("launch.nnodes=2", "launch.rdzv_endpoint=a:1"), "leave out --nnodes"),
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
        validate(Scenario, TINY.model_dump() | {"faults": (fault("slow-link@node=0,iteration=3"),)}, "the scenario")


def test_an_endless_partition_is_refused_only_where_links_are_paced() -> None:
    cluster = ClusterConfig(name="test", rate_bytes_per_s=1e8, attention_s=0.01, expert_s=0.01, links="paced")
    paced = TINY.model_copy(update={"cluster": cluster})
    made = TINY.model_copy(update={"cluster": cluster.model_copy(update={"links": "namespaces"})})
    assert "use seconds=S" in why_not(fault("partition@node=0,iteration=3,seconds=0"), paced)
    assert not why_not(fault("partition@node=0,iteration=3,seconds=2"), paced)
    assert not why_not(fault("partition@node=0,iteration=3,seconds=0"), made)


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("tmpfs-full@rank=0,iteration=3", ()),
        ("disk-full@iteration=3", ("system.name=torch-save",)),
        ("records-full@iteration=3", ()),
    ],
)
def test_a_large_file_system_is_never_filled(text: str, settings: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mount a small tmpfs"):
        check_faults(with_faults(text, scenario=override(TINY, list(settings))), tmp_path / "new" / "out")
    with pytest.raises(ConfigError, match="mount a small tmpfs"):
        filler_file.fill(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_machine_without_swap_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("psutil.swap_memory", lambda: SimpleNamespace(total=0))
    with pytest.raises(ConfigError, match="this machine has no swap"):
        check_faults(with_faults("swap@rank=0,iteration=3"), tmp_path)


def test_a_key_that_an_older_record_does_not_have_or_leaves_empty_is_as_the_kind_says() -> None:
    older = {"kind": "clock-jump", "iteration": 3, "rank": 1, "node": None, "where": "", "seconds": 60.0, "call": None}
    assert FaultSpec.model_validate(older) == fault("clock-jump@rank=1,iteration=3,where=ahead,seconds=60")


# --- when


@pytest.mark.parametrize(("where", "sign"), [("ahead", 1), ("back", -1)])
def test_a_fault_is_injected_once_however_often_the_rank_starts(where: str, sign: int, tmp_path: Path) -> None:
    job = make_job(tmp_path, f"clock-jump@rank=1,iteration=3,op=after_update,where={where}")
    before = time.time
    try:
        for attempt in range(2):
            injector = FaultInjector(job, 1, attempt)
            injector.on_iteration_begin(3)
            injector.after_update(3)
            assert before() + sign * 3600 - 100 < time.time() < before() + sign * 3600 + 100
    finally:
        time.time = before
    (event,) = read_samples(job.run_dir / EVENTS, EventSample)
    assert (event.event, event.rank, event.iteration, event.detail) == ("fault", 1, 3, str(job.scenario.faults[0]))


def test_a_note_of_a_fault_has_what_was_on_disk_right_before_it(tmp_path: Path) -> None:
    job = make_job(tmp_path, "clock-jump@rank=1,iteration=3,op=after_update,seconds=0")
    assert job.files_dir is not None
    for iteration in (10, 9):
        checkpoint(job.files_dir, iteration)
    checkpoint(job.files_dir, 11, is_complete=False)
    before = time.time
    try:
        injector = FaultInjector(job, 1, 0)
        injector.on_iteration_begin(3)
        injector.after_update(3)
    finally:
        time.time = before
    (event,) = read_samples(job.run_dir / EVENTS, EventSample)
    assert event.on_disk == (9, 10)


def checkpoint(folder: Path, iteration: int, *, is_complete: bool = True) -> None:
    """A checkpoint of the persistent tier, or what has become of one so far."""
    (path := folder / f"iteration-{iteration:08}").mkdir()
    (path / "data").write_bytes(bytes(100))
    if is_complete:
        (path / "commit.json").write_text("{}")


class Disk:
    """The files of a run, of which another one is complete whenever somebody has waited long enough; and the time."""

    def __init__(self, job: Job, every_s: float) -> None:
        assert job.files_dir is not None
        self.folder, self.every_s, self.now_s, self.num = job.files_dir, every_s, 0.0, 0

    def clock(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s
        while (self.num + 1) * self.every_s < self.now_s:
            self.num += 1
            checkpoint(self.folder, self.num)


@pytest.mark.parametrize(
    ("text", "every_s", "num"),
    [
        ("corrupt@rank=1,iteration=8,where=disk", 0.001, 2),
        ("corrupt@rank=1,iteration=8,where=disk", 3.0, 2),
        ("group-loss@node=1,iteration=8", 3.0, 1),
        ("kill@rank=1,iteration=8", 3.0, 0),
        ("corrupt@rank=1,iteration=8,where=disk", 1e9, 0),
    ],
)
def test_a_run_is_held_up_until_as_much_is_on_disk_as_a_fault_leaves_one_of_but_not_for_ever(
    text: str, every_s: float, num: int, tmp_path: Path
) -> None:
    job = make_job(tmp_path)
    job = job.model_copy(update={"scenario": override(job.scenario, ["persist.every=2"])})
    disk = Disk(job, every_s)
    wait = PersistedWait(job, [fault(text)], disk.clock, disk.sleep)
    for iteration in range(1, 20):
        wait.before(iteration)
    assert min(2, disk.num) == num
    assert disk.now_s <= MOST_S + 1


def test_nothing_stands_in_the_way_of_a_rank_without_failures(tmp_path: Path) -> None:
    job = make_job(tmp_path, "corrupt@rank=1,iteration=3,where=wire")
    routes: dict[int, object] = {}
    assert FaultInjector(job, 0, 0).routes(routes) is routes  # type: ignore[arg-type]
    assert FaultInjector(job, 1, 0).routes(routes).keys() == {0}  # type: ignore[arg-type]


@contextmanager
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits, and is gone at the end."""
    process = subprocess.Popen(["sleep", "60"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_nodes_that_are_lost_at_the_same_moment_are_lost_by_whoever_comes_first(tmp_path: Path) -> None:
    job = make_job(tmp_path, "node-loss@node=0,iteration=3", "node-loss@node=1,iteration=3")
    with sleeper() as agent:
        (job.run_dir / "workers").mkdir()
        name = ProcessName.of(agent.pid)
        (job.run_dir / "workers" / "0").write_text(f"{name} " * 2)

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


@pytest.mark.parametrize("kind", ["corrupt", "truncate"])
def test_the_second_newest_copy_is_damaged_and_the_newer_one_lost_on_that_node_alone(kind: str, tmp_path: Path) -> None:
    job = make_job(tmp_path)
    damage_copies(fault(f"{kind}@rank=1,iteration=5,where=previous"), job, 1)
    assert {(node, owner) for node, owner, _ in damaged(job)} == {(1, 1)}
    assert len(damaged(job)) == 2


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
    wire, payload = LossyRoutes(), memoryview(bytes(1000))
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
    store.open_slots(1, LAYOUT)
    assert store.iterations(1) == [3]
    save(store, 1, 5)
    assert store.iterations(1) == [5, 3] or store.iterations(1) == [3, 5]
    store.close()


def test_a_layout_that_is_stored_already_needs_no_room(tmp_path: Path) -> None:
    with tmpfs("1M") as root:
        store = NodeStore.create(root / "node", "run", 0, Topology(1, 1))
        store.write_manifest(0, "{}")
        filler_file.fill(root)
        store.write_manifest(0, "{}")
        filler_file.empty(root)
        assert os.statvfs(root).f_bavail


# --- torn commits


def test_a_store_tells_of_every_change_before_it_is_made(tmp_path: Path) -> None:
    NodeStore.create(tmp_path / "node", "run", 0, Topology(1, 1))

    def write() -> None:
        told = (tmp_path / "told").open("a", buffering=1)
        sys.addaudithook(lambda event, arguments: event == AUDIT_EVENT and print(*arguments, file=told))
        store = NodeStore.open(tmp_path / "node")
        store.write_manifest(0, "{}")
        store.open_slots(0, LAYOUT)
        save(store, 0, 1)
        store.forget_after(0)
        store.close()

    assert in_child(write) == 0
    told = (tmp_path / "told").read_text().split()
    assert told == ["manifest", "create", "create", "begin", *["block"] * 3, "commit", "abort"]


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_process_is_killed_right_before_the_change_of_its_files_that_was_asked_for(call: int, tmp_path: Path) -> None:
    (tmp_path / "tier").mkdir()
    (tmp_path / "tier" / "there").touch()

    def write() -> None:
        KillPoint().arm(call, [tmp_path / "tier"])
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


CHANGES: dict[str, Callable[[Path, int], object]] = {
    "open": lambda tier, fd: (tier / "new").write_text("1"),
    "truncate": lambda tier, fd: os.truncate(tier / "there", 1),
    "remove": lambda tier, fd: os.remove(tier / "there"),
    "remove in an open folder": lambda tier, fd: os.remove("there", dir_fd=fd),
    "rmdir": lambda tier, fd: (tier / "empty").rmdir(),
    "mkdir": lambda tier, fd: os.mkdir(tier / "new"),
    "mkdir in an open folder": lambda tier, fd: os.mkdir("new", dir_fd=fd),
    "rename": lambda tier, fd: os.rename(tier / "there", tier / "new"),
    "rename out of an open folder": lambda tier, fd: os.rename("there", tier.parent / "new", src_dir_fd=fd),
    "rename from elsewhere": lambda tier, fd: os.rename(tier.parent / "elsewhere", tier / "new"),
    "link from elsewhere": lambda tier, fd: os.link(tier.parent / "elsewhere", tier / "new"),
    "symlink": lambda tier, fd: os.symlink("/nowhere", tier / "new"),
    "symlink in an open folder": lambda tier, fd: os.symlink("/nowhere", "new", dir_fd=fd),
    "relative": lambda tier, fd: (os.chdir(tier), Path("new").touch()),
}
"""By name: one change of the files of a folder, which is also open."""


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_a_file_of_the_tier_is_heard_of_before_it_is_made(change: str, tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    (tier / "empty").mkdir(parents=True)
    for path in (tier / "there", tmp_path / "elsewhere"):
        path.write_text("content")

    def act() -> None:
        fd = os.open(tier, os.O_RDONLY)
        KillPoint().arm(1, [tier])
        os.truncate(tmp_path / "elsewhere", 3)
        CHANGES[change](tier, fd)

    assert in_child(act) == -signal.SIGKILL
    assert {path.name for path in tier.iterdir()} == {"there", "empty"}
    assert (tier / "there").read_text() == "content"


def test_a_process_is_killed_right_before_the_change_of_its_store_that_was_asked_for(tmp_path: Path) -> None:
    NodeStore.create(tmp_path / "node", "run", 0, Topology(1, 1))

    def write() -> None:
        store = NodeStore.open(tmp_path / "node")
        store.open_slots(0, LAYOUT)
        save(store, 0, 1)
        KillPoint().arm(5, [])
        save(store, 0, 2)

    assert in_child(write) == -signal.SIGKILL
    states = {copy.iteration: copy.state for copy in NodeStore.open(tmp_path / "node").inventory()}
    assert states == {1: "complete", 2: "writing"}


# --- what the record says of it


class EndedError(Exception):
    """SIGTERM came."""


def ended(signum: int, frame: object) -> None:
    raise EndedError


@pytest.mark.parametrize("moment", ["claimed", "noted"])
def test_a_fault_that_is_noted_has_happened_also_if_the_run_is_ended_meanwhile(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, done = make_job(tmp_path, "clock-jump@rank=1,iteration=3"), list[str]()
    tell = FaultInjector._tell

    def tell_and_be_ended(self: FaultInjector, *arguments: Any) -> None:
        if moment == "claimed":
            os.kill(os.getpid(), signal.SIGTERM)
        tell(self, *arguments)
        if moment == "noted":
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(FaultInjector, "_tell", tell_and_be_ended)
    monkeypatch.setattr("capricorn.faults.injector.inject", lambda fault, context: done.append(str(fault)))
    before = signal.signal(signal.SIGTERM, ended)
    try:
        with pytest.raises(EndedError):
            come_to_iteration_3(job)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(done) == len(injected(list(read_samples(job.run_dir / EVENTS, EventSample)))) == 1


def come_to_iteration_3(job: Job) -> None:
    injector = FaultInjector(job, 1, 0)
    injector.on_iteration_begin(3)
    injector.before_update(3)


def test_a_fault_that_is_noted_and_fails_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fault: FaultSpec, context: object) -> None:
        raise OSError("no tool for it")

    job = make_job(tmp_path, "clock-jump@rank=1,iteration=3")
    monkeypatch.setattr("capricorn.faults.injector.inject", fail)
    with pytest.raises(OSError, match="no tool for it"):
        come_to_iteration_3(job)
    events = list(read_samples(job.run_dir / EVENTS, EventSample))
    assert [event.event for event in events] == ["fault", "not-injected"]
    assert injected(events) == []


def test_a_jumped_clock_is_in_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(tmp_path, "clock-jump@rank=1,iteration=3")
    before_s = job.now_s()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr("capricorn.faults.injector.inject", lambda fault, context: None)
    come_to_iteration_3(Job.model_validate_json(job.model_dump_json()))
    (event,) = read_samples(job.run_dir / EVENTS, EventSample)
    assert before_s <= event.at_s <= job.now_s()
