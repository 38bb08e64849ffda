"""The state of one rank as a flat range of bytes: where each tensor lies in it, and how to copy it out and in.

Live tensors lie first, small values last, in a block that has room to grow. Knows tensors, but no store, network, model
or optimizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from operator import eq
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from xxhash import xxh3_64, xxh3_64_intdigest

from capricorn.errors import StateChangedError, StateError
from capricorn.systems import small_values
from capricorn.systems.small_values import Encoded, aligned
from capricorn.systems.tensor_bytes import (
    DTYPES,
    bytes_at,
    content_of,
    describe,
    dtype_name,
    flat_bytes,
    refusal_in_place,
)
from capricorn.units import KIB, Bytes, format_bytes

VALUES: Final = "value/all"
"""Key of the block of small values."""
RESERVED: Final = "value/"
"""Where the names of small values begin, in the persistent tier under `rank<r>/`."""
SPARE_BYTES: Final = 4 * KIB
"""Room for small values beyond twice what they take when they are laid out."""

_RESERVED = re.compile(r"(rank\d+/)?" + RESERVED)

_SHAPE, _DTYPE = vars(torch._C.TensorBase)["shape"].__get__, vars(torch._C.TensorBase)["dtype"].__get__
_COMPLEX = {dtype for dtype in DTYPES.values() if dtype.is_complex}

Values: TypeAlias = Any
"""A tree of plain Python values and tensors, see `small_values`."""
Live: TypeAlias = Mapping[str, Tensor]
"""Live tensors by their global names."""


@dataclass(frozen=True, slots=True)
class StateEntry:
    """A named tensor, or the block of small values, and its place in the shard."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    offset: Bytes
    num_bytes: Bytes

    @property
    def is_values(self) -> bool:
        """Whether it is the block of small values."""
        return self.key == VALUES


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


@dataclass(frozen=True, slots=True)
class SavedValues:
    """The small values in a checkpoint of the persistent tier, which any number of ranks may have saved."""

    iteration: int
    world_size: int
    of_rank: Callable[[int], Values]
    """Reads and verifies those of one of these ranks."""


@dataclass(slots=True)
class _Tensors:
    """Live tensors as they are laid out: those that share all their memory (tied weights) once."""

    entries: list[StateEntry] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    live: dict[str, Tensor] = field(default_factory=dict)
    """Their memory by key, without gradients."""
    words: dict[str, str] = field(default_factory=dict)
    """By every name that was given: what it is."""
    end: Bytes = 0


class _Places:
    """Where live tensors lie in memory, and as what. Takes a few milliseconds for 10,000 of them."""

    def __init__(self, live: Live) -> None:
        tensors = list(live.values())
        self._shapes = [*map(_SHAPE, tensors)]
        self._others = self._look(live, tensors)

    def hold(self, live: Live) -> bool:
        """Tells whether these are the same tensors, in the same places."""
        tensors = list(live.values())
        try:
            # A list of shapes would be a list of new containers, of which so many set off the garbage collector.
            return self._look(live, tensors) == self._others and all(map(eq, map(_SHAPE, tensors), self._shapes))
        except (AttributeError, TypeError, RuntimeError):  # what is no plain tensor any more
            return False

    def _look(self, live: Live, tensors: list[Tensor]) -> list[Any]:
        # Calls of C alone: an attribute of a tensor, looked up in Python, takes twice as long.
        is_contiguous, dtypes = [*map(Tensor.is_contiguous, tensors)], [*map(_DTYPE, tensors)]
        found = [list(live), [*map(Tensor.data_ptr, tensors)], dtypes, is_contiguous]
        if not all(is_contiguous):
            found.append([tensor.stride() for tensor in tensors])
        if not _COMPLEX.isdisjoint(dtypes):
            found.append([tensor.is_conj() for tensor in tensors])
        return found


