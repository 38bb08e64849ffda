"""Copies of another state are refused by all ranks alike before anything is done to them; equal names by contents."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from capricorn.errors import CapricornError, LayoutMismatchError, NoCompleteCheckpointError, StateError
from capricorn.runtime.layout_agreement import differences
from capricorn.runtime.persist.layout import Manifest, folder_of
from capricorn.runtime.persist.messages import Order, WriterTask
from capricorn.runtime.persist.writer import write_checkpoint
from capricorn.runtime.store.node_store import NodeStore
from capricorn.runtime.store.slot import Layout, Slot, checksum
from capricorn.systems.flat_state import FlatState
from tests.support.solo import attach, only_rank, persist, restored, save
from tests.support.spawn import run_ranks
from tests.support.states import wreck


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with only_rank(tmp_path_factory.mktemp("group")):
        yield


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- another state, of one rank

W, B = torch.arange(3.0), torch.arange(4.0)
OTHERS: dict[str, tuple[Callable[[], FlatState], list[str]]] = {
    "renamed": (
        lambda: FlatState({"_orig_mod.w": W.clone(), "b": B.clone()}),
        ["w (float32 [3]) is missing", "_orig_mod.w (float32 [3]) is new"],
    ),
    "dtype": (lambda: FlatState({"w": W.int(), "b": B.clone()}), ["w was float32 [3] and is int32 [3]"]),
    "shape": (lambda: FlatState({"w": W.reshape(3, 1), "b": B.clone()}), ["w was float32 [3] and is float32 [3, 1]"]),
    "larger": (lambda: FlatState({"w": torch.ones(9000), "b": B.clone()}), ["w was float32 [3] and is float32 [9000]"]),
    "less": (lambda: FlatState({"w": W.clone()}), ["b (float32 [4]) is missing"]),
    "more": (lambda: FlatState({"w": W.clone(), "b": B.clone(), "c": B.clone()}), ["c (float32 [4]) is new"]),
    "values": (lambda: FlatState({"w": W.clone(), "b": B.clone()}, capture=dict), ["small values"]),
}
ORDER = FlatState({"b": B.clone(), "w": W.clone()}), "another place in the order"
TIED = FlatState({"w": W.clone(), "b": B.clone()}, aliases={"head": "w"}), "head (another name of w) is new"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose store and `tier` hold iterations of a state of two tensors."""
    folder = tmp_path_factory.mktemp("saved")
    system = attach(FlatState({"w": W.clone(), "b": B.clone()}), folder)
    save(system, 1, 2)
    system.close()
    assert persist(folder, folder / "tier", 2) == ""
    return folder


def test_a_store_of_another_state_is_refused_with_the_keys_that_differ_and_left_as_it_is(saved: Path) -> None:
    before = files(saved)
    for state, says in [
        *((make(), says) for make, says in OTHERS.values()),
        (ORDER[0], [ORDER[1]]),
        (TIED[0], [TIED[1]]),
    ]:
        with pytest.raises(LayoutMismatchError) as caught:
            attach(state, saved)
        assert all(text in str(caught.value) for text in says), str(caught.value)
        assert "\n" not in str(caught.value)
        assert files(saved) == before
    with pytest.raises(LayoutMismatchError, match=r"set system\.block_bytes=4096"):
        attach(FlatState({"w": W.clone(), "b": B.clone()}), saved, block_bytes=65536)
    assert files(saved) == before
    again = FlatState({"w": torch.zeros(3), "b": torch.zeros(4)})
    assert restored(again, saved) == 2
    assert torch.equal(again.tensors["w"], W)


@pytest.mark.parametrize(("make", "says"), OTHERS.values(), ids=OTHERS.keys())
def test_a_persistent_tier_of_another_state_is_refused_before_anything_is_done(
    saved: Path, tmp_path: Path, make: Callable[[], FlatState], says: list[str]
) -> None:
    before = files(saved / "tier")
    with pytest.raises(LayoutMismatchError) as caught:
        attach(make(), tmp_path, tier=saved / "tier")
    assert all(text in str(caught.value) for text in says), str(caught.value)
    assert files(saved / "tier") == before
    again = FlatState({"b": torch.zeros(4), "w": torch.zeros(3)})  # it is read by name
    assert restored(again, tmp_path, tier=saved / "tier") == 2
    assert torch.equal(again.tensors["w"], W)


def test_slots_of_another_state_that_hold_nothing_complete_are_made_anew(tmp_path: Path) -> None:
    attach(FlatState({"w": torch.ones(9000)}), tmp_path).close()
    state = FlatState({"w": torch.ones(3)})
    system = attach(state, tmp_path)
    with pytest.raises(NoCompleteCheckpointError):
        system.restore()
    save(system, 1)
    system.close()
    wreck(state.tensors)
    assert restored(state, tmp_path) == 1
    assert state.tensors["w"].tolist() == [1.0] * 3


