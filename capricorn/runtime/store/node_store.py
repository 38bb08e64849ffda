"""The memory store of one node: files on tmpfs, one folder per run and node, that outlive every worker.

Folder: <root>/capricorn-<run>/ with the launcher's lock, and in it node<k>/ with node.json, and for each owner whose
copies this node keeps owner<r>.json (the layout of its state) and two slots. It needs no daemon and no port.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

from pydantic import ValidationError

from capricorn.config.fields import FrozenModel
from capricorn.errors import ConfigError, StoreError
from capricorn.runtime.store.slot import AUDIT_EVENT, COMPLETE, Header, Layout, Slot, enlarge, read_header
from capricorn.sizing.memory import NUM_SLOTS
from capricorn.systems.interface import Copy
from capricorn.topology import Topology
from capricorn.units import Bytes, Seconds

RUN_PREFIX: Final = "capricorn-"
_FORMAT = 1
LOCK: Final = "lock"
LOCK_TIMEOUT_S: Final[Seconds] = 5.0
PAUSE_S: Final[Seconds] = 0.005
"""Between two tries to take a lock."""
LOOKS: Final = 3
"""Tries after which a lock is taken to be held for good."""
STARTING_S: Final[Seconds] = 0.05
"""A run that starts has locked its folder by then."""
_NODE = "node.json"
_NODE_NAME = re.compile(r"node\d+")
_ODD_NAME = re.compile(r"\..*-[0-9a-f]{4}", re.DOTALL)
_SLOT_NAME = re.compile(r"owner(\d+)\.slot\d+")


class NodeFacts(FrozenModel):
    """The content of `node.json`: which node of which run a store belongs to."""

    format: int
    run_id: str
    node: int
    num_nodes: int
    ranks_per_node: int


class NodeStore:
    """The copies that one node keeps; implements `MemoryStore`. Each owner's slots have one writer at a time."""

    def __init__(self, folder: Path, facts: NodeFacts) -> None:
        self.folder, self.run_id, self.node = folder, facts.run_id, facts.node
        self.topology = Topology(facts.num_nodes, facts.ranks_per_node)
        self._slots: dict[int, list[Slot]] = {}
        self._pinned: list[Slot] = []

    @classmethod
    def create(cls, folder: Path, run_id: str, node: int, topology: Topology) -> Self:
        """Makes the folder of an empty store, readable by its user alone.

        Args:
            folder: of this node, in the folder of the run.
            run_id: names the run.
            node: this node.
            topology: of the run.

        Raises:
            StoreError: it cannot be made, or it or the folder around it is not ours alone.
        """
        facts = NodeFacts(
            format=_FORMAT,
            run_id=run_id,
            node=node,
            num_nodes=topology.num_nodes,
            ranks_per_node=topology.ranks_per_node,
        )
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            for ours in (folder.parent, folder):
                _refuse_foreign(ours)
            _write_text(folder / _NODE, facts.model_dump_json())
        except OSError as error:
            advice = "make room there, or set store.root"
            raise StoreError(f"cannot make the store {folder}: {error.strerror}; {advice}") from None
        return cls(folder, facts)

    @classmethod
    def open(cls, folder: Path) -> Self:
        """The store in a folder that `create` made.

        Raises:
            StoreError: there is none, or it is of another format or damaged.
        """
        facts = _read_json(folder / _NODE)
        if facts.get("format") != _FORMAT:
            raise StoreError(f"{folder} is a store of format {facts.get('format')!r}; this version reads {_FORMAT}")
        try:
            return cls(folder, NodeFacts.model_validate(facts))
        except (ValidationError, ConfigError):
            raise StoreError(f"{folder / _NODE} is damaged: it does not describe a node") from None

    def open_slots(self, owner: int, layout: Layout, num_slots: int = NUM_SLOTS) -> list[Slot]:
        """Returns the slots of an owner; those that are missing are made, and what survives in the others is kept.

        One more slot than usual allows one of them to be pinned. Copies of the same layout that are smaller, since the
        small values had less room, are enlarged.

        Raises:
            StoreError: there is no room, or they hold a state of another layout.
        """
        self.open_all({owner: layout}, {owner: num_slots})
        return self._slots[owner]

    def open_all(self, layouts: Mapping[int, Layout], num_slots: Mapping[int, int] = MappingProxyType({})) -> None:
        """Opens the slots of several owners as `open_slots` does; their memory is taken by as many threads as cores.

        Args:
            layouts: of the state of each owner.
            num_slots: of owners that have more than usual.

        Raises:
            StoreError: as by `open_slots`.
        """
        files = [
            (owner, self._slot_path(owner, number), layout)
            for owner, layout in layouts.items()
            for number in range(num_slots.get(owner, NUM_SLOTS))
            if owner not in self._slots
        ]
        for owner, path, layout in files:
            self._fit(path, owner, layout)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "capricorn-slots") as pool:
            slots = list(pool.map(lambda file: Slot(file[1], file[0], file[2]), files))
        for slot in slots:
            self._slots.setdefault(slot.owner, []).append(slot)

    def complete_headers(self, owner: int) -> list[Header]:
        """Returns the headers of the complete copies of an owner that lie here, of whatever layout."""
        headers = [header for copy in self.inventory() if copy.owner == owner and (header := read_header(copy.path))]
        return [header for header in headers if header.state == COMPLETE]

    def _slot_path(self, owner: int, number: int) -> Path:
        return self.folder / f"owner{owner}.slot{number}"

    def _fit(self, path: Path, owner: int, layout: Layout) -> None:
        """Makes a slot file one of that layout, if nothing in it is lost by that."""
        if path.is_symlink() or not path.exists():
            return  # a link is refused where it is opened, and left to whoever made it
        if (header := read_header(path)) is None or header.layout == layout:
            return
        if header.state != COMPLETE:
            path.unlink()
        elif header.layout == replace(layout, payload_bytes=min(header.layout.payload_bytes, layout.payload_bytes)):
            enlarge(path, owner, layout)

    def begin(self, owner: int, iteration: int, keep: int | None, attempt: int = 0) -> Slot:
        """Returns the slot to write an iteration into: never one that is pinned, nor the one that holds `keep`.

        A damaged slot is taken first, then the oldest.

        Source: Gemini, SOSP'23, section 4 (two buffers a replica).

        Args:
            owner: whose state is written.
            iteration: of that state.
            keep: the newest iteration that is complete on all ranks; None if there is none.
            attempt: counts the starts of the job.
        """
        kept = self.read(owner, keep) if keep is not None else None
        free = (slot for slot in self._slots[owner] if slot is not kept and slot not in self._pinned)
        slot = min(free, key=_age)
        slot.begin(iteration, attempt)
        return slot

    def receive(self, owner: int, iteration: int, keep: int | None, attempt: int = 0) -> Slot:
        """Returns a slot to write an iteration into that is not verified yet, and may prove damaged half way.

        No complete copy is given up for it: where all slots hold one, it is a spare that nobody finds, until `adopt`.
        Without room for a spare the oldest one but `keep` is given up.

        Args:
            owner: whose state is written.
            iteration: of that state.
            keep: the iteration that is taken if this one proves damaged; None if there is none.
            attempt: counts the starts of the job.
        """
        slots = self._slots[owner]
        if all(slot.is_complete or slot in self._pinned for slot in slots):
            path = self.folder / f"owner{owner}.spare"
            with contextlib.suppress(StoreError):
                path.unlink(missing_ok=True)
                spare = Slot(path, owner, slots[0].layout)
                path.unlink()  # its memory lives as long as it is mapped
                spare.begin(iteration, attempt)
                return spare
        return self.begin(owner, iteration, keep, attempt)

    def adopt(self, copy: Slot, keep: int | None = None) -> None:
        """Puts a verified, complete copy from `receive` into one of its owner's slots, the oldest but `keep`."""
        header = copy.header
        if copy in self._slots[copy.owner] or header is None:
            return
        slot = self.begin(copy.owner, header.iteration, keep, header.attempt)
        slot.payload[:] = copy.payload
        for index in range(slot.layout.num_blocks):
            slot.table[index] = copy.table[index]
        slot.commit()
        copy.close()

    def commit(self, copy: Slot) -> None:
        copy.commit()

    def abort(self, copy: Slot) -> None:
        copy.abort()

    def read(self, owner: int, iteration: int) -> Slot | None:
        """Returns the slot that is a complete copy of that iteration, by its header; None if there is none."""
        return next((slot for slot in self._slots.get(owner, []) if slot.holds(iteration)), None)

    def pin(self, slot: Slot) -> None:
        """Keeps the content of a slot until `unpin`, or until the process ends."""
        self._pinned.append(slot)

    def unpin(self, slot: Slot) -> None:
        """Lets a pinned slot be used again."""
        self._pinned.remove(slot)

    def iterations(self, owner: int) -> list[int]:
        """Returns the iterations of which an owner has a complete copy here, by their headers."""
        headers = (slot.header for slot in self._slots[owner] if slot.is_complete)
        return [header.iteration for header in headers if header is not None]

    def forget_after(self, iteration: int | None) -> None:
        """Empties the slots of later iterations, None for all: after a rollback they belong to an abandoned future."""
        for slots in self._slots.values():
            for slot in slots:
                header = slot.header
                if header is None or iteration is None or header.iteration > iteration:
                    slot.abort()

    def read_manifest(self, owner: int) -> dict[str, Any]:
        """Returns the layout of an owner's state; empty if it is not there or does not read."""
        try:
            return _read_json(self.manifest_path(owner))
        except StoreError:
            return {}

    def manifest_path(self, owner: int) -> Path:
        """Returns the file that holds the layout of that owner's state."""
        return self.folder / f"owner{owner}.json"

    def write_manifest(self, owner: int, manifest: str) -> None:
        """Keeps the layout of an owner's state beside its copies.

        Raises:
            StoreError: there is no room.
        """
        path = self.manifest_path(owner)
        if path.exists() and path.read_text(encoding="utf-8", errors="replace") == manifest:
            return  # after a restart, when there may be no room for it any more
        sys.audit(AUDIT_EVENT, "manifest")
        try:
            _write_text(path, manifest)
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror}; make room there, or set store.root") from None

    def inventory(self) -> list[Copy]:
        """Returns every slot in the folder, as its header alone describes it."""
        copies = []
        for path in sorted(self.folder.iterdir()):
            if (match := _SLOT_NAME.fullmatch(path.name)) is None:
                continue
            owner = int(match[1])
            header = read_header(path)
            if header is None or path.stat().st_size != header.layout.file_bytes:
                copies.append(Copy(owner, 0, "damaged", path))
            else:
                size = header.layout.payload_bytes
                copies.append(Copy(owner, header.iteration, header.state, path, size, header.attempt))
        return copies

    def verify(self, copy: Copy) -> bool:
        """Tells whether every block of a complete copy matches its checksum."""
        header = read_header(copy.path)
        if header is None or header.state != COMPLETE or copy.path.stat().st_size != header.layout.file_bytes:
            return False
        slot = Slot(copy.path, copy.owner, header.layout, create=False)
        try:
            return slot.damaged_block() is None
        finally:
            slot.close()

    def close(self) -> None:
        """Unmaps the slots; the files stay."""
        for slots in self._slots.values():
            for slot in slots:
                slot.close()
        self._slots.clear()


