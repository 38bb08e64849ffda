"""The memory store: what it says is complete is complete, whatever is killed, damaged or full."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capricorn.errors import StoreError
from capricorn.runtime.store.node_store import NodeStore, RunLock, find_stores, remove_store
from capricorn.runtime.store.slot import PAGE, Header, Layout, Slot, checksum
from capricorn.topology import Topology
from tests.support.mounts import tmpfs
from tests.support.runs import fill_up

LAYOUT = Layout(payload_bytes=10_000, block_bytes=4096, digest=1 << 63 | 5)


def make_store(folder: Path) -> NodeStore:
    return NodeStore.create(folder / "node0", "run", 0, Topology(1, 1))


def save(store: NodeStore, owner: int, iteration: int, keep: int | None) -> Slot:
    slot = fill(store, owner, iteration, keep)
    store.commit(slot)
    return slot


def fill(store: NodeStore, owner: int, iteration: int, keep: int | None) -> Slot:
    slot = store.begin(owner, iteration, keep)
    for index in range(slot.layout.num_blocks):
        place = slot.payload[slot.layout.block(index)]
        place[:] = bytes([iteration % 256]) * len(place)
        slot.table[index] = checksum(place)
    return slot


def test_a_copy_is_complete_only_after_commit(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.open_slots(0, LAYOUT)
    slot = fill(store, 0, 1, keep=0)
    assert [copy.state for copy in store.inventory() if copy.iteration == 1] == ["writing"]
    assert store.read(0, 1) is None
    store.commit(slot)
    assert store.read(0, 1) is slot
    assert store.iterations(0) == [1]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=12))
def test_the_iteration_to_keep_is_never_overwritten(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[bool, bool]]
) -> None:
    """Whatever saves fail here or elsewhere, the newest that is complete everywhere stays."""
    store = make_store(tmp_path_factory.mktemp("store"))
    store.open_slots(0, LAYOUT)
    keep = 0
    for iteration, (commits_here, completes_everywhere) in enumerate(events, 1):
        slot = fill(store, 0, iteration, keep)
        if commits_here:
            store.commit(slot)
            keep = iteration if completes_everywhere else keep
        else:
            store.abort(slot)
        assert keep == 0 or store.read(0, keep) is not None


def test_an_iteration_that_was_saved_twice_leaves_a_slot_for_the_next(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.open_slots(0, LAYOUT)
    save(store, 0, 1, keep=0)
    save(store, 0, 1, keep=0)
    save(store, 0, 2, keep=1)
    assert sorted(store.iterations(0)) == [1, 2]


def test_a_slot_that_was_damaged_is_used_first(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    slots = store.open_slots(0, LAYOUT)
    save(store, 0, 1, keep=0)
    save(store, 0, 2, keep=1)
    damaged = next(slot for slot in slots if slot.holds(1))
    damaged._map[8] ^= 0xFF
    assert store.begin(0, 3, keep=2) is damaged


def test_what_survives_is_there_when_the_store_is_opened_again(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.open_slots(0, LAYOUT)
    save(store, 0, 4, keep=0)
    store.close()
    again = NodeStore.open(tmp_path / "node0")
    assert (again.run_id, again.node) == ("run", 0)
    again.open_slots(0, LAYOUT)
    slot = again.read(0, 4)
    assert slot is not None
    assert slot.damaged_block() is None
    assert bytes(slot.payload) == bytes([4]) * LAYOUT.payload_bytes


def test_a_complete_copy_of_another_layout_is_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.open_slots(0, LAYOUT)
    save(store, 0, 1, keep=0)
    store.close()
    for other in (Layout(20_000, 4096, 5), Layout(5_000, 4096, LAYOUT.digest)):
        with pytest.raises(StoreError, match="another size"):
            NodeStore.open(tmp_path / "node0").open_slots(0, other)


def test_a_slot_of_another_layout_that_holds_nothing_complete_is_made_anew(tmp_path: Path) -> None:
    store, other = make_store(tmp_path), Layout(20_000, 4096, 5)
    store.open_slots(0, LAYOUT)
    fill(store, 0, 1, keep=0)
    store.close()
    assert {slot.layout for slot in NodeStore.open(tmp_path / "node0").open_slots(0, other)} == {other}


def test_a_copy_with_less_room_is_enlarged_and_one_that_is_damaged_goes(tmp_path: Path) -> None:
    store, larger = make_store(tmp_path), Layout(30_000, 4096, LAYOUT.digest)
    store.open_slots(0, LAYOUT)
    save(store, 0, 1, keep=0)
    damaged = save(store, 0, 2, keep=1)
    damaged.payload[7] ^= 1
    store.close()
    again = NodeStore.open(tmp_path / "node0")
    again.open_slots(0, larger)
    assert again.iterations(0) == [1]
    slot = again.read(0, 1)
    assert slot is not None
    assert slot.damaged_block() is None
    assert bytes(slot.payload) == bytes([1]) * LAYOUT.payload_bytes + bytes(20_000)


def test_copies_of_an_abandoned_future_are_forgotten(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.open_slots(0, LAYOUT)
    save(store, 0, 4, keep=0)
    save(store, 0, 5, keep=4)
    store.forget_after(4)
    assert store.iterations(0) == [4]


@pytest.mark.parametrize("offset", [8, 40, PAGE, PAGE + 8, 2 * PAGE, 2 * PAGE + 9_999])
def test_a_flipped_byte_is_found(tmp_path: Path, offset: int) -> None:
    store = make_store(tmp_path)
    store.open_slots(0, LAYOUT)
    slot = save(store, 0, 1, keep=0)
    (copy,) = [copy for copy in store.inventory() if copy.state == "complete"]
    assert store.verify(copy)
    with slot.path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x10]))
    assert not store.verify(copy)


def test_a_truncated_copy_is_damaged(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.open_slots(0, LAYOUT)
    slot = save(store, 0, 1, keep=0)
    os.truncate(slot.path, LAYOUT.file_bytes - PAGE)
    states = [copy.state for copy in store.inventory()]
    assert "damaged" in states
    assert "complete" not in states


@given(st.binary(max_size=200))
def test_a_foreign_header_reads_as_damaged(page: bytes) -> None:
    assert Header.unpack(page) is None


def test_a_header_torn_at_any_byte_never_reads_as_the_new_one(tmp_path: Path) -> None:
    old = Header("complete", 0, 0, 7, LAYOUT, 1).pack()
    new = Header("complete", 0, 0, 8, LAYOUT, 2).pack()
    for cut in range(1, len(new)):
        torn = Header.unpack(new[:cut] + old[cut:])
        assert torn is None or torn.iteration == (8 if new[:cut] + old[cut:] == new else 7)


def test_only_their_user_can_read_the_files(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.open_slots(0, LAYOUT)
    store.write_manifest(0, "{}")
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in store.folder.iterdir()} == {0o600}


def test_the_ranks_of_a_node_may_make_its_store_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        for attempt in range(20):
            folder = tmp_path / f"run{attempt}"
            folder.mkdir()
            assert len(set(pool.map(lambda _, f=folder: make_store(f).folder, range(16)))) == 1
            assert [path.name for path in (folder / "node0").iterdir()] == ["node.json"]


def test_a_foreign_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not a memory store"):
        NodeStore.open(tmp_path)
    (tmp_path / "node.json").write_text("{")
    with pytest.raises(StoreError, match="damaged"):
        NodeStore.open(tmp_path)
    (tmp_path / "node.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(StoreError, match="format 99"):
        NodeStore.open(tmp_path)


def test_a_full_tmpfs_is_an_error_that_says_what_to_do() -> None:
    with tmpfs(size="1m") as folder:
        store = make_store(folder)
        with pytest.raises(StoreError, match="no room for"):
            store.open_slots(0, Layout(1 << 20, 4096, 0))
        assert [copy.path for copy in store.inventory() if copy.path.stat().st_size == 0] == []


def test_a_tmpfs_that_fills_up_later_does_not_touch_a_store_that_is_made() -> None:
    with tmpfs(size="1m") as folder:
        store = make_store(folder)
        store.open_slots(0, LAYOUT)
        with pytest.raises(OSError, match="space"):
            (folder / "hog").write_bytes(bytes(2 << 20))
        for iteration in range(1, 6):
            slot = save(store, 0, iteration, keep=iteration - 1)
            assert slot.damaged_block() is None


def test_the_lock_tells_a_live_run_from_a_leftover(tmp_path: Path) -> None:
    lock = RunLock(tmp_path, "one")
    NodeStore.create(lock.folder / "node0", "one", 0, Topology(1, 1))
    (store,) = find_stores(tmp_path)
    assert store.live
    assert [node.name for node in store.nodes] == ["node0"]
    with pytest.raises(StoreError, match="live run"):
        remove_store(store)
    lock.release(keep=True)
    (store,) = find_stores(tmp_path)
    assert not store.live
    remove_store(store)
    assert find_stores(tmp_path) == []


def test_a_run_that_exists_is_not_started_again(tmp_path: Path) -> None:
    lock = RunLock(tmp_path, "one")
    with pytest.raises(StoreError):
        RunLock(tmp_path, "one")
    lock.release(keep=False)


WRITER = """
import sys
from pathlib import Path
from capricorn.runtime.store.slot import Layout
from capricorn.runtime.store.node_store import NodeStore
from tests.runtime.test_node_store import LAYOUT, fill
store = NodeStore.open(Path(sys.argv[1]))
store.open_slots(0, LAYOUT)
iteration = max(store.iterations(0), default=0)
print("ready", flush=True)
while True:
    keep, iteration = iteration, iteration + 1
    store.commit(fill(store, 0, iteration, keep))