class FlatState:
    """The state of a rank: live tensors, which change only in the update, and small values, which change at any time.

    The layout depends only on the order, names, dtypes and shapes of the tensors. A tensor that lies elsewhere in
    memory than before is followed, by `capture`.
    """

    def __init__(
        self,
        tensors: Live | Callable[[], Live],
        *,
        capture: Callable[[], Values] | None = None,
        publish: Callable[[Values], None] = lambda values: None,
        aliases: Mapping[str, str] | None = None,
        value_bytes: Bytes | None = None,
        reshard: Callable[[SavedValues], Values] | None = None,
    ) -> None:
        """Lays the state out.

        Args:
            tensors: live tensors by global name, or a function that returns them; they are looked up there again at
                every save. Those that share all their memory (tied weights) are stored once.
            capture: yields the small values (RNG, position, schedule, what an optimizer has besides tensors): any tree
                of plain Python values and tensors, which may be another each time.
            publish: called after a restore with the restored small values, to make them and the tensors effective.
            aliases: further names of tensors, for the manifest.
            value_bytes: room for the small values; by default twice what they take now, and 4 KiB.
            reshard: yields this rank's small values from those in the persistent tier, or raises ConfigError if they
                cannot be gone on from; by default they are taken as they are, and only by as many ranks.

        Raises:
            StateError: a tensor or a small value cannot be kept exactly, or two things have one name; it is named.
        """
        self._lookup = tensors if callable(tensors) else lambda: tensors
        self._capture, self._publish = capture, publish
        self.reshard = reshard
        self._further = dict(aliases or {})
        self.version = 0
        """Counts how often live memory was bound; whoever keeps views of it makes them anew when this has changed."""
        self.tensors: dict[str, Tensor] = {}
        """The live memory of each entry, by key; it is not to be kept beyond the next update."""
        self.runs: list[Run] = []
        live = self._lookup()
        self._laid, self._places = _lay_out(live, self._further), _Places(live)
        self._block_B, self._used_bytes = torch.zeros(0, dtype=torch.uint8), 0
        if capture is not None:
            encoded = Encoded(capture())
            self._block_B = torch.zeros(_room(encoded.num_bytes, value_bytes), dtype=torch.uint8)
            self._keep(encoded)
        self._bind()

    @property
    def entries(self) -> list[StateEntry]:
        """The tensors, and the block of small values if there are any, in the order in which they lie in the shard."""
        if self._capture is None:
            return self._laid.entries
        size = self._block_B.numel()
        return [*self._laid.entries, StateEntry(VALUES, "uint8", (size,), self._laid.end, size)]

    @property
    def aliases(self) -> dict[str, str]:
        """Further names of tensors, each with the key it is stored under."""
        return self._laid.aliases

    @property
    def num_bytes(self) -> Bytes:
        """Size of the shard."""
        return self._laid.end + self._block_B.numel()

    @property
    def digest(self) -> int:
        """A 64-bit digest of the layout, whatever room the small values have."""
        facts = [*map(_facts_of, self._laid.entries), self._capture is not None, self.aliases]
        return xxh3_64_intdigest(json.dumps(facts, sort_keys=True).encode())

    def content_digest(self) -> int:
        """Returns a 64-bit digest of the content, whatever room the small values have; captures them first."""
        self.capture()
        hasher = xxh3_64()
        for tensor in (*self._laid.live.values(), self._block_B[: self._used_bytes]):
            hasher.update(content_of(tensor))
        return hasher.intdigest()

    def manifest(self) -> dict[str, Any]:
        """Returns the layout as a table."""
        return {"num_bytes": self.num_bytes, "entries": [*map(_facts_of, self.entries)], "aliases": self.aliases}

    def capture(self) -> None:
        """Takes in the small values of now, and follows live tensors that have moved; called at every save.

        Raises:
            StateChangedError: a live tensor is of another shape or dtype than was laid out, or the set of them is
                another.
            StateError: a small value cannot be kept, or they have outgrown their room; it is named.
        """
        self.follow()
        if self._capture is not None:
            self._keep(Encoded(self._capture()))

    def values(self) -> Values:
        """Returns the small values of the last capture, or those restored."""
        return small_values.read(self._block_B) if self._capture is not None else {}

    def publish(self) -> None:
        """Makes what was restored effective."""
        self._publish(self.values())

    def load(self, payload_B: Tensor) -> None:
        """Copies a whole payload into the live tensors and small values.

        Raises:
            StateChangedError: as by `capture`; nothing is copied.
        """
        self.follow()
        with torch.no_grad():
            for run in self.runs:
                run.source.copy_(run.view(payload_B))

    def follow(self) -> None:
        """Looks all live tensors up again, and binds anew those that have moved.

        Raises:
            StateChangedError: one is of another shape or dtype than was laid out, or the set of them is another.
        """
        live = self._lookup()
        if self._places.hold(live):
            return
        in_order = {key: live[key] for key in self._laid.words if key in live} | dict(live)
        try:
            laid = _lay_out(in_order, self._further)
        except StateError as error:
            raise StateChangedError(f"{error}; when the state was laid out it could be kept") from None
        for key in {**self._laid.words, **laid.words}:
            was, now = self._laid.words.get(key, "not there"), laid.words.get(key, "not there")
            if was != now:
                raise StateChangedError(
                    f"{shown(key)} was {was} when the state was laid out, and is {now}; lay it out and attach it anew"
                )
        self._laid, self._places = laid, _Places(live)
        self._bind()

    def make_room(self, num_bytes: Bytes) -> None:
        """Gives the small values so much room that the shard has this size, which is not less than now."""
        block_B = torch.zeros(num_bytes - self._laid.end, dtype=torch.uint8)
        block_B[: self._block_B.numel()] = self._block_B
        self._block_B = block_B
        self._bind()

    def _bind(self) -> None:
        """Makes what is copied out and in, from the layout."""
        self.tensors.clear()
        self.tensors.update(self._laid.live)
        if self._capture is not None:
            self.tensors[VALUES] = self._block_B
        self.runs = _runs([(entry, self.tensors[entry.key]) for entry in self.entries])
        self.version += 1

    def _keep(self, encoded: Encoded) -> None:
        if encoded.num_bytes > self._block_B.numel():
            raise StateError(self._outgrown(encoded))
        encoded.write(self._block_B)
        self._used_bytes = encoded.num_bytes

    def _outgrown(self, encoded: Encoded) -> str:
        assert self._capture is not None
        room, need = self._block_B.numel(), encoded.num_bytes
        text = f"the small values take {format_bytes(need)}, and have room for {format_bytes(room)}"
        if self.version:
            was, now = small_values.sizes_of(self.values()), small_values.sizes_of(self._capture())
            grown = [f"{key} from {was.get(key, 0)} to {now[key]} bytes" for key in now if now[key] > was.get(key, 0)]
            text += f", of which grew: {', '.join(grown[:3])}"
        return f"{text}; lay the state out with FlatState(value_bytes={2 * need}), or keep less"