def test_only_the_first_three_of_many_differences_are_named(tmp_path: Path) -> None:
    system = attach(FlatState({f"t{n}": torch.ones(1) for n in range(9)}), tmp_path)
    save(system, 1)
    system.close()
    with pytest.raises(LayoutMismatchError, match=r"t0 .*; t1 .*; t2 .*, and 6 more differ; nothing was touched"):
        attach(FlatState({f"t{n}": torch.ones(2) for n in range(9)}), tmp_path)


def test_a_layout_that_does_not_read_differs_in_everything() -> None:
    now = {"entries": [["w", "float32", [3], 0, 12]], "aliases": {}}
    for was in ({}, {"entries": 3}, {"entries": [[]], "aliases": []}):
        assert differences(was, now) == ["w (float32 [3]) is new"]


# --- room for small values


@pytest.mark.parametrize(("first", "second"), [(None, 64_000), (64_000, None)], ids=["more", "less"])
def test_copies_are_restored_whatever_room_the_small_values_have_now(
    tmp_path: Path, first: int | None, second: int | None
) -> None:
    got: list[Any] = []

    def state(value: float, room: int | None) -> FlatState:
        return FlatState(
            {"w": torch.full((2000,), value)}, capture=lambda: {"v": value}, publish=got.append, value_bytes=room
        )

    system = attach(state(7.0, first), tmp_path)
    save(system, 1, 2)
    system.close()
    again = state(0.0, second)
    system = attach(again, tmp_path)
    assert system.restore().iteration == 2
    assert again.tensors["w"].unique().tolist() == [7.0]
    assert got == [{"v": 7.0}]
    save(system, 3)
    system.close()
    assert {copy.state for copy in NodeStore.open(tmp_path / "node0").inventory()} == {"complete"}
    assert restored(state(1.0, None), tmp_path) == 3


def test_a_damaged_copy_is_not_made_whole_by_giving_it_more_room(tmp_path: Path) -> None:
    state = FlatState({"w": torch.ones(2000)}, capture=dict)
    system = attach(state, tmp_path)
    save(system, 1, 2)
    system.close()
    newest = next(copy for copy in NodeStore.open(tmp_path / "node0").inventory() if copy.iteration == 2)
    with newest.path.open("r+b") as file:
        file.seek(-9000, 2)
        file.write(b"\xff")
    assert restored(FlatState({"w": torch.ones(2000)}, capture=dict, value_bytes=50_000), tmp_path) == 1


# --- several ranks


def other_names(rank: int, num_ranks: int, folder: str) -> list[str]:
    """Rank 1 renames a tensor, and has lost its node; what all ranks hear of it."""
    place, heard = Path(folder), []
    system = attach(FlatState({f"w{rank}": torch.ones(3)}), place)
    save(system, 1, 2)
    failure = persist(place, place / "tier", 2)
    system.close()
    dist.barrier()
    if rank == 1:
        for path in (place / "node1").iterdir():
            path.unlink()
    renamed = FlatState({"renamed" if rank == 1 else "w0": torch.ones(3)})
    for where, tier in ((place, None), (place / "other", place / "tier")):
        where.mkdir(exist_ok=True)
        try:
            attach(renamed, where, tier=tier)
        except LayoutMismatchError as error:
            heard.append(str(error))
    again = FlatState({f"w{rank}": torch.zeros(3)})
    return [failure, *heard, str(restored(again, place)), str(again.tensors[f"w{rank}"].tolist())]


def shared_names(rank: int, num_ranks: int, folder: str) -> list[str]:
    """What is heard of names that several ranks have."""
    place, heard = Path(folder), []
    (place / "tier").mkdir(exist_ok=True)
    w = torch.ones(3)
    cases: list[Callable[[], FlatState]] = [
        lambda: FlatState({"same": torch.ones(3), "experts.0.w": torch.full((3,), float(rank))}),
        lambda: FlatState({"experts.0.w": torch.ones(3 + rank)}),
        lambda: FlatState({"w": w, "head": w} if rank == 1 else {"w": w, "head": torch.ones(3)}),
        lambda: FlatState({"same": torch.ones(3), f"rank{rank}/w": torch.full((3,), float(rank)), "head": w, "w": w}),
    ]
    for make in cases:
        try:
            attach(make(), place, tier=place / "tier", replicas=1).close()
            heard.append("")
        except StateError as error:
            heard.append(str(error))
        finally:
            dist.barrier()
    return heard


def replicated(rank: int, num_ranks: int, folder: str) -> list[Any]:
    """A tensor that all ranks have: alike in iteration 2, and not in iteration 3."""
    place = Path(folder)
    tensors = {"w": torch.zeros(3), f"own{rank}": torch.full((2,), float(rank))}
    tier = place / "tier"
    tier.mkdir(exist_ok=True)
    system = attach(FlatState(tensors), place, tier=tier)
    save(system, 1, 2, change=lambda iteration: tensors["w"].fill_(iteration))
    alike = persist(place, tier, 2)
    save(system, 3, change=lambda iteration: tensors["w"].fill_(iteration + rank))
    differing = persist(place, tier, 3)
    system.close()
    wreck(tensors)
    (place / "other").mkdir(exist_ok=True)
    iteration = restored(FlatState(tensors), place / "other", tier=tier)
    return [alike, differing, iteration, tensors["w"].tolist(), tensors[f"own{rank}"].tolist()]