def _age(slot: Slot) -> tuple[bool, int]:
    header = slot.header
    return slot.is_complete, header.iteration if header is not None else 0


@dataclass(frozen=True, slots=True)
class StoreFolder:
    """The folder of one run on this machine."""

    path: Path
    run_id: str
    live: bool
    """Whether its launcher still holds the lock."""
    nodes: tuple[Path, ...]
    num_bytes: Bytes


class RunLock:
    """The folder of a run and the lock that tells it from a leftover; `release` or the end of the process frees it."""

    def __init__(self, root: Path, run_id: str) -> None:
        """Makes and locks the folder.

        Raises:
            StoreError: the root cannot be written, or the run exists already.
        """
        self.folder = root / (RUN_PREFIX + run_id)
        unborn = root / f".{self.folder.name}"
        try:
            # It gets its name once it is locked, so that nobody takes a run that starts for a leftover.
            self._fd = lock_folder(unborn, fcntl.LOCK_EX)
            try:
                unborn.rename(self.folder)
            except OSError:
                shutil.rmtree(unborn, ignore_errors=True)
                os.close(self._fd)
                raise
        except OSError as error:
            raise StoreError(f"cannot make the store {self.folder}: {error.strerror}; set store.root") from None

    def release(self, *, keep: bool) -> None:
        """Removes the folder, unless it is to be kept, and gives up the lock."""
        if not keep:
            # The lock goes last: what is half removed is no leftover either.
            for path in self.folder.iterdir() if self.folder.is_dir() else ():
                if path.name != LOCK:
                    shutil.rmtree(path, ignore_errors=True)
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._fd)


