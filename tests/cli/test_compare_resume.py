"""The command `compare`: what becomes of a comparison that is cut short, and going on with it. Training is faked."""

from __future__ import annotations

import fcntl
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capricorn.compare.compare_record import alone_in, read_compare
from capricorn.config.scenario import Scenario
from capricorn.errors import ConfigError, TransportError
from capricorn.launch import preflight as machine
from capricorn.records.samples import read_run
from tests.cli.test_cli import cli
from tests.support.comparisons import SYSTEMS, TINY, Systems, compared, folder_of, scenario_of


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Systems:
    return Systems.installed(monkeypatch)


def test_an_interrupt_shows_what_is_done_and_how_to_go_on(
    launcher: Systems, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    launcher.ends = {4: KeyboardInterrupt()}
    assert cli(*TINY, *SYSTEMS, "--repeats", "2", "--out", tmp_path) == 130
    printed = capsys.readouterr()
    folder = folder_of(tmp_path)
    assert printed.err.splitlines()[-1] == "interrupted"
    assert re.search(r"^gemini a +0\.75 s ", printed.out, re.MULTILINE)
    assert "3 of 6 runs are done" in printed.out
    assert printed.out.splitlines()[-1] == f"go on with: capricorn-bench compare --resume {folder}"


def test_resume_makes_the_runs_that_are_missing_and_no_other(
    launcher: Systems, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    launcher.ends = {4: KeyboardInterrupt()}
    compared(capsys, *TINY, *SYSTEMS, "--repeats", "2", "--seed", "7", "--out", tmp_path, code=130)
    before, launcher.scenarios = launcher.scenarios, []
    report = compared(capsys, "compare", "--resume", folder_of(tmp_path))
    assert launcher.order == ["gemini", "capricorn", "none"]
    assert launcher.scenarios[0] == before[2]
    assert report["valid"]
    assert report["runs"] == ["run1", "run7", "run2", "run6", "run3", "run5"]
    assert (tmp_path / "run4").exists()
    again = compared(capsys, "compare", "--resume", folder_of(tmp_path))
    assert (again, launcher.num_runs) == (report, 7)


def test_a_folder_may_be_named_from_within(
    launcher: Systems, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher.ends = {2: KeyboardInterrupt()}
    compared(capsys, *TINY, "--systems", "none,capricorn", "--repeats", "1", "--out", tmp_path, code=130)
    monkeypatch.chdir(folder_of(tmp_path))
    assert compared(capsys, "compare", "--resume", ".")["runs"] == ["run1", "run3"]
    assert (tmp_path / "run3").exists()
    assert compared(capsys, "compare", ".")["valid"]


def test_a_run_that_fails_is_told_and_the_others_go_on(
    launcher: Systems, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    launcher.ends = {2: TransportError("rank 1 did not answer\nwithin 30 s")}
    report = compared(capsys, *TINY, *SYSTEMS, "--repeats", "2", "--out", tmp_path, code=1)
    assert launcher.num_runs == 6
    assert not report["valid"]
    assert report["faults"][0] == "capricorn, repeat 1: rank 1 did not answer within 30 s"
    capricorn = report["rows"][1]
    assert (capricorn["runs"], capricorn["requested"]) == (["run5"], 4)
    assert capricorn["slowdown"] == pytest.approx(1.1)
    assert compared(capsys, "compare", "--resume", folder_of(tmp_path))["valid"]
    assert launcher.order[6:] == ["capricorn"]
    assert read_compare(folder_of(tmp_path)).comparisons[0].runs[1].failure == ""


def test_a_verdict_that_is_not_ok_ends_with_1_and_is_not_tried_again(
    launcher: Systems, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "capricorn.stats.run_summary.verdict", lambda summary, scenario: "lost 3" if summary["requested"] else "ok"
    )
    arguments = (*TINY, "--systems", "none,capricorn", "--repeats", "1", "--out", tmp_path)
    report = compared(capsys, *arguments, code=1)
    assert report["faults"] == ["run2: lost 3"]
    assert compared(capsys, "compare", "--resume", folder_of(tmp_path), code=1)["faults"] == ["run2: lost 3"]
    assert launcher.num_runs == 2


def test_resume_takes_no_other_settings(
    launcher: Systems, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:  # fmt: skip
    assert cli("compare", "--resume", tmp_path, "--nodes", "2") == 2
    assert "--nodes contradicts --resume" in capsys.readouterr().err
    assert cli("compare", "--resume", tmp_path) == 2
    assert f"{tmp_path} holds no comparison" in capsys.readouterr().err


def test_a_record_of_another_schema_version_is_refused(
    launcher: Systems, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cli(*TINY, "--systems", "none", "--repeats", "1", "--out", tmp_path, "-q")
    path = folder_of(tmp_path) / "compare.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 99}))
    capsys.readouterr()
    assert cli("compare", "--resume", path.parent) == 2
    assert "was written by a newer version: its schema version is 99" in capsys.readouterr().err


# --- what counts as done


def rewritten(folder: Path, **fields: Any) -> None:
    """The record of the comparison with these fields in each of its runs; None takes one away."""
    path = folder / "compare.json"
    record = json.loads(path.read_text())
    for planned in record["comparisons"]:
        planned["runs"] = [
            {key: value for key, value in (run | fields).items() if value is not None} for run in planned["runs"]
        ]
    path.write_text(json.dumps(record))


ONE = (*TINY, "--systems", "none,capricorn", "--repeats", "1")


def test_a_run_that_was_interrupted_while_it_drained_is_made_again(
    launcher: Systems, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    launcher.drained = {2: KeyboardInterrupt()}
    compared(capsys, *ONE, "--out", tmp_path, code=130)
    record = read_run(tmp_path / "run2")
    assert (record.summary["iterations"], record.verdict) == (4, "effective checkpoints 3 of 4 requested")
    assert [run.finished for run in read_compare(folder_of(tmp_path)).comparisons[0].runs] == [True, False]
    launcher.drained = {}
    assert compared(capsys, "compare", "--resume", folder_of(tmp_path))["runs"] == ["run1", "run3"]


def test_a_run_that_was_interrupted_is_made_again_though_nothing_of_it_is_missing(
    launcher: Systems, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    launcher.drained = {1: KeyboardInterrupt()}
    compared(capsys, *ONE, "--out", tmp_path, code=130)
    assert read_run(tmp_path / "run1").verdict == "ok", "without checkpoints none can miss"
    launcher.drained = {}
    assert compared(capsys, "compare", "--resume", folder_of(tmp_path))["runs"] == ["run2", "run3"]


def test_a_run_that_finished_with_checkpoints_missing_is_done(
    launcher: Systems, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    launcher.lost = {2}
    report = compared(capsys, *ONE, "--out", tmp_path, code=1)
    assert report["faults"] == ["run2: effective checkpoints 3 of 4 requested"]
    assert compared(capsys, "compare", "--resume", folder_of(tmp_path), code=1)["faults"] == report["faults"]
    assert launcher.num_runs == 2


@pytest.mark.parametrize(("lost", "num_runs"), [(set(), 2), ({2}, 3)])
def test_runs_of_a_record_that_does_not_say_whether_they_finished_are_done_if_they_are_whole(
    lost: set[int], num_runs: int, launcher: Systems, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    launcher.lost = lost
    compared(capsys, *ONE, "--out", tmp_path, code=len(lost))
    rewritten(folder_of(tmp_path), finished=None)
    assert "finished" not in (folder_of(tmp_path) / "compare.json").read_text()
    assert compared(capsys, "compare", "--resume", folder_of(tmp_path))["valid"]
    assert launcher.num_runs == num_runs


# --- going on with it


def test_a_folder_is_carried_out_by_one_command_at_a_time(
    launcher: Systems, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    launcher.ends = {2: KeyboardInterrupt()}
    compared(capsys, *ONE, "--out", tmp_path, code=130)
    folder = folder_of(tmp_path)
    with (folder / "compare.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = (folder / "compare.json").read_bytes()
        assert cli("compare", "--resume", folder) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line == f"error: {folder} is being carried out by another command; wait until that is over, or end it"
        assert ((folder / "compare.json").read_bytes(), launcher.num_runs) == (before, 2)
    assert compared(capsys, "compare", "--resume", folder)["valid"]


def test_the_first_command_holds_its_folder_too(launcher: Systems, tmp_path: Path) -> None:
    held: list[str] = []

    def resumed() -> None:
        try:
            with alone_in(folder_of(tmp_path)):
                held.append("free")
        except ConfigError as error:
            held.append(str(error))

    launcher.at_start = resumed
    assert cli(*ONE, "--out", tmp_path, "-q") == 0
    assert len(held) == 2
    assert all("is being carried out by another command" in each for each in held)


def test_a_machine_that_has_become_too_small_goes_on_with_nothing(
    launcher: Systems, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher.ends = {2: KeyboardInterrupt()}
    compared(capsys, *ONE, "--out", tmp_path, code=130)
    asked: list[str] = []

    def require(scenario: Scenario) -> None:
        asked.append(scenario.system.name)
        raise ConfigError("host memory: too small")

    monkeypatch.setattr(machine, "require", require)
    assert cli("compare", "--resume", folder_of(tmp_path)) == 2
    assert capsys.readouterr().err == "error: host memory: too small\n"
    assert (asked, launcher.num_runs) == (["capricorn"], 2), "what is done needs no room"


def test_paths_mean_the_same_wherever_it_is_gone_on_with(
    launcher: Systems, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("some text " * 1000)
    (tmp_path / "elsewhere").mkdir()
    write_trace(tmp_path / "loads.npz")
    monkeypatch.chdir(tmp_path)
    launcher.ends = {2: KeyboardInterrupt()}
    paths = ("--data", "text.txt", "--loads", "loads.npz", "--set", "store.root=stores")
    assert cli(*ONE[:-4], "--systems", "none,capricorn:store.root=own", *paths, "--repeats", "1", "--out", "out") == 130
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert cli("compare", "--resume", folder_of(tmp_path / "out"), "-q") == 0
    last = launcher.scenarios[-1]
    assert (last.data.path, last.loads.source) == (str(tmp_path / "text.txt"), str(tmp_path / "loads.npz"))
    assert [each.store.root for each in launcher.scenarios[1:]] == [str(tmp_path / "own")] * 2
    assert launcher.scenarios[0].store.root == str(tmp_path / "stores")


def test_names_that_are_no_paths_stay_names(launcher: Systems, tmp_path: Path) -> None:
    assert cli(*ONE, "--loads", "stable", "--out", tmp_path, "-q") == 0
    scenario = read_compare(folder_of(tmp_path)).comparisons[0].scenario
    assert (scenario.data.path, scenario.loads.source, scenario.store.root) == ("stdlib", "stable", "/dev/shm")


def write_trace(path: Path) -> None:
    """A layer whose experts all have the same share."""
    num_experts = scenario_of().model.num_experts
    np.savez(path, iterations=np.array([1]), load_share=np.full((1, 1, num_experts), 1 / num_experts))


# --- what is damaged

TWO = """
model = "mixtral-tiny"
device = "cpu"
iterations = 4
repeats = 1
systems = ["none", "capricorn"]
[[comparisons]]
label = "first"
[[comparisons]]
label = "second"
"""


@pytest.mark.parametrize("name", ["run.json", "store.json"])
def test_a_damaged_run_is_a_fault_of_its_comparison_and_hides_no_other(
    name: str, launcher: Systems, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "two.toml").write_text(TWO)
    whole = compared(capsys, "compare", "--scenario", tmp_path / "two.toml", "--out", tmp_path)
    damaged = tmp_path / "run2" / name
    damaged.write_text("{")
    report = compared(capsys, "compare", folder_of(tmp_path), code=1)
    first, second = report["comparisons"]
    assert second == whole["comparisons"][1]
    assert (first["valid"], first["runs"]) == (False, ["run1"])
    assert first["faults"][0].startswith(f"capricorn, repeat 1: {damaged}")
    assert "is damaged" in first["faults"][0]
    assert first["faults"][1] == "1 of 2 runs are done"
    assert cli("export", folder_of(tmp_path), "--out", tmp_path / "report.html") == 0


def test_a_run_whose_record_is_damaged_is_made_again(
    launcher: Systems, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    compared(capsys, *ONE, "--out", tmp_path)
    (tmp_path / "run2" / "run.json").write_text("{")
    assert compared(capsys, "compare", "--resume", folder_of(tmp_path))["runs"] == ["run1", "run3"]


def test_a_run_that_did_other_work_than_was_planned_is_a_fault(
    launcher: Systems, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    compared(capsys, *ONE, "--out", tmp_path)
    path = tmp_path / "run2" / "run.json"
    record = json.loads(path.read_text())
    record["config"]["train"]["seed"] = 5
    path.write_text(json.dumps(record))
    report = compared(capsys, "compare", folder_of(tmp_path), code=1)
    assert report["runs"] == ["run1"]
    assert "capricorn, repeat 1: only runs of the same work can be compared: train.seed is 0" in report["faults"][0]