def shown(key: Any) -> str:
    """Returns a name as it stands in a message, which is one line."""
    return key if isinstance(key, str) and key.isprintable() and key else repr(key)


def _facts_of(entry: StateEntry) -> list[Any]:
    return [entry.key, entry.dtype, list(entry.shape), entry.offset, entry.num_bytes]


def _room(num_bytes: Bytes, wanted: Bytes | None) -> Bytes:
    return aligned(2 * num_bytes + SPARE_BYTES if wanted is None else wanted)


def _lay_out(live: Live, further: Mapping[str, str]) -> _Tensors:
    """Returns the layout of tensors.

    Raises:
        StateError: one cannot be kept, or two things have one name.
    """
    laid = _Tensors(aliases=dict(further))
    seen: dict[tuple[object, ...], str] = {}
    for key, tensor in live.items():
        _refuse(key, tensor)
        identity = _identity(tensor)
        tied_to = seen.get(identity) if tensor.numel() else None
        if key in further and further[key] != tied_to:
            raise StateError(f"{shown(key)} is a tensor, and among the aliases another name of {shown(further[key])}")
        if tied_to is not None:
            laid.aliases[key] = tied_to
            laid.words[key] = f"another name of {shown(tied_to)}"
            continue
        seen[identity] = key
        size = tensor.numel() * tensor.element_size()
        laid.entries.append(StateEntry(key, dtype_name(tensor.dtype), tuple(tensor.shape), laid.end, size))
        laid.live[key], laid.words[key] = tensor.detach(), describe(tensor)
        laid.end += aligned(size)
    _refuse_overlap(laid)
    return laid


def _refuse(key: Any, tensor: Any) -> None:
    if not isinstance(key, str) or key != key.encode("utf-8", "ignore").decode():
        raise StateError(f"{key!r} is no name of a tensor: names are text, of characters that UTF-8 has")
    if _RESERVED.match(key):
        raise StateError(f"the tensor {shown(key)} has a name of small values, {RESERVED}...; give it another")
    if not isinstance(tensor, Tensor):
        raise StateError(
            f"{shown(key)} is of type {type(tensor).__name__}, no tensor, and would be kept as it is now for ever; "
            "let `capture` yield it and `publish` put it back"
        )
    if refusal := refusal_in_place(tensor):
        raise StateError(f"{shown(key)} {refusal}")


def _identity(tensor: Tensor) -> tuple[object, ...]:
    storage = tensor.untyped_storage().data_ptr()
    return storage, tensor.storage_offset(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _refuse_overlap(laid: _Tensors) -> None:
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes, key) for key, t in laid.live.items() if t.is_contiguous())
    for (_, stop, key), (start, _, other) in pairwise(span for span in spans if span[0] < span[1]):
        if start < stop:
            raise StateError(
                f"{shown(key)} and {shown(other)} share part of their memory; only whole tensors can be tied"
            )


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
            num_bytes = last.num_bytes + entry.num_bytes
            runs[-1] = Run(last.offset, num_bytes, bytes_at(flat, int(last.source.storage_offset()), num_bytes))
        else:
            runs.append(Run(entry.offset, entry.num_bytes, flat))
    return runs


def _continues(last: Run, offset: Bytes, flat: Tensor) -> bool:
    return (
        last.is_flat
        and last.offset + last.num_bytes == offset
        and last.source.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        and last.source.storage_offset() + last.num_bytes == flat.storage_offset()
    )
