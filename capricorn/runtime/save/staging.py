"""Staging: copies the live state into a slot, piece by piece, beside the training that reads it.

A piece is a few blocks that one thread copies at once. Several threads may share the pieces of a save. On the CPU each
of them copies by itself; on CUDA a side stream copies into slots registered as pinned memory, and the threads only wait
for events. Knows no network.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from capricorn.errors import StoreError
from capricorn.runtime.store.slot import Layout, Slot
from capricorn.systems.flat_state import FlatState, Run
from capricorn.units import MIB, Bytes

CPU_PIECE_BYTES: Final = 1 * MIB
"""Small enough that what was copied is hashed from a cache, large enough that threads seldom wait for the GIL."""
CUDA_PIECE_BYTES: Final = 32 * MIB
"""A shard of 20 GB is 600 of them: each costs a hand-over of the GIL, for which a busy training thread takes 5 ms."""


@dataclass(slots=True)
class Piece:
    """Blocks that are copied by one thread, and the copies that fill them."""

    blocks: range
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Each (place in the payload, live memory)."""


class Stager(Protocol):
    """Copies bytes from the live state into a slot."""

    def mark(self) -> None:
        """Marks, on the training thread after an update, what must have run before a copy may start."""
        ...

    def pieces(self, slot: Slot) -> Iterator[Piece]:
        """Returns what there is to copy into a slot, in order; threads that take from it share the work."""
        ...

    def copy(self, pieces: Iterator[Piece]) -> Iterator[int]:
        """Yields, on a staging thread, the index of each block of the pieces that it takes, once it is in the slot."""
        ...

    def close(self) -> None: ...


