"""The state of a rank as a flat range of bytes: every kind of tensor comes back bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from capricorn.errors import StateChangedError, StateError
from capricorn.runtime.save.staging import CpuStager, payload_of
from capricorn.runtime.store.slot import Layout, Slot, checksum
from capricorn.systems.flat_state import FlatState
from capricorn.systems.small_values import ALIGNMENT
from capricorn.systems.tensor_bytes import DTYPES
from tests.support.states import SHAPES, bits, fingerprint, random_bits, staged_blocks, wreck


def stage(state: FlatState, folder: Path, block_bytes: int = 4096) -> Slot:
    """A slot that holds the state, written as the staging thread writes it."""
    slot = Slot(folder / "owner0.slot0", 0, Layout(state.num_bytes, block_bytes, state.digest))
    slot.begin(1, 0)
    for index in staged_blocks(CpuStager(state, [slot]), slot):
        slot.table[index] = checksum(slot.payload[slot.layout.block(index)])
    slot.commit()
    return slot


@settings(max_examples=60, deadline=None)
@given(
    tensors=st.lists(st.tuples(SHAPES, st.sampled_from(list(DTYPES.values())), st.booleans()), min_size=1, max_size=8)
)
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
    wreck(live)
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
    with pytest.raises(StateError, match="share part"):
        FlatState({"a": whole[:10], "b": whole[8:]})


def test_a_tensor_that_is_more_than_its_bytes_is_refused() -> None:
    class Quantised(Tensor):
        pass

    with pytest.raises(StateError, match="Quantised"):
        FlatState({"q": torch.zeros(4).as_subclass(Quantised)})
    with pytest.raises(StateError, match="sparse"):
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
    with_values = FlatState({"a": torch.zeros(4), "b": torch.zeros(4)}, capture=dict).digest
    assert with_values != base
    assert (
        FlatState({"a": torch.zeros(4), "b": torch.zeros(4)}, capture=lambda: [1], value_bytes=999).digest
        == with_values
    )
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


# --- live tensors that are others than before ---------------------------------------------------------------------


MOVES: dict[str, Callable[[Tensor], Any]] = {
    "data": lambda p: setattr(p, "data", torch.full((4, 3), 2.0)),
    "set": lambda p: p.detach_().set_(torch.full((4, 3), 2.0)),
    "strides": lambda p: setattr(p, "data", torch.full((3, 4), 2.0).t()),
    "swap": lambda p: torch.utils.swap_tensors(p, torch.nn.Parameter(torch.full((4, 3), 2.0))),
    "offset": lambda p: setattr(p, "data", torch.full((5, 3), 2.0)[1:]),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES.keys())
def test_a_tensor_that_moves_is_followed_to_where_it_is(tmp_path: Path, move: Callable[[Tensor], Any]) -> None:
    p, other = torch.nn.Parameter(torch.zeros(4, 3)), torch.ones(5)
    state = FlatState({"p": p, "other": other})
    slot = Slot(tmp_path / "slot", 0, Layout(state.num_bytes, 4096, state.digest))
    stager = CpuStager(state, [slot])
    move(p)
    state.capture()
    list(staged_blocks(stager, slot))
    with torch.no_grad():
        p.fill_(0), other.fill_(0)
    state.load(payload_of(slot))
    assert bits(p) == bits(torch.full((4, 3), 2.0))
    assert bits(other) == bits(torch.ones(5))


def test_nothing_is_made_anew_while_nothing_moves() -> None:
    p = torch.nn.Parameter(torch.zeros(3))
    state = FlatState({"p": p})
    before = state.version, state.runs
    for _ in range(3):
        p.data.add_(1)
        state.capture()
    assert (state.version, state.runs) == before
    assert state.runs is before[1]


def test_a_mapping_or_function_that_yields_other_tensors_is_followed() -> None:
    live = {"p": torch.zeros(3)}
    for state in (FlatState(live), FlatState(lambda: live)):
        live["p"] = torch.ones(3)
        state.capture()
        assert state.tensors["p"].data_ptr() == live["p"].data_ptr()


def test_the_order_in_which_tensors_are_looked_up_later_does_not_matter() -> None:
    live = {"p": torch.zeros(3), "q": torch.ones(5)}
    state = FlatState(live)
    before = state.entries, state.digest
    live["p"] = live.pop("p") + 1
    state.capture()
    assert (state.entries, state.digest) == before
    assert state.tensors["p"].tolist() == [1.0, 1.0, 1.0]


def test_a_restore_goes_where_the_tensors_are_now() -> None:
    p = torch.nn.Parameter(torch.zeros(3))
    state = FlatState({"p": p})
    p.data = torch.ones(3)
    state.load(torch.zeros(state.num_bytes, dtype=torch.uint8))
    assert p.tolist() == [0.0, 0.0, 0.0]


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "shape": (lambda live: setattr(live["p"], "data", torch.zeros(4)), r"p was float32 \[3\] .*, and is float32 \[4\]"),
    "resized": (lambda live: live["p"].resize_(2), r"p was float32 \[3\] .*, and is float32 \[2\]"),
    "dtype": (lambda live: setattr(live["p"], "data", torch.zeros(3).double()), r"p was .*, and is float64 \[3\]"),
    "view": (
        lambda live: setattr(live["p"], "data", live["p"].data.view(torch.int32)),
        r"p was .*, and is int32 \[3\]",
    ),
    "freed": (lambda live: live["p"].untyped_storage().resize_(0), "p has no memory"),
    "expanded": (lambda live: setattr(live["p"], "data", torch.zeros(1).expand(3)), "p is expanded"),
    "conjugated": (lambda live: setattr(live["c"], "data", live["c"].data.conj()), "c is a conjugated"),
    "meta": (lambda live: live.update(p=torch.zeros(3, device="meta")), "p is a meta"),
    "untied": (lambda live: live.update(tied=torch.zeros(3)), r"tied was another name of p .*, and is float32 \[3\]"),
    "tied": (lambda live: live.update(q=live["p"]), r"q was float32 \[3\] .*, and is another name of p"),
    "overlapping": (lambda live: live.update(q=live["p"].view(3, 1)), "share"),
    "gone": (lambda live: live.pop("q"), r"q was float32 \[3\] .*, and is not there"),
    "new": (lambda live: live.update(z=torch.zeros(1)), r"z was not there .*, and is float32 \[1\]"),
    "no tensor": (lambda live: live.update(q=None), "q is of type NoneType"),
}


@pytest.mark.parametrize(("change", "says"), CHANGES.values(), ids=CHANGES.keys())
def test_a_tensor_that_is_another_ends_the_save_and_is_named(
    change: Callable[[dict[str, Any]], Any], says: str
) -> None:
    p = torch.zeros(3)
    live: dict[str, Any] = {"p": p, "q": torch.zeros(3), "c": torch.zeros(3, dtype=torch.complex64), "tied": p}
    state = FlatState(live, capture=lambda: {"captured": True})
    change(live)
    with pytest.raises(StateChangedError, match=says) as caught:
        state.capture()
    assert "\n" not in str(caught.value)


# --- small values -------------------------------------------------------------------------------------------------


def test_small_values_may_change_type_size_and_keys_from_save_to_save() -> None:
    now: list[Any] = [{"scale": torch.tensor(65536)}]
    got: list[Any] = []
    state = FlatState({"w": torch.zeros(4)}, capture=lambda: now[0], publish=got.append)
    for values in (
        {"scale": torch.tensor(0.5)},
        {"scale": 0.5, "epoch": None},
        {},
        [1, (2,)],
        {"list": list(range(99))},
    ):
        now[0] = values
        state.capture()
        state.publish()
        assert got.pop() == values


def test_small_values_are_kept_as_they_were_at_the_save() -> None:
    history = [1]
    state = FlatState({}, capture=lambda: {"history": history})
    history.append(2)
    assert state.values() == {"history": [1]}


def test_small_values_that_outgrow_their_room_are_named_and_the_last_ones_stay() -> None:
    history: list[int] = []
    state = FlatState({"w": torch.zeros(4)}, capture=lambda: {"epoch": 3, "history": history})
    history += range(3000)
    with pytest.raises(
        StateError, match=r"which grew: capture\(\)\['history'\] from \d+ to \d+ bytes; .*value_bytes="
    ) as caught:
        state.capture()
    assert "epoch" not in str(caught.value)
    assert state.values() == {"epoch": 3, "history": []}
    assert FlatState({}, capture=lambda: {"history": history}, value_bytes=100_000).values() == {"history": history}


def test_room_that_was_asked_for_and_is_too_small_is_refused_at_once() -> None:
    with pytest.raises(StateError, match="value_bytes"):
        FlatState({}, capture=lambda: list(range(1000)), value_bytes=64)


def test_what_is_no_tensor_among_the_tensors_is_named_with_what_to_do() -> None:
    for value in (3, None, [torch.ones(1)], 0.5):
        with pytest.raises(StateError, match=r"n_iter/w is of type .*let `capture` yield it"):
            FlatState({"w": torch.zeros(4), "n_iter/w": value})  # type: ignore[dict-item]


def test_all_that_an_optimizer_keeps_besides_tensors_comes_back_by_capture() -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(3)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    state = FlatState(
        {f"param/{name}": param for name, param in model.named_parameters()},
        capture=optimizer.state_dict,
        publish=optimizer.load_state_dict,
    )
    before = fingerprint(optimizer.state_dict())
    optimizer.state.clear()
    state.publish()
    assert fingerprint(optimizer.state_dict()) == before


# --- names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["value/rng", "rank0/value/rng", "rank12/value/x", "\ud800", 3, b"w", ("a", 1)])
def test_a_name_that_is_not_a_tensors_own_is_refused(name: Any) -> None:
    with pytest.raises(StateError, match="name"):
        FlatState({name: torch.ones(3)}, capture=lambda: {"rng": torch.ones(3)})


def test_an_alias_that_is_another_tensor_is_refused() -> None:
    w, other = torch.ones(3), torch.ones(3)
    with pytest.raises(StateError, match="head is a tensor, and among the aliases another name of w"):
        FlatState({"w": w, "head": other}, aliases={"head": "w"})
    assert FlatState({"w": w, "head": w}, aliases={"head": "w"}).aliases == {"head": "w"}
