"""The folders that a run writes: looked at before it starts, each for whether it can be written and has room."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from capricorn.cli.options import scenario_from

from capricorn.errors import ConfigError
from capricorn.launch import preflight
from capricorn.launch.preflight import require_folders
from capricorn.sizing.memory import STATE_BYTES_PER_PARAM, total_params
from capricorn.sizing.written_folders import written_folders
from tests.cli.test_cli import cli
from tests.support.mounts import tmpfs

TINY = {"model": "mixtral-tiny", "device": "cpu"}
COMMAND = ("--model", "mixtral-tiny", "--device", "cpu")


def names(out: Path, **options: object) -> list[str]:
    scenario = scenario_from(**TINY, **options)  # type: ignore[arg-type]
    return [each.name.replace(str(out), "OUT") for each in written_folders(scenario, out)]


def test_each_folder_that_will_be_written_is_named(tmp_path: Path) -> None:
    tier = str(tmp_path / "tier")
    assert names(tmp_path) == ["--out OUT"]
    assert names(tmp_path, system="dcp") == ["--out OUT", "files of dcp in OUT"]
    assert names(tmp_path, persist_every=2) == ["--out OUT", "persistent tier in OUT"]
    assert names(tmp_path, persist_dir=tier) == ["--out OUT", "--persist-dir OUT/tier"]
    assert names(tmp_path, system="dcp", assignments=["system.options.medium=tmpfs"]) == ["--out OUT"]
    assert names(tmp_path, system="none", persist_every=0) == ["--out OUT"]


def test_what_shares_a_file_system_is_added_up(tmp_path: Path) -> None:
    scenario = scenario_from(**TINY, persist_every=2, persist_dir=str(tmp_path / "a" / "b"))  # type: ignore[arg-type]
    records, tier = written_folders(scenario, tmp_path / "out")
    state_bytes = STATE_BYTES_PER_PARAM * total_params(scenario.model)
    assert tier.num_bytes == records.num_bytes + 3 * state_bytes
    assert tier.there == tmp_path
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("asked", ["--out", "--persist-dir"])
def test_a_folder_that_cannot_be_written_is_refused_by_run_and_told_by_doctor(
    asked: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "below"
    options = {"--out": str(tmp_path / "out"), asked: str(folder)}
    words = [word for option in options.items() for word in option]
    for arguments, code in (("run",), 2), (("run", "--dry-run"), 2), (("doctor", "--json"), 1):
        assert cli(*arguments, *COMMAND, *words) == code
        said = capsys.readouterr()
        if code == 2:
            assert len(said.err.splitlines()) == 1
            assert f"{asked} {folder}" in said.err
            assert "no writable folder" in said.err
        else:
            failed = [check["name"] for check in json.loads(said.out)["checks"] if not check["ok"]]
            assert failed == [f"{asked} {folder}"]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
def test_a_disk_without_room_is_refused_with_what_is_needed_and_what_there_is(tmp_path: Path) -> None:
    with tmpfs("2M") as small:
        for options in ({"system": "dcp"}, {"persist_every": 2}):
            scenario = scenario_from(**TINY, **options)  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match=r"this run needs .* free, found .* free"):
                require_folders(scenario, small / "out")
        require_folders(scenario_from(**TINY, system="dcp"), tmp_path)  # type: ignore[arg-type]
        assert not any(small.iterdir())


def test_a_read_only_folder_is_no_writable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=f"{tmp_path} is no writable folder"):
        require_folders(scenario_from(**TINY), tmp_path / "out")  # type: ignore[arg-type]


def test_a_file_system_without_a_limit_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = os.statvfs(tmp_path)
    unlimited = os.statvfs_result((*facts[:2], 0, 0, 0, *facts[5:10]))
    monkeypatch.setattr("os.statvfs", lambda path: unlimited)
    assert preflight._free_bytes(tmp_path) > 1 << 50
