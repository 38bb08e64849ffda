"""Stores of several runs below one root: listed while others come and go, locked at their start, removed when dead."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import pytest

from capricorn.errors import StoreError
from capricorn.runtime.store import node_store
from capricorn.runtime.store.node_store import (
    LOCK,
    NodeStore,
    RunLock,
    find_stores,
    lock_folder,
    remove_store,
    store_at,
)
from capricorn.topology import Topology

CHURNS_S = 1.5
NUMBERS = count()


@contextmanager
def beside(act: Callable[[], object]) -> Iterator[None]:
    """Acts again and again in a thread of its own; what it raises fails the test."""
    is_over, errors = threading.Event(), list[BaseException]()

    def go_on() -> None:
        while not is_over.is_set():
            try:
                act()
            except BaseException as error:  # noqa: BLE001 - raised below
                errors.append(error)
                return

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    assert not errors, errors


def come_and_go(root: Path) -> None:
    run_id = f"neighbour-{next(NUMBERS)}"
    lock = RunLock(root, run_id)
    for node in range(2):
        NodeStore.create(lock.folder / f"node{node}", run_id, node, Topology(2, 1))
    lock.release(keep=False)


def test_a_list_of_stores_is_whole_while_a_neighbour_comes_and_goes(tmp_path: Path) -> None:
    mine = RunLock(tmp_path, "mine")
    RunLock(tmp_path, "dead").release(keep=True)
    with beside(lambda: come_and_go(tmp_path)):
        end_s = time.monotonic() + CHURNS_S
        while time.monotonic() < end_s:
            found = {store.run_id: store.live for store in find_stores(tmp_path)}
            neighbours = {run_id for run_id in found if run_id.startswith("neighbour")}
            assert all(found.pop(run_id) for run_id in neighbours), "a run that lives is no leftover"
            assert found == {"dead": False, "mine": True}
    mine.release(keep=False)


def test_a_run_starts_while_others_look_and_clean(tmp_path: Path) -> None:
    def clean() -> None:
        for store in find_stores(tmp_path):
            with suppress(StoreError):  # the next run of that name has just started
                if not store.live:
                    remove_store(store)

    with beside(clean), beside(lambda: find_stores(tmp_path)):
        end_s = time.monotonic() + CHURNS_S
        while time.monotonic() < end_s:
            lock = RunLock(tmp_path, "mine")
            assert (lock.folder / LOCK).exists()
            lock.release(keep=False)
    assert not any(tmp_path.iterdir())


def test_a_run_that_takes_the_place_of_a_leftover_while_it_is_removed_keeps_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RunLock(tmp_path, "mine").release(keep=True)
    (leftover,) = find_stores(tmp_path)
    locks: list[RunLock] = []
    real = node_store._takes

    def takes(fd: int, kind: int) -> bool:
        if not locks:
            shutil.rmtree(leftover.path)  # somebody else was faster
            monkeypatch.setattr(node_store, "_takes", real)
            locks.append(RunLock(tmp_path, "mine"))
        return real(fd, kind)

    monkeypatch.setattr(node_store, "_takes", takes)
    remove_store(leftover)
    assert [store.live for store in find_stores(tmp_path)] == [True]
    assert (locks[0].folder / LOCK).exists()
    locks[0].release(keep=False)
    remove_store(leftover)  # it is gone


def test_a_store_between_its_folder_and_its_lock_is_no_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_store, "STARTING_S", 5.0)
    (unborn := tmp_path / ".capricorn-r1").mkdir(mode=0o700)
    timer = threading.Timer(0.1, lambda: started.append(lock_folder(unborn, fcntl.LOCK_EX)))
    started: list[int] = []
    monkeypatch.setattr("time.sleep", lambda seconds: timer.join())
    timer.start()
    assert [store.live for store in find_stores(tmp_path)] == [True]
    os.close(started[0])


def test_a_run_whose_unlocked_folder_is_removed_makes_it_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, real = 0, os.open

    def removed_first(path: Path, *arguments: int) -> int:
        nonlocal opened
        opened += 1
        if opened == 1:
            (tmp_path / ".capricorn-r1").rmdir()
        return real(path, *arguments)

    monkeypatch.setattr("os.open", removed_first)
    lock = RunLock(tmp_path, "r1")
    assert opened == 2
    assert lock.folder.is_dir()
    lock.release(keep=False)


def test_an_id_that_is_taken_is_refused_and_leaves_no_second_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = RunLock(tmp_path, "r1")
    with pytest.raises(StoreError, match="cannot make the store"):
        RunLock(tmp_path, "r1")
    assert [path.name for path in tmp_path.iterdir()] == ["capricorn-r1"]
    held = lock_folder(tmp_path / ".capricorn-r2", fcntl.LOCK_EX)
    monkeypatch.setattr(node_store, "LOCK_TIMEOUT_S", 0.1)
    with pytest.raises(StoreError, match="another process holds its lock"):
        RunLock(tmp_path, "r2")
    os.close(held)
    first.release(keep=False)


def test_a_folder_with_a_lock_that_is_held_is_never_removed(tmp_path: Path) -> None:
    lock = RunLock(tmp_path, "r1")
    (store,) = find_stores(tmp_path)
    with pytest.raises(StoreError, match="belongs to a live run"):
        remove_store(store)
    lock.release(keep=True)
    remove_store(store)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["capricorn-r1", ".capricorn-r1"])
def test_a_leftover_is_listed_once_whatever_its_name(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "node0").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / ".other-beef").mkdir()
    (tmp_path / "capricorn-file").touch()
    (tmp_path / "capricorn-link").symlink_to(tmp_path / "other")
    (store,) = find_stores(tmp_path)
    assert (store.path.name, store.run_id, store.live) == (name, "r1", False)
    assert [node.name for node in store.nodes] == ["node0"]
    remove_store(store)
    assert not (tmp_path / name).exists()


def test_what_version_0_2_left_of_a_model_with_a_slash_in_its_name_is_known(tmp_path: Path) -> None:
    (odd := tmp_path / ".tiny-0a1f").mkdir()
    (odd / LOCK).touch()
    (theirs := tmp_path / ".cache-beef").mkdir()
    (theirs / "something").touch()
    assert [store.path for store in find_stores(tmp_path)] == [odd]


def test_a_store_that_is_gone_is_none(tmp_path: Path) -> None:
    assert store_at(tmp_path / "capricorn-r1") is None
    assert find_stores(tmp_path / "nowhere") == []
