"""`capricorn-bench clean`: reaps what dead runs and campaigns left in memory."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

from capricorn.config.scenario import StoreConfig
from capricorn.errors import ConfigError, StoreError
from capricorn.units import format_bytes

from .output import console


@click.command()
@click.option("--root", type=click.Path(path_type=Path), default=StoreConfig().root, show_default=True,
              help="Look for stores in this folder, as store.root of the runs")  # fmt: skip
@click.option("-n", "--dry-run", is_flag=True, help="List them only")
def clean(root: Path, dry_run: bool) -> int:
    """Remove the stores of dead runs, and small file systems of dead campaigns; what is alive is never touched."""
    from capricorn.campaign.small_file_systems import remove_leftovers
    from capricorn.runtime.store.node_store import find_stores, remove_store

    if not root.is_dir():
        raise ConfigError(f"--root {root}: no such folder")
    freed, out = 0, console()
    if not dry_run:
        remove_leftovers()
    for store in find_stores(root):
        if not store.live and not dry_run:
            try:
                remove_store(store)
            except OSError as error:
                raise StoreError(f"cannot remove {store.path}: {error.strerror}") from None
        verb = "live, kept" if store.live else "left over" if dry_run else "removed"
        freed += 0 if store.live else store.num_bytes
        out.print(f"{store.path}  {format_bytes(store.num_bytes)}  {verb}", soft_wrap=True)
    out.print(f"{format_bytes(freed)} {'to free' if dry_run else 'freed'}")
    return 0
