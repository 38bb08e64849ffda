"""What `clean` finds of commands that were killed: stores, filler files, cgroups, small file systems."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from capricorn.campaign.leftovers import find_leftovers
from capricorn.campaign.small_file_systems import PREFIX
from capricorn.conformance.subject import CHECK_PREFIX
from capricorn.faults import filler_file, memory_cgroup
from capricorn.files import LOCK, temporary_folder
from capricorn.runtime.store.node_store import RunLock
from tests.cli.test_cli import cli


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks for nothing outside of tmp_path."""
    for name in ("stores", "temporary", "cgroups"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr("capricorn.files.gettempdir", lambda: str(tmp_path / "temporary"))
    monkeypatch.setattr(memory_cgroup, "_ROOT", tmp_path / "cgroups")


@pytest.fixture
def stores(tmp_path: Path) -> Path:
    return tmp_path / "stores"


def cleaned(stores: Path, capsys: pytest.CaptureFixture[str], *options: str, code: int = 0) -> list[str]:
    """The lines of `clean`."""
    capsys.readouterr()
    assert cli("clean", "--root", stores, *options) == code
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("name", ["capricorn-r1", ".capricorn-r1"])
def test_a_leftover_is_listed_once_removed_and_told(
    name: str, stores: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (stores / name).mkdir()
    (stores / name / "lock").touch()
    for options, verb in ((["-n"], "left over"), ([], "removed")):
        told = [line for line in cleaned(stores, capsys, *options) if name in line]
        assert len(told) == 1
        assert told[0].endswith(verb)
    assert not any(stores.iterdir())


def test_an_odd_name_is_printed_in_one_line(stores: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (stores / "capricorn-[bold]\nx\a").mkdir()
    line, _ = cleaned(stores, capsys)
    assert r"capricorn-[bold]\nx\x07" in line
    assert not any(stores.iterdir())


def test_what_cannot_be_removed_is_named_and_the_rest_is_removed(
    stores: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for run in ("a", "b"):
        RunLock(stores, run).release(keep=True)
    real = __import__("shutil").rmtree

    def refuse(path: Path) -> None:
        if path.name == "capricorn-a":
            raise PermissionError(13, "Permission denied", str(path))
        real(path)

    monkeypatch.setattr("shutil.rmtree", refuse)
    told = cleaned(stores, capsys, code=1)
    assert told[0].endswith("capricorn-a  cannot be removed: Permission denied") or "cannot be removed" in told[0]
    assert told[1].endswith("removed")
    assert [path.name for path in stores.iterdir()] == ["capricorn-a"]


def test_a_folder_that_cannot_be_read_is_refused(stores: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli("clean", "--root", stores / "nowhere") == 2
    assert "no such folder" in capsys.readouterr().err


# --- filler files


def test_the_filler_file_of_a_dead_run_is_removed_and_that_of_a_live_one_is_kept(
    stores: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    locks = {run: RunLock(stores, run) for run in ("dead", "live")}
    for run, lock in locks.items():
        (tmp_path / run).mkdir()
        filler_file.note(lock.folder, tmp_path / run)
        (tmp_path / run / filler_file.FILLER).write_bytes(bytes(1000))
        (tmp_path / run / "of the user").touch()
    locks["dead"].release(keep=True)
    told = cleaned(stores, capsys)
    assert [line.rpartition("  ")[2] for line in told[:-1]] == ["removed", "removed", "live, kept", "live, kept"]
    assert [path.name for path in (tmp_path / "dead").iterdir()] == ["of the user"]
    assert (tmp_path / "live" / filler_file.FILLER).exists()
    locks["live"].release(keep=False)


@pytest.mark.parametrize("text", ["", "{", "17\n", '"relative/filler"\n', '"/etc/passwd"\n', "\xff"])
def test_notes_that_name_no_filler_file_remove_nothing(text: str, stores: Path) -> None:
    lock = RunLock(stores, "dead")
    (lock.folder / filler_file.NOTES).write_text(text, encoding="latin-1")
    assert filler_file.noted(lock.folder) == []
    lock.release(keep=False)


def test_notes_of_somebody_else_are_not_believed(stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filler_file.note(stores, tmp_path)
    assert filler_file.noted(stores) == [tmp_path / filler_file.FILLER]
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    assert filler_file.noted(stores) == []
    (linked := tmp_path / "linked").mkdir()
    (linked / filler_file.NOTES).symlink_to(stores / filler_file.NOTES)
    assert filler_file.noted(linked) == []


# --- temporary folders


@pytest.mark.parametrize("prefix", [PREFIX, CHECK_PREFIX])
def test_a_temporary_folder_is_removed_only_after_the_end_of_its_command(
    prefix: str, stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    dead = tmp_path / "temporary" / f"{prefix}dead"
    dead.mkdir()
    (dead / LOCK).touch()
    (dead / "something").write_bytes(b"of a command that was killed")
    with temporary_folder(prefix, shutil.rmtree) as live:
        told = cleaned(stores, capsys)[:-1]
        assert {line.rpartition("  ")[::2] for line in told} == {(str(dead), "removed"), (str(live), "live, kept")}
        assert not dead.exists()
        assert live.exists()
    assert not live.exists()


# --- cgroups


def cgroup(tmp_path: Path, name: str, processes: str = "") -> Path:
    folder = tmp_path / "cgroups" / "slice" / name
    folder.mkdir(parents=True)
    (folder / "memory.max").touch()
    (folder / "cgroup.procs").write_text(processes)
    return folder


def test_a_cgroup_is_live_while_its_run_is_or_a_process_is_in_it(stores: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    lock = RunLock(elsewhere, "live-1")
    expected = {
        cgroup(tmp_path, "capricorn-live-1-rank0"): True,
        cgroup(tmp_path, "capricorn-dead-1-rank0"): False,
        cgroup(tmp_path, "capricorn-dead-2-rank0", "17\n"): True,
        cgroup(tmp_path, f"capricorn-probe-{os.getpid()}"): True,
        cgroup(tmp_path, "capricorn-probe-999999999"): False,
        cgroup(tmp_path, "capricorn-of-somebody"): True,
    }
    assert {each.path: each.is_live for each in find_leftovers(stores)} == expected
    lock.release(keep=False)


def real_group() -> Iterator[Path]:
    try:
        yield memory_cgroup.make("capricorn-20260101-000000-none-x-dead-rank0")
    except Exception as error:  # noqa: BLE001 - told below
        pytest.skip(str(error))


def test_a_real_cgroup_of_a_dead_run_is_removed(
    stores: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory_cgroup, "_ROOT", Path("/sys/fs/cgroup"))
    group = next(real_group())
    try:
        told = [line for line in cleaned(stores, capsys) if group.name in line]
        assert [line.rpartition("  ")[2] for line in told] == ["removed"]
        assert not group.exists()
    finally:
        memory_cgroup.remove(group.name)


# --- small file systems


def test_the_folder_of_a_killed_campaign_is_removed_and_that_of_a_live_one_kept(
    stores: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("dead", "live"):
        (folder := tmp_path / "temporary" / f"{PREFIX}{name}").mkdir()
        (folder / "lock").touch()
    code = "import fcntl, sys; fcntl.flock(file := open(sys.argv[1]), fcntl.LOCK_EX); print(1, flush=True); input()"
    command = [sys.executable, "-c", code, str(folder / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        told = cleaned(stores, capsys)
        holder.kill()
    assert [line.rpartition("  ")[2] for line in told[:-1]] == ["removed", "live, kept"]
    assert [path.name for path in (tmp_path / "temporary").iterdir()] == [f"{PREFIX}live"]
