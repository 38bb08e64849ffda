"""Writes one rank's part of a checkpoint of the persistent tier, and completes it on rank 0. Knows no training.

A finished folder is one of `torch.distributed.checkpoint`, written by the library itself; writers meet in the folder,
by the files in it, so nothing collective happens beside training. The states of a checkpoint stand in `persister`.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.utils.serialization import config

from capricorn.errors import StoreError, in_words
from capricorn.runtime.persist.layout import (
    METADATA,
    Manifest,
    RankPart,
    Stored,
    folder_of,
    given_up_of,
    hash_of,
    mapped,
    part_file,
    prune,
    rank_file,
    remove,
    sweep,
    sync,
    temporary_of,
    value_key,
)
from capricorn.runtime.persist.load import FLAT, bytes_of
from capricorn.runtime.persist.messages import Answer, Order, WriterTask
from capricorn.runtime.store.slot import COMPLETE, PAGE, Header, checksum, read_header
from capricorn.systems.flat_state import VALUES
from capricorn.systems.small_values import TREE, split
from capricorn.units import Seconds, format_seconds

POLL_S: Final[Seconds] = 0.02


def write_checkpoint(task: WriterTask, order: Order) -> Answer:
    """Writes this rank's part; returns when the checkpoint is complete in the persistent tier or has failed."""
    folder = temporary_of(task.root, order.iteration, task.attempt)
    finish = _complete if task.rank == 0 else _wait_for_rank_0
    try:
        part = _write_part(task, order, folder)
        finish(task, order, folder)
    except BaseException as error:  # noqa: BLE001 - a library raises what it likes, and training goes on
        given_up = given_up_of(folder)
        if task.rank == 0:
            with contextlib.suppress(OSError):
                given_up.mkdir()
        if task.rank == 0 or given_up.exists():
            remove(folder)
        return Answer(iteration=order.iteration, failure=in_words(error))
    return Answer(iteration=order.iteration, num_bytes=sum(part.files.values()))


# --- the part of a rank ------------------------------------------------------------------------------------------


def _write_part(task: WriterTask, order: Order, folder: Path) -> RankPart:
    if task.rank == 0:
        sweep(task.root, but=folder)  # of a writer that was killed; only one checkpoint is on its way
    folder.mkdir(exist_ok=True)
    try:
        part = _write_tensors(task, order, folder)
        _hand_in(folder, task.rank, part)
    except BaseException as error:
        # The disk may be full, and rank 0 waits. If not even that can be written, it does so in vain.
        with contextlib.suppress(OSError):
            (folder / rank_file(task.rank)).unlink(missing_ok=True)
            _hand_in(folder, task.rank, RankPart(failure=in_words(error)))
        raise
    return part


def _write_tensors(task: WriterTask, order: Order, folder: Path) -> RankPart:
    layout = json.loads(task.layout.read_text(encoding="utf-8"))
    header = _complete_header(order)
    with order.slot.open("rb") as file:
        # A private mapping: tensors may be made of it without a copy, and nothing here can change the slot.
        slot = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    _verify(slot, header, order.slot)
    tensors = {
        key: _view(slot, dtype, shape, header.layout.payload_offset + offset)
        for key, dtype, shape, offset, _ in layout["entries"]
    }
    if VALUES in tensors:
        tensors |= _values_in(tensors.pop(VALUES), task.rank)
    results = _write(tensors, folder, task)
    if _complete_header(order) != header:
        raise StoreError(f"{order.slot} was used again while it was written")
    path = folder / rank_file(task.rank)
    sync(path)
    stored = _describe(tensors, results, path, task.rank)
    return RankPart(tensors=stored, aliases=layout["aliases"], files={path.name: path.stat().st_size})


def _values_in(block_B: Tensor, rank: int) -> dict[str, Tensor]:
    """Returns, by key, the tensors among the small values in a block, and what else there is of them."""
    tree, tensors = split(block_B)
    rest = torch.frombuffer(bytearray(json.dumps(tree).encode()), dtype=torch.uint8)
    return {value_key(rank, name): tensor for name, tensor in ({**tensors, TREE: rest}).items()}


