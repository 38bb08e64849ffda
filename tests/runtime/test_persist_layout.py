"""Checkpoints on disk: they are whole or none, plain ones of torch, and fit any number of ranks, bit for bit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from capricorn.runtime.persist.layout import MANIFEST, METADATA, Manifest, folder_of, iterations_in, rank_file
from tests.cli.test_cli import cli
from tests.support.runs import flip_byte
from tests.support.spawn import run_ranks
from tests.support.tiers import MODEL, expected, experts_in, load, same, save

BARE = """
import sys, torch, torch.distributed.checkpoint as dcp
folder, out = sys.argv[1:]
found = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
state = {key: torch.empty(each.size, dtype=each.properties.dtype) for key, each in found.items()}
dcp.load(state, checkpoint_id=folder)
assert not any(name.startswith("capricorn") for name in sys.modules)
torch.save(state, out)
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose `tier` holds the iterations 5 and 6 of two ranks."""
    folder = tmp_path_factory.mktemp("saved")
    assert run_ranks(save, 2, str(folder), (5, 6)) == [["", ""]] * 2
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    """The same, to be damaged."""
    shutil.copytree(saved / "tier", tmp_path / "tier")
    return tmp_path


def test_a_script_with_nothing_but_torch_loads_it(saved: Path, tmp_path: Path) -> None:
    folder = folder_of(saved / "tier", 6)
    subprocess.run([sys.executable, "-c", BARE, folder, tmp_path / "state.pt"], check=True, timeout=60, cwd=tmp_path)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    names = {key for key in state if "/value/" not in key}
    assert names == {key for key in Manifest.read(folder).tensors if "/value/" not in key}
    wrong = [key for key in names if not same(state[key], expected(key, tuple(state[key].shape), 6))]
    assert not wrong
    assert [int(state[f"rank{rank}/value/position"]) for rank in range(2)] == [6, 6]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_any_number_of_ranks_restores_every_tensor_bit_for_bit(saved: Path, tmp_path: Path, num_ranks: int) -> None:
    (tmp_path / "tier").symlink_to(saved / "tier")
    results = run_ranks(load, num_ranks, str(tmp_path))
    assert [(each["iteration"], each["wrong"]) for each in results] == [(6, [])] * num_ranks
    assert results[0]["sources"] == ["persistent"] * num_ranks
    assert [each["position"] for each in results] == [12 // num_ranks] * num_ranks, "no batch is skipped or read again"
    assert len({each["rng"] for each in results}) == num_ranks
    assert bool(results[0]["notes"]) == (num_ranks != 2)


def test_batches_that_ranks_cannot_share_are_refused_before_anything_is_loaded(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "tier").mkdir()
    (tmp_path / "tier" / "iteration-00000005").symlink_to(folder_of(saved / "tier", 5))
    for each in run_ranks(load, 3, str(tmp_path)):
        assert "ConfigError" in each["error"]
        assert "2 ranks have read 10 batches, which 3 ranks cannot share" in each["error"]
        assert each["is_untouched"]


def test_another_model_is_refused_before_anything_is_loaded(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "tier").symlink_to(saved / "tier")
    for each in run_ranks(load, 2, str(tmp_path), "qwen3-moe-tiny"):
        assert "LayoutMismatchError" in each["error"]
        assert "is of another state: param/" in each["error"]
        assert "is missing" in each["error"]
        assert each["is_untouched"]


# --- damage


def flip(folder: Path) -> None:
    flip_byte(folder / rank_file(1), (folder / rank_file(1)).stat().st_size // 2)


def cut(folder: Path) -> None:
    path = folder / rank_file(1)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 100)


def lose_file(folder: Path) -> None:
    (folder / rank_file(1)).unlink()


def lose_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def forge_manifest(folder: Path) -> None:
    path = folder / MANIFEST
    path.write_text(path.read_text().replace('"world_size":2', '"world_size":1'))


DAMAGE = {"flip": flip, "cut": cut, "file": lose_file, "manifest": lose_manifest, "forged": forge_manifest}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_inspect_names_what_is_damaged_and_what_is_whole(
    damage: Callable[[Path], None], copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tier = copied / "tier"
    assert cli("inspect", tier, "--json") == 0
    assert json.loads(capsys.readouterr().out)["iterations"] == [5, 6]
    damage(folder_of(tier, 6))
    assert cli("inspect", tier, "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["iterations"] == [5]
    assert {each["where"] for each in report["copies"]} == {"persistent"}
    assert [each["owner"] for each in report["copies"] if each["iteration"] == 5 and each["verified"]] == [0, 1]
    assert any(each["state"] == "damaged" and not each["verified"] for each in report["copies"])
    assert cli("inspect", folder_of(tier, 5)) == 0
    assert cli("inspect", folder_of(tier, 6)) == 1
    assert "iteration-00000006" in capsys.readouterr().out


def test_damage_of_the_librarys_own_table_is_named(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip_byte(folder_of(copied / "tier", 6) / METADATA, 100)
    assert cli("inspect", copied / "tier") == 1
    assert f"{METADATA} does not match its checksum" in capsys.readouterr().out


def test_every_byte_of_the_manifest_is_sealed(copied: Path) -> None:
    folder = folder_of(copied / "tier", 6)
    whole = (folder / MANIFEST).read_bytes()
    for offset in range(0, len(whole), len(whole) // 200):
        flip_byte(folder / MANIFEST, offset)
        with pytest.raises(Exception, match="damaged"):
            Manifest.read(folder)
        (folder / MANIFEST).write_bytes(whole)


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(copied: Path) -> None:
    flip(folder_of(copied / "tier", 6))
    for each in run_ranks(load, 2, str(copied)):
        assert (each["iteration"], each["wrong"]) == (5, [])
        assert "iteration-00000006: " in each["damaged"][0]
        assert f"does not match its checksum in {rank_file(1)}" in each["damaged"][0]


def test_if_none_is_whole_all_that_were_tried_are_named(copied: Path) -> None:
    flip(folder_of(copied / "tier", 6))
    lose_manifest(folder_of(copied / "tier", 5))
    for each in run_ranks(load, 2, str(copied)):
        assert "NoCompleteCheckpointError" in each["error"]
        assert "iteration-00000006" in each["error"]
        assert "iteration-00000005" in each["error"]
        assert each["is_untouched"]


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    assert run_ranks(save, 1, str(tmp_path), (1, 2, 3, 4), 2) == [[""] * 4]
    assert iterations_in(tmp_path / "tier") == [3, 4]
    assert sorted(path.name for path in (tmp_path / "tier").iterdir()) == ["iteration-00000003", "iteration-00000004"]


# --- weights


@pytest.mark.parametrize(("options", "dtype"), [((), torch.float32), (("--dtype", "bf16"), torch.bfloat16)])
def test_the_weights_are_exported_under_their_global_names(
    saved: Path, tmp_path: Path, options: tuple[str, ...], dtype: torch.dtype
) -> None:
    folder, out = folder_of(saved / "tier", 6), tmp_path / "model.safetensors"
    assert cli("export", folder, "--out", out, *options) == 0
    params = [key for key in Manifest.read(folder).tensors if key.startswith("param/")]
    with safe_open(out, "pt") as weights:
        names = list(weights.keys())
        assert sorted(f"param/{name}" for name in names) == sorted(params)
        for name in names:
            tensor = weights.get_tensor(name)
            assert torch.equal(tensor, expected(f"param/{name}", tuple(tensor.shape), 6).to(dtype))
        assert (weights.metadata()["model"], weights.metadata()["iteration"]) == (MODEL, "6")
    assert experts_in(names) == set(range(8))


def test_weights_of_a_damaged_checkpoint_are_not_exported(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    folder = folder_of(copied / "tier", 6)
    path = folder / rank_file(0)
    flip_byte(path, Manifest.read(folder).tensors["param/embedding.weight"].offset + 2000)
    flip_byte(folder / rank_file(1), Manifest.read(folder).tensors["param/layers.0.moe.experts.7.w1"].offset + 2000)
    assert cli("export", folder, "--out", copied / "model.safetensors") == 1
    assert "does not match its checksum" in capsys.readouterr().err
    assert not (copied / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--out", "m.safetensors", "--format", "md"), "leave out the options of tables"),
        (("--dtype", "bf16"), "--dtype is for weights"),
        ((), "is a checkpoint on disk: add --out"),
    ],
)
def test_options_that_do_not_go_together_are_one_line(
    saved: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert cli("export", folder_of(saved / "tier", 6), *arguments) == 2
    assert message in capsys.readouterr().err
