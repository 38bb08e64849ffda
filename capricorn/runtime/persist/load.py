"""Loads a checkpoint of the persistent tier into a slot, on any number of ranks, and verifies every tensor of it.

DCP's reader is given our manifest, so nothing is unpickled; and no stretch of a file is parsed before its checksum was
compared. Knows no live state.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from capricorn.errors import ConfigError, StoreError
from capricorn.runtime.persist.layout import VALUE, Manifest, Stored, damage_of, hash_of, key_of
from capricorn.runtime.save.staging import payload_of
from capricorn.runtime.store.slot import Slot, checksum
from capricorn.systems.flat_state import StateEntry, flat_bytes

FLAT: Final = {"flatten_state_dict": False, "flatten_sharded_tensors": False}
"""Settings of the library's planners: our tensors are named and whole already."""
STEP: Final = "step/"
_STACK = re.compile(r"(step/.*\.experts\.)\d+(\..*)@(\d+)-(\d+)")
"""The count of updates of a stack of experts: `step/layers.0.moe.experts.4.w1@4-7`."""


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor on the CPU."""
    return flat_bytes(tensor).numpy().data


@dataclass(frozen=True, slots=True)
class Selection:
    """The tensors of a checkpoint that make up the state of a rank."""

    sources: dict[str, str] = field(default_factory=dict)
    """By key of the state: the key in the checkpoint."""
    derived: dict[str, StateEntry] = field(default_factory=dict)
    """Small values that depend on the number of ranks, which is another now."""


def select(entries: Sequence[StateEntry], manifest: Manifest, rank: int, world_size: int) -> Selection:
    """Returns the tensors that a rank takes.

    Args:
        entries: of the rank's state.
        manifest: of the checkpoint.
        rank: that takes them.
        world_size: number of ranks of now.

    Raises:
        ConfigError: the checkpoint is of another model, or cannot be spread over that many ranks.
    """
    selection, missing, stacks = Selection(), [], _stacks(manifest)
    for entry in entries:
        if entry.key.startswith(VALUE) and world_size != manifest.world_size:
            selection.derived[entry.key] = entry
            continue
        source = _source(key_of(entry.key, rank), manifest, stacks)
        stored = manifest.tensors.get(source)
        if stored is None or (stored.dtype, stored.shape) != (entry.dtype, entry.shape):
            missing.append(f"{source} ({entry.dtype} {list(entry.shape)})")
        else:
            selection.sources[entry.key] = source
    if missing:
        raise ConfigError(
            f"it is of another model: {len(missing)} of {len(entries)} tensors of rank {rank} are not in it, "
            f"first {', '.join(missing[:3])}"
        )
    unknown = sorted(selection.derived.keys() - {f"{VALUE}{name}" for name in DERIVED})
    if unknown:
        raise ConfigError(f"it is of {manifest.world_size} ranks, and {unknown[0]} has no meaning on {world_size}")
    return selection


def num_lasting(keys: Iterable[str]) -> int:
    """Returns how many of these are tensors that do not depend on the number of ranks."""
    return sum(not key.startswith((STEP, VALUE)) and f"/{VALUE}" not in key for key in keys)


def _stacks(manifest: Manifest) -> dict[tuple[str, str], list[tuple[int, int, str]]]:
    """Returns, by layer and matrix, the first and last expert of each stack, and its key."""
    stacks: dict[tuple[str, str], list[tuple[int, int, str]]] = {}
    for key in manifest.tensors:
        if match := _STACK.fullmatch(key):
            stacks.setdefault((match[1], match[2]), []).append((int(match[3]), int(match[4]), key))
    return stacks


def _source(key: str, manifest: Manifest, stacks: Mapping[tuple[str, str], list[tuple[int, int, str]]]) -> str:
    """Returns the key itself; for a stack of experts that was cut otherwise, the key of one that overlaps it.

    All stacks that overlap must agree, as they do: all experts are updated in every iteration.
    """
    if key in manifest.tensors or (match := _STACK.fullmatch(key)) is None:
        return key
    start, stop = int(match[3]), int(match[4])
    over = [other for first, last, other in stacks.get((match[1], match[2]), []) if first <= stop and last >= start]
    agree = len({manifest.tensors[other].xxh3 for other in over}) == 1
    return over[0] if agree else key


def load_into(
    slot: Slot,
    entries: Sequence[StateEntry],
    selection: Selection,
    folder: Path,
    manifest: Manifest,
    rank: int,
    world_size: int,
) -> None:
    """Fills the payload and the table of a begun slot, and leaves it to be committed.

    Args:
        slot: begun for the iteration of the checkpoint.
        entries: of the rank's state.
        selection: which tensors it takes.
        folder: of the checkpoint.
        manifest: of the checkpoint.
        rank: whose state it is.
        world_size: number of ranks of now.

    Raises:
        StoreError: something that is needed is damaged.
        ConfigError: the checkpoint cannot be spread over that many ranks.
    """
    payload_B = payload_of(slot)
    places = {entry.key: _place(payload_B, entry) for entry in entries}
    wanted = {selection.sources[key]: place for key, place in places.items() if key in selection.sources}
    read(folder, manifest, wanted)
    if selection.derived:
        _derive(selection, places, folder, manifest, rank, world_size)
    for index in range(slot.layout.num_blocks):
        slot.table[index] = checksum(slot.payload[slot.layout.block(index)])


def read(folder: Path, manifest: Manifest, wanted: Mapping[str, Tensor]) -> None:
    """Reads tensors, by their keys in the checkpoint, into these.

    Raises:
        StoreError: one is damaged.
    """
    stored = {key: manifest.tensors[key] for key in wanted}
    _refuse(damage_of(folder, manifest, stored), folder)
    try:
        _read(_Reader(folder, stored), dict(wanted))
    except Exception as error:  # noqa: BLE001 - the library raises what it likes
        raise StoreError(f"{folder.name} cannot be read: {error}") from None
    wrong = [key for key, tensor in wanted.items() if hash_of(bytes_of(tensor)) != stored[key].xxh3]
    _refuse(dict.fromkeys(wrong, "is not what was saved"), folder)


def _read(reader: _Reader, wanted: dict[str, Tensor]) -> None:
    planner, metadata = DefaultLoadPlanner(**FLAT), reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    planner.set_up_planner(wanted, metadata, is_coordinator=True)
    reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()


def _refuse(damage: Mapping[str, str], folder: Path) -> None:
    if damage:
        key, what = next(iter(damage.items()))
        more = f", and {len(damage) - 1} more" if len(damage) > 1 else ""
        raise StoreError(f"{folder.name}: {key} {what}{more}")


def _place(payload_B: Tensor, entry: StateEntry) -> Tensor:
    part_B = payload_B[entry.offset : entry.offset + entry.num_bytes]
    return part_B.view(getattr(torch, entry.dtype)).view(entry.shape)


class _Reader(FileSystemReader):
    """DCP's reader of files, which learns from our manifest what lies where."""

    def __init__(self, folder: Path, stored: Mapping[str, Stored]) -> None:
        super().__init__(folder)
        self._stored = stored

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        places = {
            MetadataIndex(key, [0] * len(stored.shape)): _StorageInfo(stored.file, stored.offset, stored.num_bytes)
            for key, stored in self._stored.items()
        }
        return Metadata({key: _outline(stored) for key, stored in self._stored.items()}, storage_data=places)


