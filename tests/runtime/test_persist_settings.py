"""What the persistent tier asks for and takes: options, memory, pinned slots, and folders that it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from capricorn.cli.options import scenario_from

from capricorn.errors import ConfigError
from capricorn.launch.persist_folder import TOKEN_PREFIX, check_tier, tier_of
from capricorn.runtime.persist.layout import Manifest, folder_of
from capricorn.runtime.store.node_store import NodeStore
from capricorn.runtime.store.slot import Layout
from capricorn.sizing.memory import needs_of
from capricorn.topology import Topology

TINY = {"model": "mixtral-tiny", "device": "cpu"}


def test_off_by_default_and_in_the_run_folder_unless_told(tmp_path: Path) -> None:
    assert tier_of(scenario_from(**TINY), tmp_path) is None  # type: ignore[arg-type]
    assert tier_of(scenario_from(**TINY, persist_every=5), tmp_path) == tmp_path / "persistent"  # type: ignore[arg-type]
    elsewhere = scenario_from(**TINY, persist_dir=str(tmp_path / "a" / "b"))  # type: ignore[arg-type]
    check_tier(elsewhere)
    assert tier_of(elsewhere, tmp_path) == tmp_path / "a" / "b"
    assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize(("system", "num_slots"), [("capricorn", 5), ("gemini-staged", 5), ("lm-resiliency", 4)])
def test_a_slot_more_and_a_process_more_of_each_rank_are_counted(system: str, num_slots: int) -> None:
    without, needs = (
        needs_of(scenario_from(**TINY, system=system, persist_every=every), cuda=False)  # type: ignore[arg-type]
        for every in (0, 5)
    )
    assert needs.store_bytes == pytest.approx(without.store_bytes * num_slots / 4, rel=0.01)
    assert (needs.process_bytes > without.process_bytes) == (num_slots == 5)


def test_a_pinned_slot_is_not_used_again(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    store = NodeStore.create(tmp_path / "node0", "run", 0, Topology(1, 1))
    store.open_slots(0, Layout(8192, 4096, 1), num_slots=3)
    for iteration in (1, 2, 3):
        store.commit(store.begin(0, iteration, keep=iteration - 1))
    first = store.read(0, 1)
    assert first is not None
    store.pin(first)
    for iteration in range(4, 9):
        store.commit(store.begin(0, iteration, keep=iteration - 1))
        assert sorted(store.iterations(0)) == [1, iteration - 1, iteration]
    store.unpin(first)
    store.commit(store.begin(0, 9, keep=8))
    assert sorted(store.iterations(0)) == [7, 8, 9]
    store.close()


def manifest(root: Path, iteration: int, model: str) -> None:
    folder_of(root, iteration).mkdir(parents=True)
    Manifest(
        run_id="run", attempt=0, iteration=iteration, world_size=2, num_nodes=2, ranks_per_node=1, model=model,
        tensors={}, aliases={}, files={}, metadata_xxh3="",
    ).write(folder_of(root, iteration))  # fmt: skip


@pytest.mark.parametrize(
    ("iteration", "model", "message"),
    [
        (5, "gpt-moe-tiny", "holds checkpoints of gpt-moe-tiny, not of mixtral-tiny"),
        (30, "mixtral-tiny", "holds iteration 30, and training ends with 30"),
    ],
)
def test_checkpoints_that_cannot_be_gone_on_from_are_refused(
    tmp_path: Path, iteration: int, model: str, message: str
) -> None:
    manifest(tmp_path, iteration, model)
    with pytest.raises(ConfigError, match=message):
        check_tier(scenario_from(**TINY, persist_dir=str(tmp_path)))  # type: ignore[arg-type]


def test_a_folder_of_other_things_and_one_that_cannot_be_made_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match="is not empty and holds no checkpoints"):
        check_tier(scenario_from(**TINY, persist_dir=str(tmp_path)))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cannot make or read the folder"):
        check_tier(scenario_from(**TINY, persist_dir=str(tmp_path / "notes.txt" / "below")))  # type: ignore[arg-type]


def test_what_a_killed_command_of_several_machines_left_before_its_first_checkpoint_is_no_other_thing(
    tmp_path: Path,
) -> None:
    (tmp_path / f"{TOKEN_PREFIX}0123").write_text("0123")
    check_tier(scenario_from(**TINY, persist_dir=str(tmp_path)))  # type: ignore[arg-type]


def test_the_same_model_is_gone_on_with_and_damaged_checkpoints_are_left_to_the_ranks(tmp_path: Path) -> None:
    manifest(tmp_path, 5, "mixtral-tiny")
    folder_of(tmp_path, 40).mkdir()
    check_tier(scenario_from(**TINY, persist_dir=str(tmp_path)))  # type: ignore[arg-type]
