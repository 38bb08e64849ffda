"""Loads a checkpoint of the persistent tier into a slot, on any number of ranks, and verifies every tensor of it.

DCP's reader is given our manifest, so nothing is unpickled; and no stretch of a file is parsed before its checksum was
compared. Knows no live state.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
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
from capricorn.systems.flat_state import FlatState, SavedValues, StateEntry, Values, flat_bytes

FLAT: Final = {"flatten_state_dict": False, "flatten_sharded_tensors": False}
"""Settings of the library's planners: our tensors are named and whole already."""
STEP: Final = "step/"
_STACK = re.compile(r"(step/.*\.experts\.)\d+(\..*)@(\d+)-(\d+)")
"""The count of updates of a stack of experts: `step/layers.0.moe.experts.4.w1@4-7`."""


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor on the CPU."""
    return flat_bytes(tensor).numpy().data


def select(state: FlatState, manifest: Manifest, rank: int, world_size: int) -> dict[str, str]:
    """Returns, by key of the state, the key in the checkpoint of the tensor that a rank takes.

    Small values that the state reshards itself are left out.

    Args:
        state: of the rank.
        manifest: of the checkpoint.
        rank: that takes them.
        world_size: number of ranks of now.

    Raises:
        ConfigError: the checkpoint is of another model, or cannot be spread over that many ranks.
    """
    sources, missing, stacks = dict[str, str](), [], _stacks(manifest)
    for entry in state.entries:
        if entry.key.startswith(VALUE) and state.reshard is not None:
            continue
        if entry.key.startswith(VALUE) and world_size != manifest.world_size:
            raise ConfigError(f"it is of {manifest.world_size} ranks, and {entry.key} has no meaning on {world_size}")
        source = _source(key_of(entry.key, rank), manifest, stacks)
        stored = manifest.tensors.get(source)
        if stored is None or (stored.dtype, stored.shape) != (entry.dtype, entry.shape):
            missing.append(f"{source} ({entry.dtype} {list(entry.shape)})")
        else:
            sources[entry.key] = source
    if missing:
        raise ConfigError(
            f"it is of another model: {len(missing)} of {len(state.entries)} tensors of rank {rank} are not in it, "
            f"first {', '.join(missing[:3])}"
        )
    return sources


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


def load_into(slot: Slot, state: FlatState, sources: Mapping[str, str], folder: Path, manifest: Manifest) -> None:
    """Fills the payload and the table of a begun slot, and leaves it to be committed.

    Args:
        slot: begun for the iteration of the checkpoint.
        state: of the rank, of which nothing live is touched.
        sources: which tensors it takes, see `select`.
        folder: of the checkpoint.
        manifest: of the checkpoint.

    Raises:
        StoreError: something that is needed is damaged.
        ConfigError: its small values cannot be gone on from.
    """
    payload_B = payload_of(slot)
    places = {entry.key: _place(payload_B, entry) for entry in state.entries}
    if state.reshard is not None:
        _put(state.reshard(_saved_values(folder, manifest)), places)
    read(folder, manifest, {source: places[key] for key, source in sources.items()})
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


# --- small values ------------------------------------------------------------------------------------------------


def _put(values: Values, places: Mapping[str, Tensor]) -> None:
    """Copies small values to their places.

    Raises:
        ConfigError: one is missing, or of another kind than in this job.
    """
    for key, place in places.items():
        if not key.startswith(VALUE):
            continue
        value = values.get(key.removeprefix(VALUE))
        if value is None or (value.dtype, value.shape) != (place.dtype, place.shape):
            there = "missing" if value is None else f"{value.dtype} {list(value.shape)}"
            raise ConfigError(f"{key} is {place.dtype} {list(place.shape)} in this job, and {there} in it")
        place.copy_(value)


def _saved_values(folder: Path, manifest: Manifest) -> SavedValues:
    """Returns the small values of a checkpoint, which are read when they are asked for."""

    def of_rank(rank: int) -> Values:
        prefix = key_of(VALUE, rank)
        stored = {key: each for key, each in manifest.tensors.items() if key.startswith(prefix)}
        found = {key: torch.empty(each.shape, dtype=getattr(torch, each.dtype)) for key, each in stored.items()}
        read(folder, manifest, found)
        return {key.removeprefix(prefix): value for key, value in found.items()}

    return SavedValues(manifest.iteration, manifest.world_size, of_rank)