def _complete_header(order: Order) -> Header:
    header = read_header(order.slot)
    if header is None or header.state != COMPLETE or header.iteration != order.iteration:
        raise StoreError(f"{order.slot} holds no complete copy of iteration {order.iteration}")
    return header


def _verify(slot: mmap.mmap, header: Header, path: Path) -> None:
    """Raises StoreError unless every block matches its checksum."""
    layout = header.layout
    with memoryview(slot) as view:
        payload = view[layout.payload_offset : layout.payload_offset + layout.payload_bytes]
        table = view[PAGE : PAGE + 8 * layout.num_blocks]
        sums = table.cast("Q")
        is_whole = header.table_checksum == checksum(table) and all(
            checksum(payload[layout.block(index)]) == sums[index] for index in range(layout.num_blocks)
        )
        for each in (sums, table, payload):
            each.release()
    if not is_whole:
        raise StoreError(f"{path} is damaged: its copy of iteration {header.iteration} does not match its checksums")


def _view(slot: mmap.mmap, dtype: str, shape: list[int], offset: int) -> Tensor:
    """Returns a tensor over the bytes at that offset."""
    count = math.prod(shape)
    kind = getattr(torch, dtype)
    if not count:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(slot, dtype=kind, count=count, offset=offset).view(shape)


def _write(tensors: Mapping[str, Tensor], folder: Path, task: WriterTask) -> list[WriteResult]:
    planner, writer = DefaultSavePlanner(**FLAT), _writer(folder)
    planner.set_up_planner(dict(tensors), is_coordinator=task.rank == 0)
    mine = writer.prepare_local_plan(planner.create_local_plan())
    # The library names files by the place of a plan among those of all ranks.
    named = writer.prepare_global_plan([*[SavePlan([])] * task.rank, mine])[task.rank]
    # Its own checksums cost most of the time, and nobody looks at them.
    with config.patch({"save.compute_crc32": False}):  # type: ignore[attr-defined]
        results: list[WriteResult] = writer.write_data(planner.finish_plan(named), planner).wait()
    return results


def _writer(folder: Path) -> FileSystemWriter:
    # Its own fsync leaves out the folder, and of .metadata what is still in Python's buffer; ours does not.
    return FileSystemWriter(folder, sync_files=False)


def _describe(tensors: Mapping[str, Tensor], results: list[WriteResult], path: Path, rank: int) -> dict[str, Stored]:
    stored = {}
    with mapped(path) as data:
        for result in results:
            key, place = result.index.fqn, result.storage_data
            tensor = tensors[key]
            with data[place.offset : place.offset + place.length] as stretch:
                stored[key] = Stored(
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    shape=tuple(tensor.shape),
                    owner=rank,
                    xxh3=hash_of(bytes_of(tensor)),
                    file=path.name,
                    offset=place.offset,
                    num_bytes=place.length,
                    stretch_xxh3=hash_of(stretch),
                )
    return stored


def _hand_in(folder: Path, rank: int, part: RankPart) -> None:
    """Makes the part appear whole: rank 0 may be waiting for it."""
    temporary = folder / f".{part_file(rank)}"
    temporary.write_text(part.model_dump_json(), encoding="utf-8")
    temporary.rename(folder / part_file(rank))


# --- all parts together ------------------------------------------------------------------------------------------


