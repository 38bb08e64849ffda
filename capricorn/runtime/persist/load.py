"""Loads a checkpoint of the persistent tier into a slot, on any number of ranks, and verifies every tensor of it.

DCP's reader is given our manifest, so nothing is unpickled; and no stretch of a file is parsed before its checksum was
compared. Knows no live state.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
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
from capricorn.runtime.persist.layout import VALUE, Manifest, Stored, damage_of, hash_of, value_key
from capricorn.runtime.save.staging import payload_of
from capricorn.runtime.store.slot import Slot, checksum
from capricorn.systems.flat_state import VALUES, FlatState, SavedValues, StateEntry
from capricorn.systems.small_values import TREE, Encoded, join
from capricorn.systems.tensor_bytes import DTYPES, flat_bytes

FLAT: Final = {"flatten_state_dict": False, "flatten_sharded_tensors": False}
"""Settings of the library's planners: our tensors are named and whole already."""
STEP: Final = "step/"
_STACK = re.compile(r"(step/.*\.experts\.)\d+(\..*)@(\d+)-(\d+)")
"""The count of updates of a stack of experts: `step/layers.0.moe.experts.4.w1@4-7`."""


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor on the CPU."""
    return flat_bytes(tensor).numpy().data


def select(entries: Sequence[StateEntry], manifest: Manifest, rank: int) -> tuple[dict[str, str], list[str]]:
    """Returns, by key of the state, the key in the checkpoint of the tensor that a rank takes; and what does not fit.

    Args:
        entries: of the rank's state.
        manifest: of the checkpoint.
        rank: that takes them.
    """
    sources: dict[str, str] = {}
    problems, stacks = [], _stacks(manifest)
    for entry in entries:
        if entry.is_values:
            continue
        source, what = _source(entry.key, manifest, stacks), f"{entry.dtype} {list(entry.shape)}"
        stored = manifest.tensors.get(source)
        if stored is None:
            problems.append(f"{source} ({what}) is new")
        elif (stored.dtype, stored.shape) != (entry.dtype, entry.shape):
            problems.append(f"{source} was {_described(stored)} and is {what}")
        else:
            sources[entry.key] = source
    of_rank = rank if rank < manifest.world_size else 0
    has_values, had_values = any(entry.is_values for entry in entries), bool(_values_in(manifest, of_rank))
    if has_values != had_values:
        problems.append(f"{value_key(rank, '')} (small values) is {'new' if has_values else 'missing'}")
    return sources, problems


def missing(manifest: Manifest, taken: Iterable[bool]) -> list[str]:
    """Returns in words which lasting tensors of a checkpoint nobody has taken; `taken` is in the order of `lasting`."""
    left = [key for key, is_taken in zip(lasting(manifest), taken, strict=True) if not is_taken]
    return [f"{key} ({_described(manifest.tensors[key])}) is missing" for key in left]


def lasting(manifest: Manifest) -> list[str]:
    """Returns the keys of all tensors that do not depend on the number of ranks."""
    return [key for key in manifest.tensors if not key.startswith(STEP) and VALUE.fullmatch(key) is None]


def _described(stored: Stored) -> str:
    return f"{stored.dtype} {list(stored.shape)}"


def small_values_of(state: FlatState, folder: Path, manifest: Manifest, rank: int, world_size: int) -> Any:
    """Returns the small values that a rank takes: what its state makes of those that were saved, or those themselves.

    Args:
        state: of the rank.
        folder: of the checkpoint.
        manifest: of the checkpoint.
        rank: that takes them.
        world_size: number of ranks of now.

    Raises:
        StoreError: they are damaged.
        ConfigError: they cannot be gone on from, or have no meaning on another number of ranks.
    """

    def of_rank(saved: int) -> Any:
        return _read_values(folder, manifest, saved)

    if state.reshard is not None:
        return state.reshard(SavedValues(manifest.iteration, manifest.world_size, of_rank))
    if world_size != manifest.world_size:
        raise ConfigError(
            f"it is of {manifest.world_size} ranks, and its small values have no meaning on {world_size}; say what "
            "they become there, with FlatState(reshard=...)"
        )
    return of_rank(rank)


def _values_in(manifest: Manifest, rank: int) -> dict[str, str]:
    """Returns, by name, the key of each tensor among the small values of a rank."""
    found = (VALUE.fullmatch(key) for key in manifest.tensors)
    return {match[2]: match[0] for match in found if match is not None and int(match[1]) == rank}


def _read_values(folder: Path, manifest: Manifest, rank: int) -> Any:
    names = _values_in(manifest, rank)
    tensors = {name: torch.empty(_shape(manifest, key), dtype=_dtype(manifest, key)) for name, key in names.items()}
    read(folder, manifest, {names[name]: tensor for name, tensor in tensors.items()})
    if TREE not in tensors:
        return tensors
    try:
        tree = json.loads(bytes_of(tensors.pop(TREE)).tobytes())
    except ValueError:
        raise StoreError(f"{folder.name}: {names[TREE]} is no JSON") from None
    return join(tree, tensors)


def _shape(manifest: Manifest, key: str) -> tuple[int, ...]:
    return manifest.tensors[key].shape


def _dtype(manifest: Manifest, key: str) -> torch.dtype:
    return DTYPES[manifest.tensors[key].dtype]


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
    sources: Mapping[str, str],
    values: Encoded | None,
    folder: Path,
    manifest: Manifest,
) -> None:
    """Fills the payload and the table of a begun slot, and leaves it to be committed.

    Args:
        slot: begun for the iteration of the checkpoint.
        entries: of the rank's state.
        sources: by key of the state, the key in the checkpoint.
        values: its small values, if it has any.
        folder: of the checkpoint.
        manifest: of the checkpoint.

    Raises:
        StoreError: something that is needed is damaged.
    """
    payload_B = payload_of(slot)
    places = {entry.key: _place(payload_B, entry) for entry in entries}
    read(folder, manifest, {source: places[key] for key, source in sources.items()})
    if values is not None:
        values.write(places[VALUES])
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
