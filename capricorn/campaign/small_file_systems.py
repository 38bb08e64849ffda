"""Small file systems for failures that fill one up: mounted for a campaign, and gone with it or with the next one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir, mkdtemp

from capricorn.config.scenario import Scenario
from capricorn.errors import CapricornError
from capricorn.faults.filler_file import why_not_fill
from capricorn.sizing.memory import STATE_BYTES_PER_PARAM, needs_of, total_params
from capricorn.systems.settings import file_settings_of
from capricorn.units import MIB, Bytes, Seconds

PREFIX, LOCK, MOUNT = "capricorn-small-", "lock", "fs"
MARGIN_BYTES: Bytes = 8 * MIB
STARTING_S: Seconds = 10.0
"""A command has made its lock by then."""
ROOM = 1.25
"""Size of a file system / what its run needs: enough, and soon full."""


@contextmanager
def small_file_system(needed_bytes: Bytes) -> Iterator[Path]:
    """Mounts a tmpfs that holds so much and a little more; unmounts it at the end, whatever still uses it.

    Raises:
        CapricornError: this machine does not let us mount one.
    """
    folder = Path(mkdtemp(prefix=PREFIX))
    with (folder / LOCK).open("w") as lock:
        # Tells ours from the leftover of a command that was killed; it ends with us.
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield _mount(folder / MOUNT, int(ROOM * needed_bytes) + MARGIN_BYTES)
        finally:
            with contextlib.suppress(OSError):
                remove(folder)


def needed_bytes(scenario: Scenario) -> Bytes:
    """Returns what the stores of a run take, or a few checkpoints on the persistent tier if that is more."""
    checkpoint_bytes = STATE_BYTES_PER_PARAM * total_params(scenario.model)
    keep = max(file_settings_of(scenario).keep, scenario.persist.keep)
    return max(needs_of(scenario, cuda=False).store_bytes, (keep + 2) * checkpoint_bytes)


def why_no_mount(needed_bytes: Bytes) -> str:
    """Returns why no file system of that size can be mounted here and filled; nothing if one can."""
    if os.geteuid() != 0:
        return "only root may mount the small file system that it needs"
    try:
        with small_file_system(needed_bytes) as folder:
            return why_not_fill(folder)
    except CapricornError as error:
        return str(error)


def remove_leftovers() -> None:
    """Unmounts and removes what commands that were killed have left."""
    for folder, is_live in find_all():
        if not is_live:
            with contextlib.suppress(OSError):
                remove(folder)


def find_all() -> list[tuple[Path, bool]]:
    """Returns the folders of all small file systems, each with whether its command is alive, or another user's."""
    return [(folder, _is_live(folder)) for folder in sorted(Path(gettempdir()).glob(f"{PREFIX}*"))]


def remove(folder: Path) -> None:
    """Unmounts a file system and removes its folder.

    Raises:
        OSError: that is not possible.
    """
    mount = folder / MOUNT
    if mount.is_mount():
        subprocess.run(["umount", "--lazy", str(mount)], capture_output=True, check=False)
    shutil.rmtree(folder)


def _is_live(folder: Path) -> bool:
    try:
        with (folder / LOCK).open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        # Killed before it made its lock, unless it is about to.
        return folder.exists() and time.time() - folder.stat().st_ctime < STARTING_S
    except OSError:
        return True
    return False


def _mount(folder: Path, size_bytes: Bytes) -> Path:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=0700", "capricorn-small", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CapricornError(f"cannot mount a small file system: {error.strerror}") from None
    if done.returncode:
        raise CapricornError(f"cannot mount a small file system: {done.stderr.strip()}")
    return folder
