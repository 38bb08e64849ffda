"""`capricorn-bench clean`: reaps what dead runs and campaigns left in memory, on small file systems and in cgroups."""

from __future__ import annotations

import os
from pathlib import Path

import rich_click as click

from capricorn.config.scenario import StoreConfig
from capricorn.errors import CapricornError, ConfigError
from capricorn.units import format_bytes

from .output import console


@click.command()
@click.option("--root", type=click.Path(path_type=Path), default=StoreConfig().root, show_default=True,
              help="Look for stores in this folder, as store.root of the runs")  # fmt: skip
@click.option("-n", "--dry-run", is_flag=True, help="List them only")
def clean(root: Path, dry_run: bool) -> int:
    """Remove the stores of dead runs, and what their failures left; what is alive is never touched.

    Failures leave filler files, memory cgroups and small file systems. Exits with 1 if something cannot be removed.
    """
    from capricorn.campaign.leftovers import find_leftovers

    if not root.is_dir():
        raise ConfigError(f"--root {root}: no such folder")
    if not os.access(root, os.R_OK | os.X_OK):
        raise ConfigError(f"--root {root}: cannot be read; run it as the user whose runs they are")
    freed, num_failed, out = 0, 0, console()
    for each in find_leftovers(root):
        verb = "live, kept" if each.is_live else "left over" if dry_run else "removed"
        if not (each.is_live or dry_run):
            try:
                each.remove()
            except FileNotFoundError:
                continue  # somebody else was faster
            except (OSError, CapricornError) as error:
                reason = error.strerror if isinstance(error, OSError) and error.strerror else error
                verb = f"cannot be removed: {reason}"
                num_failed += 1
        freed += 0 if each.is_live or verb.startswith("cannot") else each.num_bytes
        size = f"  {format_bytes(each.num_bytes)}" if each.num_bytes else ""
        out.print(f"{str(each.path)!r}"[1:-1] + f"{size}  {verb}", soft_wrap=True, markup=False)
    out.print(f"{format_bytes(freed)} {'to free' if dry_run else 'freed'}")
    return 1 if num_failed else 0
