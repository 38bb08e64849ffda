"""Staging: copies the live state into a slot, block by block, beside the training that reads it.

On the CPU the staging thread copies by itself; on CUDA a side stream copies into slots registered as pinned memory,
and the thread only waits for events. Knows no network.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from capricorn.errors import StoreError
from capricorn.runtime.store.slot import Slot
from capricorn.systems.flat_state import FlatState


class Stager(Protocol):
    """Copies bytes from the live state into a slot."""

    def mark(self) -> None:
        """Marks, on the training thread after an update, what must have run before a copy may start."""
        ...

    def copy(self, slot: Slot) -> Iterator[int]:
        """Yields, on the staging thread, the index of each block once its bytes are in the slot, in order."""
        ...

    def close(self) -> None: ...


class BlockCopies:
    """For each block, the copies that start in it: (place in the payload, live memory)."""

    def __init__(self, state: FlatState, slot: Slot) -> None:
        self.payload_B = payload_of(slot)
        self.by_block: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(slot.layout.num_blocks)]
        size = slot.layout.block_bytes
        for run in state.runs:
            if not run.is_flat:
                # A tensor with gaps cannot be cut; its later bytes arrive before the blocks they belong to are hashed.
                self.by_block[run.offset // size].append((run.view(self.payload_B), run.source))
                continue
            start, end = run.offset, run.offset + run.num_bytes
            while start < end:
                stop = min(end, (start // size + 1) * size)
                live = run.source[start - run.offset : stop - run.offset]
                self.by_block[start // size].append((self.payload_B[start:stop], live))
                start = stop


def payload_of(slot: Slot) -> Tensor:
    """Returns the payload of a slot as a uint8 tensor over the same memory."""
    if not slot.layout.payload_bytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(slot.payload, dtype=torch.uint8)


class StateCopies:
    """The copies of a state into each of its slots; made anew once its live memory is another."""

    def __init__(self, state: FlatState, slots: list[Slot]) -> None:
        self._state, self._slots = state, slots
        self._make()

    def into(self, slot: Slot) -> list[list[tuple[Tensor, Tensor]]]:
        """Returns the copies into a slot, by block."""
        if self._version != self._state.version:
            self._make()
        return self._copies[slot.path].by_block

    def payloads(self) -> list[Tensor]:
        """Returns the payload of each slot."""
        return [copies.payload_B for copies in self._copies.values()]

    def clear(self) -> None:
        """Lets go of the slots and the live memory."""
        self._copies.clear()

    def _make(self) -> None:
        self._version = self._state.version
        self._copies = {slot.path: BlockCopies(self._state, slot) for slot in self._slots}


class CpuStager:
    """Copies on the calling thread; a torch copy holds the GIL for its launch only."""

    def __init__(self, state: FlatState, slots: list[Slot]) -> None:
        self._copies = StateCopies(state, slots)

    def mark(self) -> None:
        """Does nothing: on the CPU an update has run when it returns."""

    def copy(self, slot: Slot) -> Iterator[int]:
        for index, copies in enumerate(self._copies.into(slot)):
            for place, live in copies:
                place.copy_(live)
            yield index

    def close(self) -> None:
        self._copies.clear()


AHEAD = 8
"""Number of blocks whose copies are enqueued before the first of them has landed."""


class CudaStager:
    """Copies on a side stream into slots registered with CUDA, so that the copy engine works while kernels run."""

    def __init__(self, state: FlatState, slots: list[Slot], device: torch.device) -> None:
        self._copies = StateCopies(state, slots)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._updated = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._registered: list[int] = []
        for payload_B in self._copies.payloads():
            self._register(payload_B)

    def _register(self, payload_B: Tensor) -> None:
        if not payload_B.numel():
            return
        error = _cudart().cudaHostRegister(payload_B.data_ptr(), payload_B.numel(), 0)
        if int(error) != 0:
            raise StoreError(f"CUDA cannot pin {payload_B.numel()} bytes of the store (error {int(error)})")
        self._registered.append(payload_B.data_ptr())

    def mark(self) -> None:
        self._updated.record(torch.cuda.current_stream(self._stream.device))

    def copy(self, slot: Slot) -> Iterator[int]:
        self._stream.wait_event(self._updated)
        landed: deque[torch.cuda.Event] = deque()
        by_block = self._copies.into(slot)
        for index in range(len(by_block)):
            for copies in by_block[index + len(landed) : index + AHEAD]:
                landed.append(self._enqueue(copies))
            landed.popleft().synchronize()
            yield index

    def _enqueue(self, copies: list[tuple[Tensor, Tensor]]) -> torch.cuda.Event:
        """Enqueues copies; returns an event that tells when they have landed."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            for place, live in copies:
                place.copy_(live, non_blocking=True)
            event.record(self._stream)
        return event

    def close(self) -> None:
        for address in self._registered:
            _cudart().cudaHostUnregister(address)
        self._registered.clear()
        self._copies.clear()


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def make_stager(state: FlatState, slots: list[Slot], device: torch.device) -> Stager:
    """Returns the stager of a device.

    Raises:
        StoreError: CUDA cannot pin the memory of the slots.
    """
    return CudaStager(state, slots, device) if device.type == "cuda" else CpuStager(state, slots)
