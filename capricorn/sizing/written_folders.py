"""The folders that a run writes to, with what each takes of its file system; found out without making any of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from capricorn.config.scenario import Scenario
from capricorn.sizing.memory import file_bytes, persistent_bytes, record_bytes
from capricorn.systems.registry import find
from capricorn.units import Bytes


class WrittenFolder(NamedTuple):
    """A folder that a run writes to."""

    name: str
    """What asks for it, as in `--persist-dir /data`."""
    folder: Path
    """The folder itself; it need not be there yet."""
    num_bytes: Bytes
    """Room that is needed, also for all other folders of the run on the same file system that come before."""
    advice: str
    """What to do where it cannot be written or has too little room."""

    @property
    def there(self) -> Path:
        """The nearest folder above it that is there."""
        return _there(self.folder)

    @property
    def can_be_written(self) -> bool:
        return self.there.is_dir() and os.access(self.there, os.W_OK | os.X_OK)


def written_folders(scenario: Scenario, out: Path) -> list[WrittenFolder]:
    """Returns where a run with its records below `out` writes on disk; its memory store is another affair."""
    persist, out = scenario.persist, out.absolute()
    tier = Path(persist.dir).absolute() if persist.dir else out
    kept, files = persistent_bytes(scenario), file_bytes(scenario)
    folders = [WrittenFolder(f"--out {out}", out, record_bytes(scenario), "name another folder with --out")]
    if files:
        less = "name a folder with more room with --out, or a smaller system.options.keep"
        folders.append(WrittenFolder(f"files of {find(scenario.system.name).label} in {out}", out, files, less))
    if persist.dir or kept:
        name = f"--persist-dir {tier}" if persist.dir else f"persistent tier in {tier}"
        folders.append(WrittenFolder(name, tier, kept, "name a folder with more room, or a smaller persist.keep"))
    taken: dict[int, Bytes] = {}
    for number, each in enumerate(folders):
        device = each.there.stat().st_dev
        taken[device] = taken.get(device, 0) + each.num_bytes
        folders[number] = each._replace(num_bytes=taken[device])
    return folders


def _there(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))