def _outline(stored: Stored) -> TensorStorageMetadata:
    size = torch.Size(stored.shape)
    properties = TensorProperties(dtype=getattr(torch, stored.dtype))
    return TensorStorageMetadata(properties, size, [ChunkStorageMetadata(torch.Size([0] * len(size)), size)])


# --- another number of ranks -------------------------------------------------------------------------------------


def _position(saved: Tensor, manifest: Manifest, rank: int, world_size: int) -> Tensor:
    """Returns the number of batches that each rank has read, so that the next is the first that nobody has read.

    Raises:
        ConfigError: there is no such number.
    """
    batches = int(saved) * manifest.world_size
    if batches % world_size:
        raise ConfigError(
            f"{manifest.world_size} ranks have read {batches} batches, which {world_size} ranks cannot share; "
            f"use a number of ranks that divides {batches}, or another iteration"
        )
    return torch.tensor(batches // world_size, dtype=saved.dtype)


def _seed(saved: Tensor, manifest: Manifest, rank: int) -> int:
    """Returns a seed made of the random state of rank 0, and so of the training's seed, the iteration and the rank."""
    return checksum(bytes(bytes_of(saved)) + f"{manifest.iteration} {rank}".encode()) >> 1


def _rng(saved: Tensor, manifest: Manifest, rank: int, world_size: int) -> Tensor:
    return torch.Generator().manual_seed(_seed(saved, manifest, rank)).get_state()


def _cuda_rng(saved: Tensor, manifest: Manifest, rank: int, world_size: int) -> Tensor:
    # Seed and offset, as CUDA's generators have them.
    return torch.tensor([_seed(saved, manifest, rank), 0]).view(torch.uint8)


DERIVED: Final[Mapping[str, tuple[str, Callable[[Tensor, Manifest, int, int], Tensor]]]] = {
    "position": ("position", _position),
    "rng": ("rng", _rng),
    "cuda_rng": ("rng", _cuda_rng),
}
"""By small value: which one of rank 0 it is made from on another number of ranks, and how."""


def _derive(
    selection: Selection, places: Mapping[str, Tensor], folder: Path, manifest: Manifest, rank: int, world_size: int
) -> None:
    for key in selection.derived:
        name, rule = DERIVED[key.removeprefix(VALUE)]
        source = key_of(f"{VALUE}{name}", 0)
        if source not in manifest.tensors:
            raise ConfigError(f"it has no {source}, of which {key} is made on another number of ranks")
        stored = manifest.tensors[source]
        saved = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
        read(folder, manifest, {source: saved})
        places[key].copy_(rule(saved, manifest, rank, world_size))
