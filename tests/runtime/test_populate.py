"""The memory of a store's files: taken before it is used, refused in words where there is none."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from pathlib import Path

import pytest
from capricorn.cli.options import scenario_from

from capricorn.launch import preflight
from capricorn.runtime.store import populate
from capricorn.runtime.store.node_store import NodeStore
from capricorn.runtime.store.populate import make_mapping, populate_rate, takes_advice
from capricorn.runtime.store.slot import Layout
from capricorn.topology import Topology
from capricorn.units import MIB

MOUNTS = (
    "none / ext4 rw 0 0",
    "tmpfs /dev/shm tmpfs rw,relatime,size=24684096k 0 0",
    "tmpfs /mnt/huge tmpfs rw,huge=advise,size=1g 0 0",
    "tmpfs /mnt/huge/always tmpfs rw,huge=always 0 0",
    "tmpfs /mnt/twice tmpfs rw,huge=advise 0 0",
    "tmpfs /mnt/twice tmpfs rw 0 0",
)


@pytest.mark.parametrize(
    ("folder", "advised"),
    [
        ("/dev/shm/capricorn-x/node0", False),
        ("/mnt/huge/capricorn-x/node0", True),
        ("/mnt/hugely", False),
        ("/mnt/huge/always/x", False),
        ("/mnt/twice", False),
        ("/srv", False),
    ],
)
def test_huge_pages_are_asked_for_where_the_mount_of_the_store_gives_them_to_whoever_asks(
    folder: str, advised: bool
) -> None:
    assert takes_advice(Path(folder), MOUNTS) == advised


@pytest.mark.parametrize("advised", [False, True])
def test_a_mapping_has_all_its_memory_and_keeps_what_the_file_held(tmp_path: Path, advised: bool) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"held")
    with path.open("r+b") as file:
        mapping = make_mapping(file.fileno(), MIB, advised=advised)
        assert os.fstat(file.fileno()).st_blocks * 512 >= MIB
    assert mapping[:5] == b"held\0"
    mapping.close()


@pytest.mark.parametrize(("error", "told"), [(errno.EFAULT, errno.ENOSPC), (errno.ENOMEM, errno.ENOMEM)])
def test_memory_that_is_not_there_is_an_error_in_place_of_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, told: int
) -> None:
    monkeypatch.setattr(populate, "_madvise", lambda *call: error)
    with (tmp_path / "file").open("w+b") as file, pytest.raises(OSError, match=os.strerror(told)) as raised:
        make_mapping(file.fileno(), MIB, advised=True)
    assert raised.value.errno == told


def test_a_kernel_that_cannot_populate_has_every_page_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(populate, "_madvise", lambda *call: errno.EINVAL)
    with (tmp_path / "file").open("w+b") as file:
        mapping = make_mapping(file.fileno(), MIB, advised=True)
        assert os.fstat(file.fileno()).st_blocks * 512 >= MIB
    assert mapping[:] == bytes(MIB)
    assert isinstance(mapping, mmap.mmap)
    mapping.close()


def test_a_sample_of_the_rate_leaves_nothing(tmp_path: Path) -> None:
    assert populate_rate(tmp_path, MIB) > 0
    assert not list(tmp_path.iterdir())


def test_slots_of_all_owners_are_opened_at_once_each_as_if_alone_and_no_thread_is_left(tmp_path: Path) -> None:
    store = NodeStore.create(tmp_path / "node0", "run", 0, Topology(2, 2))
    layouts = {owner: Layout(1000 + owner, 4096, owner) for owner in range(4)}
    store.open_all(layouts, {2: 3})
    for owner, layout in layouts.items():
        slots = store.open_slots(owner, layout)
        assert [slot.path.name for slot in slots] == [f"owner{owner}.slot{n}" for n in range(3 if owner == 2 else 2)]
        assert all(slot.layout == layout for slot in slots)
    store.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("capricorn")]


@pytest.mark.parametrize(("system", "told"), [("capricorn", True), ("none", False), ("torch-save", False)])
def test_before_a_run_it_is_told_how_long_a_store_of_its_size_takes_to_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str, told: bool
) -> None:
    monkeypatch.setattr(preflight, "populate_rate", lambda root: 1e6)
    scenario = scenario_from(system=system, model="mixtral-tiny", device="cpu")
    rows = [check for check in preflight.checks(scenario, tmp_path) if check.name == "start of the store"]
    assert [check.ok for check in rows] == [True] * told
    assert all(check.found.startswith("at most 12.5 s for 12.5 MB: one thread took 1 MB a second") for check in rows)
