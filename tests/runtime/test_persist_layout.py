"""Checkpoints on disk: they are whole or none, plain ones of torch, and fit any number of ranks, bit for bit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from capricorn.errors import ConfigError
from capricorn.runtime.persist.layout import MANIFEST, METADATA, Manifest, folder_of, hash_of, iterations_in, rank_file
from capricorn.runtime.replicating_system import ReplicatingSystem
from capricorn.runtime.store.node_store import NodeStore
from capricorn.systems.flat_state import FlatState
from tests.cli.test_cli import cli
from tests.support.peers import job_of
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
    assert [int(state[f"rank{rank}/value/sequences"]) for rank in range(2)] == [24, 24]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_any_number_of_ranks_restores_every_tensor_bit_for_bit(saved: Path, tmp_path: Path, num_ranks: int) -> None:
    (tmp_path / "tier").symlink_to(saved / "tier")
    results = run_ranks(load, num_ranks, str(tmp_path))
    assert [(each["iteration"], each["wrong"]) for each in results] == [(6, [])] * num_ranks
    assert results[0]["sources"] == ["persistent"] * num_ranks
    assert [each["position"] for each in results] == [24] * num_ranks, "no sequence is skipped or read again"
    assert len({each["rng"] for each in results}) == num_ranks
    assert bool(results[0]["notes"]) == (num_ranks != 2)


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


# --- other versions


class LaterManifest(Manifest):
    """As a later version may have it: with a field more, which may be left out."""

    remark: str = ""
    origin: Mapping[str, str] = {}


def test_a_later_version_with_more_fields_reads_what_this_one_has_written_and_the_other_way_round(copied: Path) -> None:
    folder = folder_of(copied / "tier", 6)
    before = Manifest.read(folder)
    later = LaterManifest.read(folder)
    assert later.remark == ""
    later.model_copy(update={"remark": "größer", "origin": {"a": "b"}}).write(folder)
    assert LaterManifest.read(folder).remark == "größer"
    found = Manifest.read(folder)
    assert found.model_copy(update={"seal": before.seal}) == before


def write_newer(folder: Path, **changes: object) -> None:
    """Makes a manifest one of a newer version, sealed as that would seal it."""
    found = json.loads((folder / MANIFEST).read_text()) | changes | {"seal": ""}
    unsealed = json.dumps(found, indent=1).replace('"seal": ""', '"seal":""').encode()
    (folder / MANIFEST).write_bytes(unsealed.replace(b'"seal":""', f'"seal":"{hash_of(unsealed)}"'.encode()))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"format": 2}, "it has format 2, this version reads up to 1"),
        ({"tensors": {"w": {"shards": []}}}, "which says"),
    ],
)
def test_a_checkpoint_of_a_newer_version_is_refused_as_such_and_nothing_older_is_taken(
    copied: Path, changes: dict[str, object], what: str
) -> None:
    write_newer(folder_of(copied / "tier", 6), **changes)
    with pytest.raises(ConfigError, match=f"was written by a newer version.*{what}"):
        Manifest.read(folder_of(copied / "tier", 6))
    for each in run_ranks(load, 2, str(copied)):
        assert "ConfigError" in each["error"]
        assert "was written by a newer version" in each["error"]
        assert each["is_untouched"]


def test_iteration_0_is_persisted_and_restored(tmp_path: Path) -> None:
    assert run_ranks(save, 1, str(tmp_path), (0,)) == [[""]]
    (each,) = run_ranks(load, 1, str(tmp_path))
    assert (each["iteration"], each["wrong"]) == (0, [])


RELEASED = Path(__file__).parent / "released"
"""A checkpoint as version 0.2.0 has written it: of one rank, whose model is called as it is not in ASCII."""


def load_released(rank: int, num_ranks: int, folder: str) -> dict[str, Any]:
    tensors = {
        "param/w": torch.zeros(5),
        "param/layers.0.experts.3.w": torch.zeros(3, dtype=torch.bfloat16),
        "step/w": torch.zeros((), dtype=torch.int64),
    }
    restored: dict[str, Any] = {}
    state = FlatState(tensors, capture=lambda: {"position": torch.tensor(0)}, publish=restored.update)
    job = job_of(rank, num_ranks, Path(folder), every=1)
    NodeStore.create(job.store_dir, "run", rank, job.topology)
    system = ReplicatingSystem()
    system.attach(replace(job, persist_dir=Path(folder) / "tier"), state)
    report = system.restore()
    system.close()
    return {
        "report": (report.iteration, list(report.sources), list(report.damaged)),
        "position": int(restored["position"]),
        "tensors": {key: tensor.tolist() for key, tensor in tensors.items()},
    }


def test_a_checkpoint_of_the_released_version_is_read(tmp_path: Path) -> None:
    shutil.copytree(RELEASED, tmp_path / "tier")
    (told,) = run_ranks(load_released, 1, str(tmp_path))
    assert told["report"] == (6, ["persistent"], [])
    assert told["position"] == 17
    assert told["tensors"] == {
        "param/w": [0.0, 1.0, 2.0, 3.0, 4.0],
        "param/layers.0.experts.3.w": [0.5, -1.5, 2.5],
        "step/w": 6,
    }
    assert Manifest.read(folder_of(RELEASED, 6)).model == "modèle"