def lock_folder(folder: Path, kind: int, timeout_s: Seconds = LOCK_TIMEOUT_S) -> int:
    """Makes a folder if it is not there and takes its lock, of that kind of flock's; returns the lock's descriptor.

    Who only looks at the folder holds the lock for a moment, and may remove the folder before it is locked: it is
    tried again.

    Raises:
        OSError: it cannot be made, or another process holds the lock.
        StoreError: it is not ours alone.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # it has just been removed
            _refuse_foreign(folder)
            fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            if _takes(fd, kind) and _is_file_of(fd, folder / LOCK):
                return fd
            os.close(fd)
        if time.monotonic() > deadline_s:
            raise TimeoutError(errno.ETIMEDOUT, "another process holds its lock")
        time.sleep(PAUSE_S)


def find_stores(root: Path) -> list[StoreFolder]:
    """Returns the stores of all runs below a root, live or left over, sorted by name; one that vanishes is left out."""
    with contextlib.suppress(FileNotFoundError), os.scandir(root) as entries:
        paths = sorted(Path(entry) for entry in entries if entry.is_dir(follow_symlinks=False) and _is_store(entry))
        return [store for store in map(store_at, paths) if store is not None]
    return []


def store_at(path: Path) -> StoreFolder | None:
    """Returns what the folder of a run holds; None if it is not there, or no more."""
    is_live = _is_live(path)
    files = [Path(folder) / name for folder, folders, names in os.walk(path) for name in (*folders, *names)]
    nodes = tuple(sorted(each for each in files if each.parent == path and _NODE_NAME.fullmatch(each.name)))
    size = sum(map(_allocated, (path, *files)))
    if not path.is_dir():
        return None
    return StoreFolder(path, path.name.removeprefix(".").removeprefix(RUN_PREFIX), is_live, nodes, size)


def remove_store(folder: StoreFolder) -> None:
    """Removes a leftover; one that has vanished, or whose place another run has taken meanwhile, is left alone.

    Raises:
        StoreError: its run is alive.
        OSError: it cannot be removed.
    """
    path = folder.path
    try:
        fd = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        _remove_unlocked(path)
        return
    try:
        if not _takes(fd, fcntl.LOCK_EX):
            raise StoreError(f"{path} belongs to a live run; stop it first")
        with contextlib.suppress(FileNotFoundError):
            if _is_file_of(fd, path / LOCK):  # else the lock that we have is of a folder that is gone
                shutil.rmtree(path)
    finally:
        os.close(fd)


def _remove_unlocked(path: Path) -> None:
    """Removes a folder without a lock. A run that starts there finds it gone, and makes it anew."""
    try:
        path.rmdir()
    except FileNotFoundError:
        return
    except OSError:
        if (path / LOCK).exists():
            raise StoreError(f"{path} belongs to a run that has just started") from None
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)


def _is_store(entry: os.DirEntry[str]) -> bool:
    """Returns whether a folder is a run's, by its name; with a dot it is one that was killed before it was locked.

    Version 0.2 made folders of other names for models with a slash in theirs, with nothing in them but the lock.
    """
    if entry.name.removeprefix(".").startswith(RUN_PREFIX):
        return True
    if not _ODD_NAME.fullmatch(entry.name):
        return False
    with contextlib.suppress(OSError):
        return os.listdir(entry) == [LOCK] and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
    return False


def _is_live(path: Path) -> bool:
    if _is_locked(path / LOCK):
        return True
    if (path / LOCK).exists() and not path.name.startswith("."):
        return False
    time.sleep(STARTING_S)  # it may be about to be locked and then get its name, or about to be gone
    return _is_locked(path / LOCK)


def _allocated(path: Path) -> Bytes:
    try:
        return 512 * path.lstat().st_blocks
    except OSError:  # its run has just ended, or it is another user's
        return 0


def _is_locked(lock: Path) -> bool:
    try:
        fd = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
    except PermissionError:
        return True  # another user's, and not ours to judge
    except OSError:
        return False
    try:
        for _ in range(LOOKS):  # another one may be looking at the same moment
            if _takes(fd, fcntl.LOCK_EX):
                return False
            time.sleep(PAUSE_S)
    finally:
        os.close(fd)
    return True


def _takes(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_file_of(fd: int, path: Path) -> bool:
    """Returns whether the open file still has that name; raises FileNotFoundError if nothing has."""
    return os.path.samestat(os.fstat(fd), path.lstat())


def _refuse_foreign(folder: Path) -> None:
    """Raises StoreError if somebody else prepared the folder, or could put files into it."""
    facts = folder.lstat()
    # In a sticky folder others may add files, but neither remove nor replace ours.
    is_shared = facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not facts.st_mode & stat.S_ISVTX
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or is_shared:
        raise StoreError(f"{folder} is a link, another user's, or others may write to it; remove it or set store.root")


def _write_text(path: Path, text: str) -> None:
    # Under a name of its own, since the ranks of a node may do this at once; readable by its user alone.
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=".")
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(text)
    Path(temporary).replace(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StoreError(f"{path.parent} is not a memory store: cannot read {path.name}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise StoreError(f"{path} is damaged: it is not JSON") from None
    if not isinstance(data, dict):
        raise StoreError(f"{path} is damaged: it is not a table")
    return data
