"""What is stored is ours alone, what others prepared is refused, and nothing that is read can run code."""

from __future__ import annotations

import io
import os
import stat
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import pytest
import xxhash
from capricorn.cli.main import main

from capricorn.campaign.campaign_record import CAMPAIGN, read_campaign
from capricorn.compare.compare_record import COMPARE, read_compare
from capricorn.errors import CapricornError, StoreError
from capricorn.loads.load_trace import trace_size
from capricorn.records.samples import ITERATIONS, RUN, IterationSample, read_run, read_samples
from capricorn.runtime.store.node_store import NodeStore, RunLock, find_stores
from capricorn.runtime.store.slot import Layout
from capricorn.topology import Topology
from capricorn.trainer.data import Batches
from tests.support.mounts import tmpfs
from tests.support.processes import command_of
from tests.support.replicas import Pair, fill, payload_of
from tests.support.runs import LiveRun, assert_ok, fill_up

LAYOUT = Layout(payload_bytes=10_000, block_bytes=4096, digest=1)
NOBODY = 65534
SAVES, SAVE_BYTES = 50, 4 << 20


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def make_store(folder: Path) -> NodeStore:
    return NodeStore.create(folder, "run", 0, Topology(1, 1))


# --- what a run makes, and where it listens


def listening(processes: list[psutil.Process]) -> Iterator[tuple[str, int, str]]:
    """Address, port and process of each socket that anybody can talk to."""
    for process in processes:
        try:
            sockets = [each for each in process.net_connections("inet") if each.status in ("LISTEN", "NONE")]
        except psutil.Error:  # it has just ended
            continue
        yield from ((each.laddr.ip, each.laddr.port, command_of(process)) for each in sockets)


@pytest.mark.parametrize("umask", ["000", pytest.param("077", marks=pytest.mark.slow)])
def test_a_run_under_any_umask_stores_for_its_user_alone_and_listens_on_its_own_interfaces(
    umask: str, tmp_path: Path
) -> None:
    prefix = ("sh", "-c", f'umask {umask} && exec "$@"', "sh")
    with LiveRun(tmp_path, "--iterations", "200", prefix=prefix) as live:
        live.wait_iteration(5)
        folder = live.store()
        paths = [folder, *folder.rglob("*")]
        modes = {str(path): (stat.filemode(path.lstat().st_mode), path.lstat().st_uid) for path in paths}
        heard = list(listening(live.processes()))
        ended = live.finish()
    assert_ok(ended)
    assert any("slot" in path for path in modes)
    assert set(modes.values()) <= {("drwx------", os.geteuid()), ("-rw-------", os.geteuid())}, modes
    assert heard
    assert not [each for each in heard if not each[0].startswith("127.")], heard


# --- what others prepared


def as_link(path: Path) -> None:
    (path.parent / "elsewhere").mkdir(mode=0o700)
    path.symlink_to(path.parent / "elsewhere")


def as_file(path: Path) -> None:
    path.touch()