def cut(runs: list[Run], payload_B: Tensor, layout: Layout, piece_bytes: Bytes) -> list[Piece]:
    """Returns the pieces of a state, in order.

    Args:
        runs: of the state.
        payload_B: of the slot.
        layout: of the slot; a piece is whole blocks.
        piece_bytes: the size that they should have; a tensor with gaps cannot be cut, and makes its piece larger.
    """
    size = max(1, piece_bytes // layout.block_bytes) * layout.block_bytes
    whole = [(run.offset, run.offset + run.num_bytes) for run in runs if not run.is_flat]
    starts = [start for start in range(0, layout.payload_bytes, size) if not _is_within(start, whole)]
    edges, block = [*starts, layout.payload_bytes], layout.block_bytes
    pieces = [Piece(range(start // block, -(-stop // block))) for start, stop in pairwise(edges)]
    for run in runs:
        if not run.is_flat:
            pieces[bisect_right(starts, run.offset) - 1].copies.append((run.view(payload_B), run.source))
            continue
        start, end = run.offset, run.offset + run.num_bytes
        while start < end:
            number = bisect_right(starts, start) - 1
            stop = min(end, edges[number + 1])
            live = run.source[start - run.offset : stop - run.offset]
            pieces[number].copies.append((payload_B[start:stop], live))
            start = stop
    return pieces


def _is_within(place: Bytes, spans: list[tuple[Bytes, Bytes]]) -> bool:
    """Tells whether a cut there would go through one of the spans, which are in order and do not overlap."""
    number = bisect_right(spans, (place,)) - 1
    return number >= 0 and spans[number][0] < place < spans[number][1]


def payload_of(slot: Slot) -> Tensor:
    """Returns the payload of a slot as a uint8 tensor over the same memory."""
    if not slot.layout.payload_bytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(slot.payload, dtype=torch.uint8)


class StateCopies:
    """The copies of a state into each of its slots; made anew once its live memory is another."""

    def __init__(self, state: FlatState, slots: list[Slot], piece_bytes: Bytes) -> None:
        self._state, self._slots, self._piece_bytes = state, slots, piece_bytes
        self.payloads = {slot.path: payload_of(slot) for slot in slots}
        self._make()

    def into(self, slot: Slot) -> Iterator[Piece]:
        """Returns the pieces of a slot; of a list, so that threads which take from it each get another."""
        if self._version != self._state.version:
            self._make()
        return iter(self._pieces[slot.path])

    def clear(self) -> None:
        """Lets go of the slots and the live memory."""
        self._pieces.clear()
        self.payloads.clear()

    def _make(self) -> None:
        self._version = self._state.version
        self._pieces = {
            slot.path: cut(self._state.runs, self.payloads[slot.path], slot.layout, self._piece_bytes)
            for slot in self._slots
        }


class CpuStager:
    """Copies on the calling thread; a torch copy holds the GIL for its launch only."""

    def __init__(self, state: FlatState, slots: list[Slot], piece_bytes: Bytes = CPU_PIECE_BYTES) -> None:
        self._copies = StateCopies(state, slots, piece_bytes)

    def mark(self) -> None:
        """Does nothing: on the CPU an update has run when it returns."""

    def pieces(self, slot: Slot) -> Iterator[Piece]:
        return self._copies.into(slot)

    def copy(self, pieces: Iterator[Piece]) -> Iterator[int]:
        for piece in pieces:
            for place, live in piece.copies:
                place.copy_(live)
            yield from piece.blocks

    def close(self) -> None:
        self._copies.clear()


AHEAD: Final = 8
"""Number of pieces whose copies a thread enqueues before the first of them has landed."""


class Landed(Protocol):
    """Tells when copies have landed; a CUDA event is one."""

    def synchronize(self) -> None:
        """Returns once they have."""
        ...


class CopyStream(Protocol):
    """What staging asks of a device whose copies run beside the thread that enqueues them."""

    def mark(self) -> None:
        """Marks what the training thread has launched so far."""
        ...

    def wait_mark(self) -> None:
        """Holds copies enqueued from now on back until all that was marked has run."""
        ...

    def enqueue(self, copies: list[tuple[Tensor, Tensor]]) -> Landed:
        """Enqueues copies, each (place, live memory); returns what tells that they have landed."""
        ...

    def pin(self, payload_B: Tensor) -> None:
        """Registers host memory, which is not empty, as the target of copies.

        Raises:
            StoreError: the device refuses.
        """
        ...

    def unpin(self, payload_B: Tensor) -> None:
        """Ends what `pin` began."""
        ...


class CudaCopyStream:
    """A side stream, so that the copy engine works while kernels run."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._updated = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def mark(self) -> None:
        self._updated.record(torch.cuda.current_stream(self._stream.device))

    def wait_mark(self) -> None:
        self._stream.wait_event(self._updated)

    def enqueue(self, copies: list[tuple[Tensor, Tensor]]) -> Landed:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            for place, live in copies:
                place.copy_(live, non_blocking=True)
            event.record(self._stream)
        return event

    def pin(self, payload_B: Tensor) -> None:
        error = _cudart().cudaHostRegister(payload_B.data_ptr(), payload_B.numel(), 0)
        if int(error) != 0:
            raise StoreError(
                f"CUDA cannot pin {payload_B.numel()} bytes of the store (error {int(error)}); raise the limit of "
                "locked memory (ulimit -l), or use a smaller --model"
            )

    def unpin(self, payload_B: Tensor) -> None:
        _cudart().cudaHostUnregister(payload_B.data_ptr())


class StreamStager:
    """Copies on a stream of the device, a few pieces ahead of the one that a thread waits for."""

    def __init__(
        self, state: FlatState, slots: list[Slot], stream: CopyStream, piece_bytes: Bytes = CUDA_PIECE_BYTES
    ) -> None:
        """Pins the slots.

        Args:
            state: what is copied.
            slots: what it is copied into.
            stream: of the device.
            piece_bytes: what is copied at once.

        Raises:
            StoreError: the device refuses one of the slots; none is pinned then.
        """
        self._copies, self._stream = StateCopies(state, slots, piece_bytes), stream
        self._pinned: list[Tensor] = []
        try:
            for payload_B in filter(Tensor.numel, self._copies.payloads.values()):
                stream.pin(payload_B)
                self._pinned.append(payload_B)
        except StoreError:
            self.close()
            raise

    def mark(self) -> None:
        self._stream.mark()

    def pieces(self, slot: Slot) -> Iterator[Piece]:
        self._stream.wait_mark()
        return self._copies.into(slot)

    def copy(self, pieces: Iterator[Piece]) -> Iterator[int]:
        ahead: deque[tuple[Piece, Landed]] = deque()
        while True:
            while len(ahead) < AHEAD and (piece := next(pieces, None)) is not None:
                ahead.append((piece, self._stream.enqueue(piece.copies)))
            if not ahead:
                return
            piece, landed = ahead.popleft()
            landed.synchronize()
            yield from piece.blocks

    def close(self) -> None:
        for payload_B in self._pinned:
            self._stream.unpin(payload_B)
        self._pinned.clear()
        self._copies.clear()


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def make_stager(state: FlatState, slots: list[Slot], device: torch.device) -> Stager:
    """Returns the stager of a device.

    Raises:
        StoreError: CUDA cannot pin the memory of the slots.
    """
    return StreamStager(state, slots, CudaCopyStream(device)) if device.type == "cuda" else CpuStager(state, slots)
