"""The state of a rank as a flat range of bytes: every kind of tensor comes back bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from capricorn.errors import ConfigError
from capricorn.runtime.save.staging import CpuStager, payload_of
from capricorn.runtime.store.slot import Layout, Slot, checksum
from capricorn.systems.flat_state import ALIGNMENT, FlatState

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """A tensor whose bytes are random, so that NaNs, infinities and denormals occur."""
    generator = torch.Generator().manual_seed(seed)
    numel = int(torch.tensor(shape).prod()) if shape else 1
    size = torch.empty(0, dtype=dtype).element_size()
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (numel * size,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def bits(tensor: Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def stage(state: FlatState, folder: Path, block_bytes: int = 4096) -> Slot:
    """A slot that holds the state, written as the staging thread writes it."""
    slot = Slot(folder / "owner0.slot0", 0, Layout(state.num_bytes, block_bytes, state.digest))
    slot.begin(1, 0)
    for index in CpuStager(state, [slot]).copy(slot):
        slot.table[index] = checksum(slot.payload[slot.layout.block(index)])
    slot.commit()
    return slot


SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 7, 64, 129]), max_size=3).map(tuple)


@settings(max_examples=60, deadline=None)
@given(tensors=st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES), st.booleans()), min_size=1, max_size=8))
def test_any_mixture_of_tensors_comes_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, tensors: list[tuple[tuple[int, ...], torch.dtype, bool]]
) -> None:
    live = {}
    for seed, (shape, dtype, transposed) in enumerate(tensors):
        tensor = random_bits(shape, dtype, seed)
        live[f"t{seed}"] = tensor.transpose(0, -1) if transposed and len(shape) > 1 else tensor
    state = FlatState(live)
    before = {key: bits(tensor) for key, tensor in live.items()}
    slot = stage(state, tmp_path_factory.mktemp("slot"))
    assert slot.damaged_block() is None
    for tensor in live.values():
        tensor.zero_()
    state.load(payload_of(slot))
    assert {key: bits(tensor) for key, tensor in live.items()} == before


def test_an_odd_number_of_bf16_values_comes_back(tmp_path: Path) -> None:
    tensor = torch.tensor([1.5, -2.25, 3.0], dtype=torch.bfloat16)
    state = FlatState({"w": tensor})
    slot = stage(state, tmp_path)
    tensor.zero_()
    state.load(payload_of(slot))
    assert tensor.tolist() == [1.5, -2.25, 3.0]


def test_tied_weights_are_stored_once_and_named_in_the_manifest() -> None:
    weight = torch.nn.Parameter(torch.randn(8, 8))
    state = FlatState({"embedding": weight, "head": weight, "bias": torch.zeros(8)})
    assert [entry.key for entry in state.entries] == ["embedding", "bias"]
    assert state.manifest()["aliases"] == {"head": "embedding"}


def test_tensors_that_share_a_part_of_their_memory_are_refused() -> None:
    whole = torch.zeros(16)
    with pytest.raises(ConfigError, match="share part"):
        FlatState({"a": whole[:10], "b": whole[8:]})


def test_a_tensor_that_is_more_than_its_bytes_is_refused() -> None:
    class Quantised(Tensor):
        pass

    with pytest.raises(ConfigError, match="Quantised"):
        FlatState({"q": torch.zeros(4).as_subclass(Quantised)})
    with pytest.raises(ConfigError, match="sparse"):
        FlatState({"s": torch.zeros(4, 4).to_sparse()})


def test_experts_of_one_stacked_tensor_are_copied_in_one_go() -> None:
    stacked = torch.zeros(8, 16, 16)
    state = FlatState({f"experts.{expert}.w1": stacked[expert] for expert in range(8)})
    assert len(state.entries) == 8
    assert [(run.offset, run.num_bytes) for run in state.runs] == [(0, stacked.nbytes)]


def test_entries_start_at_cache_lines_and_do_not_overlap() -> None:
    state = FlatState({f"t{n}": torch.zeros(n, dtype=torch.uint8) for n in range(1, 200, 13)})
    end = 0
    for entry in state.entries:
        assert entry.offset % ALIGNMENT == 0
        assert entry.offset >= end
        end = entry.offset + entry.num_bytes
    assert end <= state.num_bytes


def test_the_digest_tells_layouts_apart() -> None:
    base = FlatState({"a": torch.zeros(4), "b": torch.zeros(4)}).digest
    assert FlatState({"a": torch.ones(4), "b": torch.ones(4)}).digest == base
    assert FlatState({"b": torch.zeros(4), "a": torch.zeros(4)}).digest != base
    assert FlatState({"a": torch.zeros(4), "b": torch.zeros(4, dtype=torch.int32)}).digest != base


def test_small_values_are_those_of_the_last_capture_not_of_the_copy(tmp_path: Path) -> None:
    position = torch.tensor(0)
    restored: dict[str, int] = {}
    state = FlatState(
        {"w": torch.zeros(4)},
        capture=lambda: {"position": position},
        publish=lambda values: restored.update(position=int(values["position"])),
    )
    position.fill_(7)
    state.capture()
    position.fill_(8)
    slot = stage(state, tmp_path)
    state.load(payload_of(slot))
    state.publish()
    assert restored == {"position": 7}