def all_of_it(rank: int, num_ranks: int, folder: str) -> dict[str, Any]:
    told = {}
    for each in (other_names, shared_names, replicated):
        (place := Path(folder) / each.__name__).mkdir(exist_ok=True)
        told[each.__name__] = each(rank, num_ranks, str(place))
    return told


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """By function, what it returned on each of two ranks: they are started once."""
    by_rank = run_ranks(all_of_it, 2, str(tmp_path_factory.mktemp("ranks")))
    return {name: [each[name] for each in by_rank] for name in by_rank[0]}


def test_all_ranks_hear_alike_that_one_of_them_has_another_state(told: dict[str, list[Any]]) -> None:
    first, second = told["other_names"]
    assert first == second
    failure, memory, disk, iteration, values = first
    assert failure == ""
    assert "the copies of rank 1 in" in memory
    for text in (memory, disk):
        assert "w1 (float32 [3]) is missing" in text
        assert "renamed (float32 [3]) is new" in text
    assert (iteration, values) == ("2", "[1.0, 1.0, 1.0]")


def test_a_name_with_other_contents_on_two_ranks_is_refused_on_all(told: dict[str, list[Any]]) -> None:
    results = told["shared_names"]
    assert all(each == results[0] for each in results)
    contents, shape, alias, fine = results[0]
    for text in (contents, shape):
        assert text.startswith("experts.0.w is on ranks 0, 1 with other contents")
        assert "rank1/experts.0.w" in text
    assert alias.startswith("head is on ranks 0, 1 with other contents")
    assert fine == ""


def test_replicated_tensors_are_persisted_once_and_never_merged_if_they_come_to_differ(
    told: dict[str, list[Any]],
) -> None:
    results = told["replicated"]
    assert "ranks 0 and 1 have other contents under the one name w" in results[0][1]
    assert all(differing for _, differing, *_ in results)
    assert [(alike, *rest) for alike, _, *rest in results] == [
        ("", 2, [2.0] * 3, [float(rank)] * 2) for rank in range(2)
    ]


# --- the persistent tier of version 0.2


def test_small_values_that_version_0_2_has_persisted_are_restored(tmp_path: Path) -> None:
    values = {"rng": torch.arange(9, dtype=torch.uint8), "position": torch.tensor(6)}
    w, tier, got = torch.arange(5.0), tmp_path / "tier", []
    tier.mkdir()
    old = FlatState({"w": w, **{f"small {name}": tensor for name, tensor in values.items()}})
    layout = old.manifest()
    for entry in layout["entries"][1:]:  # by these names its writer put them there
        entry[0] = entry[0].replace("small ", "rank0/value/")
    (tmp_path / "owner0.json").write_text(json.dumps(layout))
    slot = Slot(tmp_path / "slot", 0, Layout(old.num_bytes, 4096, old.digest))
    slot.begin(4, 0)
    for run in old.runs:
        run.view(torch.frombuffer(slot.payload, dtype=torch.uint8)).copy_(run.source)
    for index in range(slot.layout.num_blocks):
        slot.table[index] = checksum(slot.payload[slot.layout.block(index)])
    slot.commit()
    task = WriterTask(
        run_id="old", attempt=0, rank=0, num_nodes=1, ranks_per_node=1, model="", root=tier,
        layout=tmp_path / "owner0.json", keep=2, timeout_s=20.0,
    )  # fmt: skip
    assert write_checkpoint(task, Order(iteration=4, slot=slot.path)).failure == ""
    assert "rank0/value/rng" in Manifest.read(folder_of(tier, 4)).tensors
    state = FlatState({"w": torch.zeros(5)}, capture=lambda: {"rng": None}, publish=got.append, value_bytes=4096)
    assert restored(state, tmp_path, tier=tier) == 4
    assert torch.equal(state.tensors["w"], w)
    assert {name: each.tolist() for name, each in got[0].items()} == {n: v.tolist() for n, v in values.items()}


def test_small_values_that_have_no_room_are_refused_alike_and_nothing_is_loaded(saved: Path, tmp_path: Path) -> None:
    history = list(range(2000))
    system = attach(FlatState({"w": W.clone()}, capture=lambda: {"history": history}), tmp_path)
    save(system, 1)
    system.close()
    assert persist(tmp_path, tmp_path / "tier", 1) == ""
    state = FlatState({"w": torch.zeros(3)}, capture=dict)
    (tmp_path / "other").mkdir()
    with pytest.raises(CapricornError, match="value_bytes="):
        restored(state, tmp_path / "other", tier=tmp_path / "tier")
    assert state.tensors["w"].tolist() == [0.0] * 3
