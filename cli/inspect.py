"""`capricorn-bench inspect`: what a run recorded, and what a store holds, is complete, is damaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from capricorn.config.scenario import StoreConfig
from capricorn.errors import ConfigError, StoreError
from capricorn.records.samples import RECOVERIES, RUN, RecoverySample, RunRecord, read_run, read_samples
from capricorn.runtime.persist.layout import is_checkpoint, is_persistent_tier
from capricorn.runtime.persist.survey import PERSISTENT, PersistedCopy, complete_in, survey_persistent_tier
from capricorn.systems.interface import Copy

from .options import json_option
from .output import console, print_json

if TYPE_CHECKING:
    from capricorn.runtime.store.node_store import NodeStore, StoreFolder

JOB = "job.json"
"""Of a run folder, from its start on."""
COMPLETE, DAMAGED = "complete", "damaged"


@dataclass(frozen=True, slots=True)
class Found:
    """A copy, the node it lies on, and whether its checksums match; None when it is not complete."""

    where: str
    copy: Copy
    verified: bool | None

    @property
    def damaged(self) -> bool:
        return self.copy.state == DAMAGED or self.verified is False

    def facts(self) -> dict[str, Any]:
        copy = self.copy
        return {
            "owner": copy.owner, "iteration": copy.iteration, "where": self.where, "state": copy.state,
            "verified": self.verified, "num_bytes": copy.num_bytes,
        }  # fmt: skip


@click.command()
@click.argument("target")
@click.option("--root", type=click.Path(path_type=Path), default=StoreConfig().root, show_default=True,
              help="Look for stores in this folder, as store.root of the run")  # fmt: skip
@json_option
def inspect(target: str, root: Path, as_json: bool) -> int:
    """Show a run, a store in memory, or checkpoints on disk: give its folder, or the run id."""
    record, folder = _find_run(target)
    store = _find_store(record.run_id if record else target, root)
    tier = _find_tier(record, folder)
    if record is None and store is None and tier is None:
        raise ConfigError(
            f"{target} is neither a run folder (with {RUN} or {JOB}), nor a store, nor a run id below {root}, nor a "
            "folder of checkpoints"
        )
    in_memory = _look(store) if store else []
    on_disk = survey_persistent_tier(tier) if tier else []
    found = [*in_memory, *(Found(PERSISTENT, each.copy, not each.damage) for each in on_disk)]
    iterations = sorted({*_complete_everywhere(in_memory, store), *complete_in(on_disk)})
    if as_json:
        run = {"run": record.model_dump(mode="json")} if record else {}
        print_json({"iterations": iterations, "copies": [each.facts() for each in found], **run})
    else:
        _show(record, folder, store, found, iterations)
        _show_damage(on_disk, tier)
    return 1 if any(each.damaged for each in found) else 0


def _find_run(target: str) -> tuple[RunRecord | None, Path]:
    for folder in (Path(target), Path("results") / target):
        if (folder / RUN).exists():
            return read_run(folder), folder
        if (folder / JOB).exists():
            return _unfinished(folder), folder
    return None, Path(target)


def _unfinished(folder: Path) -> RunRecord:
    """Returns the record that a live or killed run has not written yet, made of what it has written."""
    from capricorn.launch.launcher import record_of
    from capricorn.records.job_file import Job

    started = datetime.fromtimestamp((folder / JOB).stat().st_mtime, UTC)
    record = record_of(Job.read(folder / JOB), folder, started)
    return record.model_copy(update={"verdict": f"no {RUN}: it is live or was killed; {record.verdict}"})


def _find_tier(record: RunRecord | None, folder: Path) -> Path | None:
    """Returns the folder of checkpoints on disk that the target is, or that the run has."""
    if record is None:
        folder = folder.resolve()
        return folder if is_checkpoint(folder) or is_persistent_tier(folder) else None
    named = record.config.persist.dir
    tier = Path(named) if named else folder / PERSISTENT
    return tier if is_persistent_tier(tier) else None


def _find_store(target: str, root: Path) -> StoreFolder | None:
    from capricorn.runtime.store.node_store import find_stores

    path = Path(target)
    roots = (root, path.resolve().parent) if path.exists() else (root,)
    stores = [store for each in roots for store in find_stores(each)]
    return next((s for s in stores if target == s.run_id or path.resolve() == s.path.resolve()), None)


def _look(folder: StoreFolder) -> list[Found]:
    from capricorn.runtime.store.node_store import NodeStore

    try:
        return [each for node in folder.nodes for each in _look_at_node(NodeStore.open(node))]
    except FileNotFoundError:
        raise StoreError(f"{folder.path} vanished while it was read: its run has ended") from None


def _look_at_node(store: NodeStore) -> list[Found]:
    return [_verify(store, copy) for copy in store.inventory()]


def _verify(store: NodeStore, copy: Copy) -> Found:
    where = f"node{store.node}"
    if copy.state != COMPLETE:
        return Found(where, copy, None)
    if store.verify(copy):
        return Found(where, copy, True)
    # A live run may have begun to overwrite the copy meanwhile, which is no damage.
    now = next((later for later in store.inventory() if later.path == copy.path), copy)
    return Found(where, now, False if now == copy else None)


def _complete_everywhere(found: Sequence[Found], folder: StoreFolder | None) -> list[int]:
    """Iterations of which every owner has an undamaged copy somewhere."""
    owners = set(range(_num_owners(folder))) if folder else set()
    held = {(each.copy.iteration, each.copy.owner) for each in found if each.verified}
    iterations = sorted({iteration for iteration, _ in held})
    return [i for i in iterations if owners and all((i, owner) in held for owner in owners)]


def _num_owners(folder: StoreFolder) -> int:
    """Ranks of the run, as any of its nodes noted them."""
    from capricorn.runtime.store.node_store import NodeStore

    return max((NodeStore.open(node).topology.world_size for node in folder.nodes), default=0)


def _show(
    record: RunRecord | None, folder: Path, store: StoreFolder | None, found: Sequence[Found], iterations: list[int]
) -> None:
    from capricorn.report.terminal.listing import copies_table
    from capricorn.report.terminal.run_table import run_table

    out = console()
    if record:
        out.print(run_table(record, list(read_samples(folder / RECOVERIES, RecoverySample))))
        out.print(f"{folder}", soft_wrap=True)
    if store or found:
        out.print(copies_table([(each.where, each.copy, each.verified) for each in found]))
    if store:
        state = "live" if store.live else "left over"
        out.print(f"{store.path}, {state}", soft_wrap=True)
    if store or found:
        out.print(f"complete on all owners: {', '.join(map(str, iterations)) or 'none'}")


def _show_damage(on_disk: Sequence[PersistedCopy], tier: Path | None) -> None:
    out = console()
    if tier:
        out.print(f"{tier}, on disk", soft_wrap=True)
    for each in on_disk:
        if each.damage:
            out.print(f"{each.copy.path}: {each.damage}", soft_wrap=True, style="bold red")
