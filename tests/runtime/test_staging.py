"""Staging: pieces of a state, shared among threads, in a slot as one thread would leave it; a device by a fake one."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from capricorn.errors import StoreError
from capricorn.planner.plan import Plan
from capricorn.runtime.deadline import Deadline
from capricorn.runtime.save.save import ReplicatedSave
from capricorn.runtime.save.staging import AHEAD, CpuStager, StreamStager, cut, payload_of
from capricorn.runtime.save.staging_team import StagingTeam
from capricorn.runtime.store.slot import Layout, Slot
from capricorn.systems.flat_state import FlatState
from tests.support.states import SHAPES, random_bits, staged_blocks

BLOCK = 4096


def slot_of(state: FlatState, folder: Path, name: str = "slot") -> Slot:
    return Slot(folder / name, 0, Layout(state.num_bytes, BLOCK, state.digest))


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.tuples(SHAPES, st.booleans()), min_size=1, max_size=8),
    piece_bytes=st.sampled_from([1, BLOCK, 3 * BLOCK, 1 << 30]),
    num_threads=st.integers(1, 4),
)
def test_threads_that_share_the_pieces_leave_in_the_slot_what_one_thread_does(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[tuple[tuple[int, ...], bool]],
    piece_bytes: int,
    num_threads: int,
) -> None:
    live = {f"t{seed}": random_bits(shape, torch.float32, seed) for seed, (shape, _) in enumerate(shapes)}
    for key, (shape, is_transposed) in zip(list(live), shapes, strict=True):
        if is_transposed and len(shape) > 1:
            live[key] = live[key].transpose(0, -1)
    state, folder = FlatState(live), tmp_path_factory.mktemp("slots")
    alone, shared = slot_of(state, folder, "alone"), slot_of(state, folder, "shared")
    assert list(staged_blocks(CpuStager(state, [alone]), alone)) == list(range(alone.layout.num_blocks))
    stager, team, done = CpuStager(state, [shared], piece_bytes), StagingTeam(num_threads), list[int]()
    pieces = stager.pieces(shared)
    team.run(lambda: done.extend(stager.copy(pieces)))
    team.close(Deadline(10.0))
    assert sorted(done) == list(range(shared.layout.num_blocks))
    assert bytes(shared.payload) == bytes(alone.payload)


def test_a_tensor_with_gaps_lies_in_one_piece_with_all_the_blocks_it_fills(tmp_path: Path) -> None:
    state = FlatState({"a": torch.zeros(5000), "gaps": torch.zeros(100, 90).t(), "b": torch.zeros(5000)})
    slot = slot_of(state, tmp_path)
    pieces = cut(state.runs, payload_of(slot), slot.layout, BLOCK)
    assert [block for piece in pieces for block in piece.blocks] == list(range(slot.layout.num_blocks))
    (with_gaps,) = [piece for piece in pieces if any(place.dim() == 2 for place, _ in piece.copies)]
    assert with_gaps.blocks == range(20_000 // BLOCK, -(-(20_032 + 36_000) // BLOCK))
    assert all(len(piece.blocks) == 1 for piece in pieces if piece is not with_gaps)


@pytest.mark.parametrize("failing", ["capricorn-stage-1", "MainThread"])
def test_whichever_thread_fails_the_work_is_over_on_all_of_them_and_has_failed(failing: str) -> None:
    team, all_begin, ended = StagingTeam(3), threading.Barrier(3), list[str]()

    def work() -> None:
        all_begin.wait(10.0)
        if threading.current_thread().name == failing:
            raise StoreError("torn")
        ended.append(threading.current_thread().name)

    with pytest.raises(StoreError, match="torn"):
        team.run(work)
    assert len(ended) == 2
    all_begin.reset()
    failing = ""
    team.run(work)
    assert len(ended) == 5
    team.close(Deadline(10.0))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("capricorn-stage")]


def test_senders_see_blocks_from_the_first_on_in_whatever_order_they_are_staged() -> None:
    save = ReplicatedSave(1, None, Plan(()), [])
    seen = []
    for index in (2, 0, 3, 1, 5, 4):
        save.note_staged(index)
        seen.append([save.is_block_staged(block) for block in range(6)].count(True))
    assert seen == [0, 1, 1, 4, 4, 6]


class FakeStream:
    """A device that copies only when somebody waits, from its live memory of then."""

    def __init__(self, pins: int = 9) -> None:
        self.pins, self.pinned, self.calls = pins, list[int](), list[str]()
        self.num_flying = self.most_flying = 0

    def mark(self) -> None:
        self.calls.append("mark")

    def wait_mark(self) -> None:
        self.calls.append("wait mark")

    def enqueue(self, copies: list[tuple[Tensor, Tensor]]) -> FakeLanded:
        self.calls.append("enqueue")
        self.num_flying += 1
        self.most_flying = max(self.most_flying, self.num_flying)
        return FakeLanded(self, copies)

    def pin(self, payload_B: Tensor) -> None:
        if len(self.pinned) == self.pins:
            raise StoreError("no more locked memory")
        self.pinned.append(payload_B.data_ptr())

    def unpin(self, payload_B: Tensor) -> None:
        self.pinned.remove(payload_B.data_ptr())


class FakeLanded:
    def __init__(self, stream: FakeStream, copies: list[tuple[Tensor, Tensor]]) -> None:
        self.stream, self.copies = stream, copies

    def synchronize(self) -> None:
        for place, live in self.copies:
            place.copy_(live)
        self.stream.num_flying -= 1


def device_stager(state: FlatState, slots: list[Slot], stream: FakeStream) -> StreamStager:
    return StreamStager(state, slots, stream, piece_bytes=2 * BLOCK)


def test_on_a_device_a_block_is_handed_on_once_it_has_landed_and_few_pieces_are_on_their_way(tmp_path: Path) -> None:
    state = FlatState({"w": torch.arange(40 * 1024, dtype=torch.float32)})
    slot, stream = slot_of(state, tmp_path), FakeStream()
    stager = device_stager(state, [slot], stream)
    stager.mark()
    for index in staged_blocks(stager, slot):
        block = slot.layout.block(index)
        assert bytes(slot.payload[block]) == state.tensors["w"].numpy().tobytes()[block]
    assert stream.calls[:2] == ["mark", "wait mark"]
    assert stream.calls.count("enqueue") == 20
    assert stream.most_flying == AHEAD
    stager.close()
    assert not stream.pinned


def test_a_device_that_pins_only_some_of_the_slots_pins_none(tmp_path: Path) -> None:
    state, stream = FlatState({"w": torch.zeros(1024)}), FakeStream(pins=1)
    with pytest.raises(StoreError, match="locked memory"):
        device_stager(state, [slot_of(state, tmp_path, "a"), slot_of(state, tmp_path, "b")], stream)
    assert not stream.pinned
