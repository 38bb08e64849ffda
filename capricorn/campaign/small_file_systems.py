"""Small file systems for failures that fill one up: mounted for a campaign, and gone with it or with the next one."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from capricorn.config.scenario import Scenario
from capricorn.errors import CapricornError
from capricorn.faults.filler_file import why_not_fill
from capricorn.files import temporary_folder, temporary_folders
from capricorn.sizing.memory import STATE_BYTES_PER_PARAM, needs_of, total_params
from capricorn.systems.settings import file_settings_of
from capricorn.units import MIB, Bytes

PREFIX, MOUNT = "capricorn-small-", "fs"
MARGIN_BYTES: Bytes = 8 * MIB
ROOM = 1.25
"""Size of a file system / what its run needs: enough, and soon full."""


@contextmanager
def small_file_system(needed_bytes: Bytes) -> Iterator[Path]:
    """Mounts a tmpfs that holds so much and a little more; unmounts it at the end, whatever still uses it.

    Raises:
        CapricornError: this machine does not let us mount one.
    """
    with temporary_folder(PREFIX, remove) as folder:
        yield _mount(folder / MOUNT, int(ROOM * needed_bytes) + MARGIN_BYTES)


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
    for folder, is_live in temporary_folders(PREFIX):
        if not is_live:
            with contextlib.suppress(OSError):
                remove(folder)


def remove(folder: Path) -> None:
    """Unmounts a file system and removes its folder.

    Raises:
        OSError: that is not possible.
    """
    mount = folder / MOUNT
    if mount.is_mount():
        subprocess.run(["umount", "--lazy", str(mount)], capture_output=True, check=False)
    shutil.rmtree(folder)


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
