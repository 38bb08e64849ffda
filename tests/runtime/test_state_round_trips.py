"""Any state that is laid out comes back bit for bit, from memory and from the persistent tier; else it is refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings

from capricorn.errors import StateChangedError, StateError
from capricorn.runtime.persist.layout import folder_of
from capricorn.runtime.save.live_source import LiveSource
from capricorn.runtime.store.slot import Layout
from capricorn.systems.flat_state import FlatState, shown
from capricorn.systems.tensor_bytes import DTYPES
from tests.support.solo import attach, only_rank, persist, restored, save
from tests.support.spawn import run_ranks
from tests.support.states import KEPT, Given, bits, fingerprint, givens, plain_values, random_bits, shaped, wreck


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with only_rank(tmp_path_factory.mktemp("group")):
        yield


def contents(tensors: Any) -> dict[str, bytes]:
    return {key: bits(tensor) for key, tensor in tensors.items()}


@settings(max_examples=100, deadline=None)
@given(state=givens())
def test_any_tensor_is_laid_out_or_refused_by_name(state: Given) -> None:
    refused = ""
    try:
        FlatState(dict(state.tensors))
    except StateError as error:
        refused = str(error)
    assert bool(refused) == bool(state.refused)
    assert not refused or any(shown(name) in refused for name in state.refused)
    assert "\n" not in refused


@settings(max_examples=30, deadline=None)
@given(state=givens(KEPT), values=plain_values())
def test_any_state_that_is_laid_out_comes_back_from_memory_and_disk(
    tmp_path_factory: pytest.TempPathFactory, state: Given, values: Any
) -> None:
    folder, tensors = tmp_path_factory.mktemp("state"), dict(state.tensors)
    before, got = contents(tensors), []

    def laid() -> FlatState:
        return FlatState(tensors, capture=lambda: values, publish=got.append)

    system = attach(laid(), folder)
    save(system, 1)
    system.close()
    assert persist(folder, folder / "tier", 1) == ""
    for place, tier in ((folder, None), (folder / "other", folder / "tier")):
        place.mkdir(exist_ok=True)
        wreck(tensors)
        assert restored(laid(), place, tier=tier) == 1
        assert contents(tensors) == before
        assert fingerprint(got.pop()) == fingerprint(values)


def random_state(rank: int, seed: int) -> tuple[dict[str, Any], Any]:
    """Tensors of kinds that are kept, with names of the rank's own, and small values."""
    chance, tensors = random.Random(100 * seed + rank), {}
    for number in range(chance.randrange(1, 6)):
        shape = tuple(chance.choice([1, 2, 3, 7]) for _ in range(chance.randrange(4)))
        base = random_bits(shape, chance.choice(list(DTYPES.values())), chance.randrange(99))
        tensors[f"rank{rank}/{chance.choice('ab/. ä')}{number}"] = shaped(chance.choice(KEPT), base, tensors)
    tensors["same on all"] = random_bits((5,), torch.float32, seed)
    values = {"rank": rank, 1: [None, 10**30, float("nan")], "rng": random_bits((rank + 3,), torch.uint8, rank)}
    return tensors, values


def round_trips(rank: int, num_ranks: int, folder: str, seeds: list[int]) -> list[bool]:
    came_back = []
    for seed in seeds:
        place, (tensors, values), got = Path(folder) / str(seed), random_state(rank, seed), []
        place.mkdir(exist_ok=True)
        before = contents(tensors)

        def laid(tensors: Any = tensors, values: Any = values, got: Any = got) -> FlatState:
            return FlatState(tensors, capture=lambda: values, publish=got.append)

        system = attach(laid(), place)
        save(system, 1, 2)
        system.close()
        failure = persist(place, place / "tier", 2)
        for store, tier in ((place, None), (place / "other", place / "tier")):
            store.mkdir(exist_ok=True)
            wreck(tensors)
            is_newest = restored(laid(), store, tier=tier) == 2
            is_equal = contents(tensors) == before and fingerprint(got[-1]) == fingerprint(values)
            came_back.append(is_newest and is_equal and not failure)
    return came_back


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_states_of_several_ranks_come_back_from_memory_and_disk(tmp_path: Path, num_ranks: int) -> None:
    results = run_ranks(round_trips, num_ranks, str(tmp_path), [1, 2, 3])
    assert results == [[True] * 6] * num_ranks


def test_tensors_among_small_values_have_names_for_whoever_reads_the_folder_with_torch(tmp_path: Path) -> None:
    values = {"rng": torch.arange(5, dtype=torch.uint8), "optimizer": [{"step": torch.tensor(3.0), "lr": 0.1}]}
    system = attach(FlatState({"w": torch.ones(2)}, capture=lambda: values), tmp_path)
    save(system, 1)
    system.close()
    assert persist(tmp_path, tmp_path / "tier", 1) == ""
    state = {"rank0/value/rng": torch.zeros(5, dtype=torch.uint8), "rank0/value/optimizer/0/step": torch.tensor(0.0)}
    dcp.load(state, checkpoint_id=folder_of(tmp_path / "tier", 1), no_dist=True)
    assert fingerprint(list(state.values())) == fingerprint([values["rng"], torch.tensor(3.0)])


def test_what_is_sent_from_live_memory_is_sent_from_where_it_is() -> None:
    p, q = torch.nn.Parameter(torch.zeros(500, 3)), torch.zeros(70, 2)
    state = FlatState({"p": p, "q": q})
    layout = Layout(state.num_bytes, 1024, state.digest)
    live = LiveSource(state, layout, torch.device("cpu"), buffer_bytes=4096, num_buffers=2)
    p.data = torch.full((3, 500), 3.0).t()
    state.capture()
    live.begin()
    blocks = [layout.block(index) for index in range(layout.num_blocks)]
    sent = b"".join(bytes(live.view(block.start, block.stop)) for block in blocks)
    assert sent[: p.nbytes] == bits(torch.full((500, 3), 3.0))


def test_each_save_holds_the_tensors_of_its_iteration_wherever_they_were_put(tmp_path: Path) -> None:
    p, seen = torch.nn.Parameter(torch.zeros(40)), []
    system = attach(FlatState({"p": p}, capture=lambda: {"at": p.data_ptr()}, publish=seen.append), tmp_path)

    def replace(iteration: int) -> None:
        p.data = torch.full((40,), float(iteration))

    save(system, *range(1, 6), change=replace)
    system.close()
    again = torch.nn.Parameter(torch.zeros(40))
    assert restored(FlatState({"p": again}, capture=dict, publish=seen.append), tmp_path) == 5
    assert again.unique().tolist() == [5.0]


def test_a_tensor_that_is_another_ends_the_save_before_anything_is_staged(tmp_path: Path) -> None:
    p = torch.nn.Parameter(torch.ones(40))
    system = attach(FlatState({"p": p}), tmp_path)
    save(system, 1)
    p.data = torch.ones(40).double()
    system.before_update(2)
    with pytest.raises(StateChangedError, match="p was float32"):
        system.after_update(2)
    system.close()
    again = torch.nn.Parameter(torch.zeros(40))
    assert restored(FlatState({"p": again}), tmp_path) == 1
