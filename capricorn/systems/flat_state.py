"""The state of one rank as a flat range of bytes: where each tensor lies in it, and how to copy it out and in.

Knows tensors, but no store, network, model or optimizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor
from xxhash import xxh3_64, xxh3_64_intdigest

from capricorn.errors import ConfigError
from capricorn.units import Bytes

ALIGNMENT: Final = 64
"""Entries start at multiples of a cache line, which suits every dtype."""

Values = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class SavedValues:
    """The small values in a checkpoint of the persistent tier, which any number of ranks may have saved."""

    iteration: int
    world_size: int
    of_rank: Callable[[int], Values]
    """Reads and verifies those of one of these ranks."""


@dataclass(frozen=True, slots=True)
class StateEntry:
    """A named tensor and its place in the shard."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    offset: Bytes
    num_bytes: Bytes


@dataclass(frozen=True, slots=True)
class Run:
    """A stretch of the shard that is copied in one go, and the live memory it is copied from.

    `source` is a flat uint8 view of contiguous memory, or the tensor itself if its memory has gaps.
    """

    offset: Bytes
    num_bytes: Bytes
    source: Tensor

    @property
    def is_flat(self) -> bool:
        """Whether the run can be cut at any byte."""
        return self.source.dtype == torch.uint8 and self.source.dim() == 1 and self.source.is_contiguous()

    def view(self, payload_B: Tensor) -> Tensor:
        """Returns the place of this run in a payload, in the shape and dtype of its source."""
        place = payload_B[self.offset : self.offset + self.num_bytes]
        return place.view(self.source.dtype).view(self.source.shape)


class FlatState:
    """The state of a rank: live tensors, which change only in the update, and small values, which change at any time.

    The layout depends only on the order, names, dtypes and shapes given.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        capture: Callable[[], Values] = dict,
        publish: Callable[[Values], None] = lambda values: None,
        aliases: Mapping[str, str] | None = None,
        reshard: Callable[[SavedValues], Values] | None = None,
    ) -> None:
        """Lays the state out.

        Args:
            tensors: live tensors by global name; those that share all their memory (tied weights) are stored once.
            capture: yields the small values (RNG, position, schedule), with the same names and sizes each time.
            publish: called after a restore with the restored small values, to make them and the tensors effective.
            aliases: further names of tensors, for the manifest.
            reshard: yields this rank's small values from those in the persistent tier, or raises ConfigError if they
                cannot be gone on from; by default they are taken as they are, and only by as many ranks.

        Raises:
            ConfigError: two tensors share part of their memory, or one is of a kind that cannot be copied as bytes.
        """
        self._capture, self._publish = capture, publish
        self.reshard = reshard
        self._values = {key: value.detach().clone() for key, value in capture().items()}
        self.aliases = dict(aliases or {})
        self.entries: list[StateEntry] = []
        sources: list[tuple[StateEntry, Tensor]] = []
        seen: dict[tuple[object, ...], str] = {}
        offset = 0
        for key, tensor in [*tensors.items(), *((f"value/{k}", v) for k, v in self._values.items())]:
            identity = _identity(key, tensor)
            if tensor.numel() and identity in seen:
                self.aliases[key] = seen[identity]
                continue
            seen[identity] = key
            num_bytes = tensor.numel() * tensor.element_size()
            entry = StateEntry(key, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset, num_bytes)
            self.entries.append(entry)
            sources.append((entry, tensor.detach()))
            offset += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        _refuse_overlap(sources)
        self.tensors: dict[str, Tensor] = {entry.key: tensor for entry, tensor in sources}
        """The live memory of each entry, by key; it is not to be kept beyond the next update."""
        self.num_bytes: Bytes = offset
        self.runs = _runs(sources)

    @property
    def digest(self) -> int:
        return xxh3_64_intdigest(json.dumps(self.manifest(), sort_keys=True).encode())

    def content_digest(self) -> int:
        """Returns a 64-bit digest of the whole content; captures the small values first."""
        self.capture()
        hasher = xxh3_64()
        with torch.no_grad():
            for tensor in self.tensors.values():
                hasher.update(flat_bytes(tensor.cpu().contiguous()).numpy().data)
        return hasher.intdigest()

    def manifest(self) -> dict[str, Any]:
        entries = [[e.key, e.dtype, list(e.shape), e.offset, e.num_bytes] for e in self.entries]
        return {"num_bytes": self.num_bytes, "entries": entries, "aliases": self.aliases}

    def capture(self) -> None:
        for key, value in self._capture().items():
            self._values[key].copy_(value)

    def publish(self) -> None:
        self._publish(self._values)

    def load(self, payload_B: Tensor) -> None:
        """Copies a whole payload into the live tensors and small values."""
        with torch.no_grad():
            for run in self.runs:
                run.source.copy_(run.view(payload_B))


def _identity(key: str, tensor: Tensor) -> tuple[object, ...]:
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_quantized:
        raise ConfigError(f"{key} is a {type(tensor).__name__} of layout {tensor.layout}; only plain tensors are kept")
    storage = tensor.untyped_storage().data_ptr()
    return storage, tensor.storage_offset(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _refuse_overlap(sources: list[tuple[StateEntry, Tensor]]) -> None:
    spans = sorted(
        (t.data_ptr(), t.data_ptr() + e.num_bytes, e.key) for e, t in sources if t.is_contiguous() and e.num_bytes
    )
    for (_, stop, key), (start, _, other) in pairwise(spans):
        if start < stop:
            raise ConfigError(f"{key} and {other} share part of their memory; only whole tensors can be tied")


def _runs(sources: list[tuple[StateEntry, Tensor]]) -> list[Run]:
    # Neighbours in the shard that are neighbours in memory (the experts of one stacked tensor) become one copy.
    runs: list[Run] = []
    for entry, tensor in sources:
        if not entry.num_bytes:
            continue
        if not tensor.is_contiguous():
            runs.append(Run(entry.offset, entry.num_bytes, tensor))
            continue
        flat = flat_bytes(tensor)
        last = runs[-1] if runs else None
        if last is not None and _continues(last, entry.offset, flat):
            merged = _span(flat, int(last.source.storage_offset()), last.num_bytes + entry.num_bytes)
            runs[-1] = Run(last.offset, merged.numel(), merged)
        else:
            runs.append(Run(entry.offset, entry.num_bytes, flat))
    return runs


def flat_bytes(tensor: Tensor) -> Tensor:
    """Returns the memory of a contiguous tensor as a flat uint8 view."""
    size = tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), tensor.storage_offset() * size, (tensor.numel() * size,), (1,))


def _span(flat: Tensor, start: int, num_bytes: Bytes) -> Tensor:
    whole = torch.empty(0, dtype=torch.uint8, device=flat.device)
    return whole.set_(flat.untyped_storage(), start, (num_bytes,), (1,))


def _continues(last: Run, offset: Bytes, flat: Tensor) -> bool:
    return (
        last.is_flat
        and last.offset + last.num_bytes == offset
        and last.source.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        and last.source.storage_offset() + last.num_bytes == flat.storage_offset()
    )
