"""How much memory may still be had: the least that the machine and each memory cgroup above this process leave.

A process is limited by its own cgroup and by every one above it, however the limit came there: a container, a slice of
systemd, a job of Slurm, a pod. Of version 1 and 2, and with or without a cgroup namespace, those are read that are
shown below a mounted hierarchy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from capricorn.units import Bytes

PROC: Final = Path("/proc/self")


class Hierarchy(NamedTuple):
    """The files of one version of cgroups: pairs of what limits and what counts against it."""

    pairs: tuple[tuple[str, str], ...]
    reclaimable: str
    """The key in `memory.stat` of the bytes that the kernel gives back before it refuses any."""


V1: Final = Hierarchy(
    (
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes"),  # memory and swap together
    ),
    "total_inactive_file",
)
V2: Final = Hierarchy((("memory.max", "memory.current"), ("memory.high", "memory.current")), "inactive_file")
"""Beyond `memory.high` nobody is killed, but all are slowed down so much that it is as good as a limit."""
_OF_ABOVE: Final = {"memory.limit_in_bytes": "hierarchical_memory_limit",
                    "memory.memsw.limit_in_bytes": "hierarchical_memsw_limit"}  # fmt: skip
"""By limit of version 1: the key in `memory.stat` of the least of it and those above, also of what is not shown."""


class Mount(NamedTuple):
    """A mounted hierarchy of cgroups."""

    hierarchy: Hierarchy
    root: str
    """The cgroup that is seen at the mount point."""
    folder: Path


def available_memory(proc: Path = PROC) -> Bytes:
    """Returns the memory that can be had: what the kernel says is available, within the limits of all our cgroups."""
    available: Bytes = psutil.virtual_memory().available
    return max(0, min([available, *cgroup_rooms(proc)]))


def cgroup_rooms(proc: Path = PROC) -> Iterator[Bytes]:
    """Yields what each limit leaves of the cgroups that this process is in, from its own up to the top.

    `proc` describes the process: its files `cgroup` and `mountinfo`.
    """
    own = dict(_cgroups_of(_read(proc / "cgroup")))
    for mount in _mounts(_read(proc / "mountinfo")):
        if (path := own.get(_controllers_of(mount.hierarchy))) is not None:
            for folder in _upwards(mount, path):
                yield from _rooms(folder, mount.hierarchy)


def _rooms(folder: Path, hierarchy: Hierarchy) -> Iterator[Bytes]:
    stat = dict(re.findall(r"^(\S+) (\d+)$", _read(folder / "memory.stat"), re.MULTILINE))
    reclaimable = int(stat.get(hierarchy.reclaimable, 0))
    for limit_file, usage_file in hierarchy.pairs:
        limits = [_read(folder / limit_file).strip(), stat.get(_OF_ABOVE.get(limit_file, ""), "")]
        usage = _read(folder / usage_file).strip()
        for limit in (int(each) for each in limits if each.isdigit() and usage.isdigit()):
            yield limit - int(usage) + reclaimable


def _upwards(mount: Mount, path: str) -> Iterator[Path]:
    """Yields the folders of a cgroup and of all those above it that are shown, from the lowest."""
    own, root = Path(path), Path(mount.root)
    # One outside of what is mounted (`/../x` in a namespace of its own) is limited by what is at the mount point.
    below = own.relative_to(root) if own.is_relative_to(root) and ".." not in own.parts else Path()
    folder = mount.folder / below
    yield from (each for each in (folder, *folder.parents) if each.is_relative_to(mount.folder))


def _controllers_of(hierarchy: Hierarchy) -> str:
    return "memory" if hierarchy is V1 else ""


def _cgroups_of(text: str) -> Iterator[tuple[str, str]]:
    """Yields each controller, which is empty for version 2, and the path of our cgroup: `4:cpu,memory:/x`."""
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        for controller in controllers.split(",") if colon else ():
            yield controller, path


def _mounts(text: str) -> Iterator[Mount]:
    """Yields the hierarchies of memory that are mounted: `... root mount-point ... - type source options`."""
    for line in text.splitlines():
        fields, dash, rest = line.partition(" - ")
        words, kinds = fields.split(), rest.split()
        if not dash or len(words) < 5 or len(kinds) < 3:
            continue
        root, folder = _unescape(words[3]), Path(_unescape(words[4]))
        if kinds[0] == "cgroup2":
            yield Mount(V2, root, folder)
        elif kinds[0] == "cgroup" and "memory" in kinds[2].split(","):
            yield Mount(V1, root, folder)


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