def _complete(task: WriterTask, order: Order, folder: Path) -> None:
    """Waits for the other parts, writes what tells of all of them, and gives the folder its name."""
    names = [part_file(rank) for rank in range(task.world_size)]
    _wait_for(lambda: all((folder / name).exists() for name in names), task, "the parts of all ranks")
    parts = [RankPart.model_validate_json((folder / name).read_bytes()) for name in names]
    for rank, part in enumerate(parts):
        if part.failure:
            raise StoreError(f"rank {rank}: {part.failure}")
    for name in names:
        (folder / name).unlink()
    parts = _distinct(parts)
    _write_metadata(folder, parts)
    sync(folder / METADATA)
    _manifest(task, order, folder, parts).write(folder)
    sync(folder)
    remove(folder_of(task.root, order.iteration))  # of a future that was abandoned, or damaged
    folder.rename(folder_of(task.root, order.iteration))
    sync(task.root)
    prune(task.root, order.iteration, task.keep)


def _distinct(parts: list[RankPart]) -> list[RankPart]:
    """Returns the parts, each name in the first that has it: what several ranks have must be the same.

    Raises:
        StoreError: two ranks have other contents, or other tensors, under one name.
    """
    owners: dict[str, tuple[int, object]] = {}
    distinct = []
    for rank, part in enumerate(parts):
        contents = {key: (stored.dtype, stored.shape, stored.xxh3) for key, stored in part.tensors.items()}
        for name, content in ({**contents, **part.aliases}).items():
            owner, other = owners.setdefault(name, (rank, content))
            if content != other:
                raise StoreError(
                    f"ranks {owner} and {rank} have other contents under the one name {name}, of which the tier could "
                    f"keep one: give it a name on each rank, as rank{rank}/{name}"
                )
        own = {key: stored for key, stored in part.tensors.items() if owners[key][0] == rank}
        distinct.append(part.model_copy(update={"tensors": own}))
    return distinct


def _wait_for_rank_0(task: WriterTask, order: Order, folder: Path) -> None:
    given_up = given_up_of(folder)
    _wait_for(lambda: given_up.exists() or not folder.exists(), task, "rank 0 to complete it")
    if given_up.exists() or not folder_of(task.root, order.iteration).exists():
        raise StoreError("rank 0 gave it up")


def _write_metadata(folder: Path, parts: list[RankPart]) -> None:
    """Writes the library's own table of contents, by the library."""
    writer, planner, plans = _writer(folder), DefaultSavePlanner(**FLAT), []
    for part in parts:
        planner.set_up_planner({key: _outline(stored) for key, stored in part.tensors.items()})
        plans.append(planner.create_local_plan())
    _, metadata = planner.create_global_plan(plans)
    writer.finish(metadata, [[_result(*item) for item in part.tensors.items()] for part in parts])


def _outline(stored: Stored) -> Tensor:
    return torch.empty(stored.shape, dtype=getattr(torch, stored.dtype), device="meta")


def _result(key: str, stored: Stored) -> WriteResult:
    index = MetadataIndex(key, [0] * len(stored.shape))
    place = _StorageInfo(stored.file, stored.offset, stored.num_bytes)
    return WriteResult(index=index, size_in_bytes=stored.num_bytes, storage_data=place)


def _manifest(task: WriterTask, order: Order, folder: Path, parts: list[RankPart]) -> Manifest:
    with mapped(folder / METADATA) as data:
        metadata_xxh3, files = hash_of(data), {METADATA: len(data)}
    tensors: dict[str, Stored] = {}
    aliases: dict[str, str] = {}
    for part in parts:
        tensors |= part.tensors
        aliases |= part.aliases
        files |= part.files
    return Manifest(
        run_id=task.run_id,
        attempt=task.attempt,
        iteration=order.iteration,
        world_size=task.world_size,
        num_nodes=task.num_nodes,
        ranks_per_node=task.ranks_per_node,
        model=task.model,
        tensors=tensors,
        aliases=aliases,
        files=files,
        metadata_xxh3=metadata_xxh3,
    )


def _wait_for(happened: Callable[[], bool], task: WriterTask, what: str) -> None:
    deadline_s = time.monotonic() + task.timeout_s
    while not happened():
        if time.monotonic() > deadline_s:
            raise StoreError(f"rank {task.rank} waited {format_seconds(task.timeout_s)} for {what} in vain")
        time.sleep(POLL_S)