def as_somebody_else(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can make what is another's")
    path.mkdir(mode=0o700)
    os.chown(path, NOBODY, NOBODY)


def open_to(bits: int) -> Callable[[Path], None]:
    def prepare(path: Path) -> None:
        path.mkdir()
        path.chmod(0o700 | bits)

    return prepare


PREPARED = {
    "a link": as_link,
    "a file": as_file,
    "another user's": as_somebody_else,
    "writable for a group": open_to(0o020),
    "writable for all": open_to(0o002),
}
prepared = pytest.mark.parametrize("prepare", PREPARED.values(), ids=PREPARED.keys())


@prepared
def test_a_folder_that_somebody_else_prepared_is_not_taken_for_a_store(
    prepare: Callable[[Path], None], tmp_path: Path
) -> None:
    prepare(tmp_path / "node0")
    with pytest.raises(StoreError):
        make_store(tmp_path / "node0")
    assert not list(tmp_path.rglob("node.json"))


@prepared
def test_nor_is_one_around_it(prepare: Callable[[Path], None], tmp_path: Path) -> None:
    prepare(tmp_path / "capricorn-run")
    with pytest.raises(StoreError):
        make_store(tmp_path / "capricorn-run" / "node0")
    assert not list(tmp_path.rglob("node.json"))


@pytest.mark.parametrize("name", ["capricorn-run", ".capricorn-run"])
@prepared
def test_a_run_never_starts_in_a_folder_that_somebody_else_prepared(
    prepare: Callable[[Path], None], name: str, tmp_path: Path
) -> None:
    prepare(tmp_path / name)
    try:
        lock = RunLock(tmp_path, "run")
    except StoreError:
        return
    # It took the place of an empty folder, which only who may remove that one can do.
    assert (lock.folder.lstat().st_uid, mode(lock.folder)) == (os.geteuid(), 0o700)
    lock.release(keep=False)


def test_a_slot_is_not_written_through_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(bytes(LAYOUT.file_bytes))
    with closing(make_store(tmp_path / "node0")) as store:
        for target in (victim, tmp_path / "not there"):
            slot = store.folder / "owner0.slot0"
            slot.symlink_to(target)
            with pytest.raises(StoreError, match="cannot open"):
                store.open_slots(0, LAYOUT)
            slot.unlink()
    assert victim.read_bytes() == bytes(LAYOUT.file_bytes)
    assert not (tmp_path / "not there").exists()


def test_a_pipe_in_place_of_a_slot_reads_as_damaged_and_is_not_waited_for(tmp_path: Path) -> None:
    with closing(make_store(tmp_path / "node0")) as store:
        os.mkfifo(store.folder / "owner0.slot0")
        assert [copy.state for copy in store.inventory()] == ["damaged"]


def test_a_link_that_is_called_like_a_store_is_none_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").touch()
    (tmp_path / "capricorn-run").symlink_to(tmp_path / "home")
    assert find_stores(tmp_path) == []
    assert exit_code("clean", "--root", tmp_path) == 0
    assert (tmp_path / "home" / "letter").exists()


def test_a_layout_that_finds_no_room_is_an_error_that_says_what_to_do() -> None:
    with tmpfs(size="64k") as folder, closing(make_store(folder / "node0")) as store:
        fill_up(folder / "hog")
        with pytest.raises(StoreError, match=r"cannot write .*owner0\.json: No space left.*make room"):
            store.write_manifest(0, "{}" * 10_000)


# --- what is read


def exit_code(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as raised:
        main([str(argument) for argument in arguments])
    assert isinstance(raised.value.code, int)
    return raised.value.code


def payload(canary: Path) -> bytes:
    """A pickle that makes that file for whoever loads it."""
    return f"cos\nsystem\n(S'touch {canary}'\ntR.\n".encode()


def object_array(canary: Path) -> bytes:
    """An .npy file of Python objects."""
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    header = header.ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + payload(canary)


def archive(canary: Path) -> bytes:
    """An .npz file whose arrays are such."""
    with io.BytesIO() as file:
        with zipfile.ZipFile(file, "w") as names:
            for name in ("iterations", "load_share"):
                names.writestr(f"{name}.npy", object_array(canary))
        return file.getvalue()


def node_of(path: Path) -> None:
    NodeStore.open(path.parent)


READERS: dict[str, Callable[[Path], object]] = {
    "node.json": node_of,
    RUN: lambda path: read_run(path.parent),
    CAMPAIGN: lambda path: read_campaign(path.parent),
    COMPARE: lambda path: read_compare(path.parent),
    "loads.npz": trace_size,
}


@pytest.mark.parametrize("make", [payload, object_array, archive])
@pytest.mark.parametrize("name", READERS)
def test_a_record_that_is_a_pickle_is_refused_in_a_line_and_not_loaded(
    name: str, make: Callable[[Path], bytes], tmp_path: Path
) -> None:
    path, canary = tmp_path / name, tmp_path / "canary"
    path.write_bytes(make(canary) + b"\n")
    with pytest.raises(CapricornError, match=str(path) if name != "node.json" else name) as raised:
        READERS[name](path)
    assert "\n" not in str(raised.value)
    assert not canary.exists()


@pytest.mark.parametrize("make", [payload, object_array, archive])
def test_lines_of_a_record_that_are_a_pickle_count_as_damaged_and_are_not_loaded(
    make: Callable[[Path], bytes], tmp_path: Path
) -> None:
    path, canary, damaged = tmp_path / ITERATIONS, tmp_path / "canary", list[int]()
    path.write_bytes(make(canary) + b"\n")
    assert list(read_samples(path, IterationSample, damaged)) == []
    assert damaged
    assert not canary.exists()


def test_tokens_that_are_objects_are_not_loaded(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    content = object_array(canary)
    (tmp_path / "tokens.npy").write_bytes(content + xxhash.xxh3_64_digest(content))
    with pytest.raises((CapricornError, ValueError)):
        Batches(tmp_path / "tokens.npy", 0, 1, 1, 1, 0)
    assert not canary.exists()


def test_a_slot_and_a_layout_that_are_pickles_are_shown_as_damaged_and_not_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    canary, lock = tmp_path / "canary", RunLock(tmp_path, "run")
    node = lock.folder / "node0"
    with closing(make_store(node)) as store:
        store.open_slots(0, LAYOUT)
    for name in ("owner0.slot0", "owner0.json"):
        (node / name).write_bytes(payload(canary))
    lock.release(keep=True)
    assert exit_code("inspect", lock.folder) == 1
    assert "damaged" in capsys.readouterr().out
    (node / "node.json").write_bytes(payload(canary))
    assert exit_code("inspect", lock.folder) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not canary.exists()


def test_the_pickles_made_up_here_would_run_if_they_were_loaded(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    (tmp_path / "tokens.npy").write_bytes(object_array(canary))
    np.load(tmp_path / "tokens.npy", allow_pickle=True)
    assert canary.exists()


# --- what stays after many saves


def test_memory_does_not_grow_with_the_number_of_saves(tmp_path: Path) -> None:
    layout = Layout(payload_bytes=SAVE_BYTES, block_bytes=256 << 10, digest=1)
    state = payload_of(1, 0, layout)
    with closing(Pair(tmp_path, layout=layout)) as pair:
        pair.link.connect("{}")
        sizes = []
        for iteration in range(1, SAVES + 1):
            slot = pair.owner_store.begin(1, iteration, keep=iteration - 1)
            fill(slot, state)
            slot.commit()
            pair.replicate(slot, iteration, keep=iteration - 1)
            sizes.append(psutil.Process().memory_info().rss)
    assert sizes[-1] - sizes[SAVES // 5] < SAVE_BYTES // 2
