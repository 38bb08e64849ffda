"""What commands that were killed have left on this machine, and how each of it is removed; what is live is told apart.

| leftover                     | where                        | live while                                        |
|------------------------------|------------------------------|---------------------------------------------------|
| memory store                 | the root of the stores       | its launcher, or a rank of its job, holds its lock |
| filler file of a full disk   | where its store's notes say  | its store is                                      |
| memory cgroup of a rank      | anywhere in the hierarchy    | a process is in it, or its run's store is         |
| small file system            | the folder for temporary files | its campaign holds its lock                     |
| folder of `check-system`     | the folder for temporary files | its command holds its lock                      |

Network namespaces and links have no name: the kernel frees them with the last process in them, and all processes of a
run end with its launcher.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from capricorn.campaign import small_file_systems
from capricorn.conformance.subject import CHECK_PREFIX
from capricorn.faults import filler_file, memory_cgroup
from capricorn.files import temporary_folders
from capricorn.runtime.store.node_store import LOCK, RUN_PREFIX, StoreFolder, find_stores, remove_store
from capricorn.units import Bytes

_CGROUP_NAME: Final = re.compile(r"capricorn-(?:(?P<run>.+)-rank\d+|probe-(?P<pid>\d+))")


class Leftover(NamedTuple):
    """Something that a command has made and may have left."""

    path: Path
    num_bytes: Bytes
    is_live: bool
    remove: Callable[[], None]
    """Removes it; raises OSError or CapricornError if that is not possible."""


def find_leftovers(root: Path) -> Iterator[Leftover]:
    """Yields all that commands have made and not yet removed, with the stores below a root; also what is live."""
    for store in find_stores(root):
        yield from _fillers(store)
        yield Leftover(store.path, store.num_bytes, store.live, partial(remove_store, store))
    for prefix, remove in ((small_file_systems.PREFIX, small_file_systems.remove), (CHECK_PREFIX, shutil.rmtree)):
        for folder, is_live in temporary_folders(prefix):
            yield Leftover(folder, 0, is_live, partial(remove, folder))
    for folder in memory_cgroup.find_all():
        yield Leftover(folder, 0, _is_used(folder), folder.rmdir)


def _fillers(store: StoreFolder) -> Iterator[Leftover]:
    """Yields the filler files outside of a store that its run has noted in it, before they were made."""
    for path in filler_file.noted(store.path):
        if path.is_file():
            yield Leftover(path, path.stat().st_size, store.live, path.unlink)


def _is_used(cgroup: Path) -> bool:
    if memory_cgroup.processes_in(cgroup):
        return True
    name = _CGROUP_NAME.fullmatch(cgroup.name)
    if name is None:
        return True  # not one of ours
    if name["pid"]:
        return Path("/proc", name["pid"]).exists()
    return _is_open(f"/{RUN_PREFIX}{name['run']}/{LOCK}")


def _is_open(ending: str) -> bool:
    """Returns whether some process has a file open whose path ends so."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(link).endswith(ending):
                return True
        except OSError:  # it has just been closed, or is another user's
            continue
    return False