"""


def test_a_writer_killed_at_any_moment_leaves_a_whole_copy(tmp_path: Path) -> None:
    make_store(tmp_path).close()
    for kill in range(12):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / "node0")],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        time.sleep(0.003 + 0.0017 * kill)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        store = NodeStore.open(tmp_path / "node0")
        complete = [copy for copy in store.inventory() if copy.state == "complete"]
        assert complete
        assert all(map(store.verify, complete))
        store.open_slots(0, LAYOUT)
        for copy in complete:
            slot = store.read(0, copy.iteration)
            assert slot is not None
            assert set(bytes(slot.payload)) == {copy.iteration % 256}
        store.close()


# --- copies that are received and may prove damaged


def two_copies(folder: Path) -> NodeStore:
    """Iterations 0 and 1 of owner 0."""
    store = make_store(folder)
    store.open_slots(0, LAYOUT)
    save(store, 0, 0, keep=None)
    save(store, 0, 1, keep=0)
    return store


def put(slot: Slot, iteration: int) -> None:
    """What a peer sends of that iteration."""
    for index in range(slot.layout.num_blocks):
        place = slot.payload[slot.layout.block(index)]
        place[:] = bytes([iteration % 256]) * len(place)
        slot.table[index] = checksum(place)


def test_a_copy_that_is_received_gives_up_none_until_it_is_adopted(tmp_path: Path) -> None:
    store = two_copies(tmp_path)
    before = sorted(path.name for path in store.folder.iterdir())
    slot = store.receive(0, 7, keep=1)
    put(slot, 3)
    slot.abort()  # the peer has died
    assert sorted(store.iterations(0)) == [0, 1]
    slot = store.receive(0, 7, keep=1)
    put(slot, 7)
    store.commit(slot)
    assert sorted(store.iterations(0)) == [0, 1]
    assert sorted(path.name for path in store.folder.iterdir()) == before, "whoever is killed now leaves nothing"
    store.adopt(slot)
    assert sorted(store.iterations(0)) == [1, 7]
    adopted = store.read(0, 7)
    assert adopted is not None
    assert adopted.damaged_block() is None
    assert set(bytes(adopted.payload)) == {7}


def test_a_copy_is_received_in_place_where_a_slot_holds_none(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    slots = store.open_slots(0, LAYOUT)
    save(store, 0, 4, keep=None)
    slot = store.receive(0, 5, keep=4)
    assert slot in slots
    put(slot, 5)
    store.commit(slot)
    store.adopt(slot)
    assert sorted(store.iterations(0)) == [4, 5]


def test_without_room_for_a_spare_copy_what_would_be_taken_next_is_kept(tmp_path: Path) -> None:
    with tmpfs("128k") as root:
        store = two_copies(root)
        fill_up(root / "filling")
        slot = store.receive(0, 7, keep=0)
        assert store.iterations(0) == [0]
        put(slot, 7)
        store.commit(slot)
        store.adopt(slot)
        assert sorted(store.iterations(0)) == [0, 7]
        store.close()


def test_all_copies_are_emptied_if_none_is_to_stay_also_that_of_iteration_0(tmp_path: Path) -> None:
    store = two_copies(tmp_path)
    store.forget_after(0)
    assert store.iterations(0) == [0]
    store.forget_after(None)
    assert store.iterations(0) == []
