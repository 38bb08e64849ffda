"""The direct path: peers are sent the live state through a few buffers, and the local copy is made in small parts.

Knows no network and no plan.

Source: Gemini, SOSP'23, section 5.3. Departs: its buffers are on the receiving device, as collectives write there;
bytes that leave by TCP pass through the sender's memory instead.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from capricorn.runtime.save.staging import Piece, Stager
from capricorn.runtime.store.slot import Layout, Slot, checksum
from capricorn.systems.flat_state import FlatState, Run
from capricorn.systems.tensor_bytes import flat_bytes
from capricorn.units import Bytes, Seconds


class LiveSource:
    """The live state, read block by block in order; it must not change until the last block has been sent.

    While one sub-buffer is sent from, the next ones are filled, on a GPU by a stream of their own. Used by one thread
    at a time, except for `mark`.
    """

    def __init__(
        self, state: FlatState, layout: Layout, device: torch.device, *, buffer_bytes: Bytes, num_buffers: int
    ) -> None:
        """Allocates the buffers.

        Args:
            state: what is read.
            layout: cuts it into blocks.
            device: where the live tensors are.
            buffer_bytes: size of all sub-buffers together; each consists of whole blocks, at least one.
            num_buffers: number of sub-buffers.
        """
        self.layout, self._state = layout, state
        num_blocks = max(1, buffer_bytes // num_buffers // layout.block_bytes)
        self._unit_bytes = min(num_blocks, max(1, layout.num_blocks)) * layout.block_bytes
        self._cut_state()
        self._cuda = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._updated = torch.cuda.Event() if self._cuda else None  # type: ignore[no-untyped-call]
        pinned = self._cuda is not None
        self._buffers = [
            torch.empty(self._unit_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(num_buffers)
        ]
        self._views = [_view(buffer) for buffer in self._buffers]
        self._held: list[int | None] = [None] * num_buffers
        self._landed: dict[int, torch.cuda.Event] = {}

    def mark(self) -> None:
        """Marks, on the training thread after an update, what must have run before a copy may start."""
        if self._cuda is not None and self._updated is not None:
            self._updated.record(torch.cuda.current_stream(self._cuda.device))

    def begin(self) -> None:
        """Forgets what the buffers hold, which is of an older iteration, and follows live memory that is another."""
        if self._version != self._state.version:
            self._cut_state()
        self._held = [None] * len(self._held)
        if self._cuda is not None and self._updated is not None:
            self._cuda.wait_event(self._updated)

    def _cut_state(self) -> None:
        self._version, num_units = self._state.version, -(-self.layout.payload_bytes // self._unit_bytes)
        self._copies = _cut(self._state.runs, self._unit_bytes, num_units)

    def view(self, start: int, stop: int) -> memoryview:
        """Returns these bytes of the shard, which lie in one block; later calls may overwrite them.

        They are valid until as many units have been asked for as there are sub-buffers.
        """
        unit = start // self._unit_bytes
        self._fill(unit)
        if self._cuda is not None:
            for ahead in range(unit + 1, min(unit + len(self._buffers), len(self._copies))):
                self._fill(ahead)
            self._landed[unit].synchronize()
        offset = unit * self._unit_bytes
        return self._views[unit % len(self._views)][start - offset : stop - offset]

    def checksum(self, index: int) -> int:
        """Returns the checksum of a block."""
        block = self.layout.block(index)
        return checksum(self.view(block.start, block.stop))

    def _fill(self, unit: int) -> None:
        place = unit % len(self._buffers)
        if self._held[place] == unit:
            return
        self._held[place] = unit
        if self._cuda is None:
            self._copy(unit, self._buffers[place])
            return
        with torch.cuda.stream(self._cuda):
            self._copy(unit, self._buffers[place])
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._cuda)
            self._landed[unit] = event

    def _copy(self, unit: int, buffer_B: Tensor) -> None:
        end = 0
        for start, piece in self._copies[unit]:
            source_B = piece.source()
            # Between entries lies what an earlier unit has left; nobody reads it, but checksums do.
            buffer_B[end:start].zero_()
            end = start + source_B.numel()
            buffer_B[start:end].copy_(source_B, non_blocking=True)
        buffer_B[end:].zero_()


def _view(buffer_B: Tensor) -> memoryview:
    return memoryview(buffer_B.numpy())  # type: ignore[arg-type]


class _Piece:
    """A stretch of a run that lies in one unit."""

    def __init__(self, run: Run, start: int, stop: int) -> None:
        self.run, self.start, self.stop = run, start, stop

    def source(self) -> Tensor:
        # A tensor with gaps is made contiguous each time: there is no place to keep it.
        flat_B = self.run.source if self.run.is_flat else flat_bytes(self.run.source.contiguous())
        return flat_B[self.start : self.stop]


def _cut(runs: list[Run], unit_bytes: Bytes, num_units: int) -> list[list[tuple[int, _Piece]]]:
    """Returns, by unit of the shard, where in the unit each piece starts, and the piece, in order."""
    cut: list[list[tuple[int, _Piece]]] = [[] for _ in range(num_units)]
    for run in runs:
        start, end = run.offset, run.offset + run.num_bytes
        while start < end:
            stop = min(end, (start // unit_bytes + 1) * unit_bytes)
            piece = _Piece(run, start - run.offset, stop - run.offset)
            cut[start // unit_bytes].append((start % unit_bytes, piece))
            start = stop
    return cut


class CutStager:
    """Stages only while training communicates, or while an update waits; at other times the node receives replicas."""

    def __init__(self, stager: Stager, *, patience_s: Seconds) -> None:
        """`patience_s` bounds how long a block waits."""
        self._stager, self._patience_s = stager, patience_s
        self._may_copy = threading.Event()

    def open(self) -> None:
        """Lets blocks be copied: training communicates, or waits for the copy."""
        self._may_copy.set()

    def shut(self) -> None:
        """Holds blocks back: training computes."""
        self._may_copy.clear()

    def mark(self) -> None:
        self._stager.mark()

    def pieces(self, slot: Slot) -> Iterator[Piece]:
        return self._stager.pieces(slot)

    def copy(self, pieces: Iterator[Piece]) -> Iterator[int]:
        blocks = self._stager.copy(pieces)
        while True:
            self._may_copy.wait(self._patience_s)
            index = next(blocks, None)
            if index is None:
                return
            yield index

    def close(self) -> None:
        self._stager.close()
