"""The command `compare` of finished runs, and where runs that were not planned together belong."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from capricorn.compare.compare_record import CompareRecord, PlannedComparison, Variant, write_compare
from capricorn.compare.comparison import compare_runs
from capricorn.compare.finished_runs import compare_planned, load_comparisons
from capricorn.config.scenario import Scenario
from capricorn.errors import ConfigError
from capricorn.records.samples import ITERATIONS, RUN
from tests.cli.test_cli import cli
from tests.support.comparisons import (
    Runs,
    Systems,
    compared,
    finished,
    rows_of,
    scenario_of,
    show,
    write_folder,
    write_record,
    write_runs,
)


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return write_runs(tmp_path)


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Systems:
    return Systems.installed(monkeypatch)


def test_finished_runs_are_compared_without_running(
    launcher: Systems, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    none, ours = finished(tmp_path, 1.0, 1.0, system="none"), finished(tmp_path, 1.3, 1.3)
    report = compared(capsys, "compare", *none, *ours)
    assert [(row["system"], len(row["runs"])) for row in report["rows"]] == [("none", 2), ("capricorn", 2)]
    assert report["rows"][1]["slowdown"] == pytest.approx(1.3, rel=0.05)
    assert launcher.num_runs == 0


@pytest.mark.parametrize(
    ("paces", "threshold", "code"),
    [
        ((1.0, 1.02), "5%", 0),
        ((1.0, 1.3), "5%", 1),
        ((1.0, 1.3), "0.05", 1),
        ((1.0, 1.3), "50%", 0),
        ((1.0, 0.5), "0%", 0),
        ((1.0, 1.0, 1.2), "5%", 1),
        ((1.2, 1.0), "0.1", 0),
    ],
)
def test_a_run_that_is_slower_than_the_first_by_more_ends_with_1(
    paces: tuple[float, ...], threshold: str, code: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    base, *later = finished(tmp_path, *paces)
    report = compared(capsys, "compare", base, *later, "--threshold", threshold, code=code)
    assert [check["run"] for check in report["checks"]] == [path.name for path in later]
    assert any(check["slower"] for check in report["checks"]) == (code == 1)
    for check, pace in zip(report["checks"], paces[1:], strict=True):
        assert check["ratio"] == pytest.approx(pace / paces[0], rel=0.05)
    assert cli("compare", base, *later, "--threshold", threshold) == code
    said = [line for line in capsys.readouterr().out.splitlines() if "slower by more than" in line]
    assert ["not slower" not in line for line in said] == [check["slower"] for check in report["checks"]]


def test_a_large_difference_of_which_the_size_is_in_doubt_ends_with_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    base = write_folder(tmp_path, "a", scenario_of(), seed=1)
    uneven = write_folder(
        tmp_path, "b", scenario_of(), seed=2, fields=lambda i, rank: {"duration_s": 6.0 if i % 3 == 0 else 1.2}
    )
    (check,) = compared(capsys, "compare", base, uneven, "--threshold", "30%", code=1)["checks"]
    assert 1 < check["ci"][0] < 1.3 < check["ratio"]
    assert cli("compare", base, uneven, "--threshold", "30%") == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "of a, slower by more than 30%, and its interval does not hold 1" in said


def test_what_is_slower_only_in_doubt_passes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    base = write_folder(tmp_path, "a", scenario_of(), seed=1)
    noisy = write_folder(
        tmp_path, "b", scenario_of(), seed=2, fields=lambda i, rank: {"duration_s": 9.0 if i == 12 else 0.6}
    )
    report = compared(capsys, "compare", base, noisy, "--threshold", "20%")
    (check,) = report["checks"]
    assert check["ratio"] > 1.2 > 1 > check["ci"][0]
    assert cli("compare", base, noisy, "--threshold", "20%") == 0
    assert "of a, slower by more than 20%, but its interval holds 1" in " ".join(capsys.readouterr().out.split())


def test_the_help_says_when_a_run_fails_the_threshold(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli("compare", "--help") == 0
    said = " ".join(capsys.readouterr().out.replace("\u2502", " ").split())
    assert "and the interval of their ratio does not hold 1" in said


@pytest.mark.parametrize(
    ("sections", "record", "message"),
    [
        ({}, {"mode": "emulated"}, "mode is live in"),
        ({"every": 2}, {}, "system.every is 1 in"),
        ({"system": "gemini", "replicas": 1}, {}, "system.replicas is 2 in"),
        ({"train": {"iterations": 22, "warmup": 2, "seed": 3}}, {}, "train.seed is 0 in"),
        ({"loads": {"source": "stable"}}, {}, "loads.source is router in"),
    ],
)
def test_runs_of_other_work_or_checkpoints_are_refused_by_name(
    sections: dict[str, Any], record: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (here,) = finished(tmp_path, 1.0)
    there = write_folder(tmp_path, "there", scenario_of(**({"iterations": 22} | sections)), **record)
    assert cli("compare", here, there) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert str(there) in line


def test_other_losses_end_with_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    none = write_folder(tmp_path, "n", scenario_of("none"))
    ours = write_folder(tmp_path, "c", scenario_of(), fields=lambda i, rank: {"loss": 4.0 + rank})
    assert "losses differ: capricorn has 4.0" in compared(capsys, "compare", none, ours, code=1)["faults"][0]


# --- folders


def test_run_folders_form_comparisons_by_work_and_mode(runs: Runs, tmp_path: Path) -> None:
    emulated = write_folder(tmp_path, "e", scenario_of("none"), mode="emulated")
    other = write_folder(tmp_path, "s", scenario_of("none", train={"iterations": 12, "warmup": 2, "seed": 1}))
    mixed = [emulated, *runs["gemini"], *runs["none"], other, *runs["capricorn"]]
    loaded = load_comparisons(mixed)
    assert [comparison.mode for comparison, _ in loaded] == ["emulated", "live", "live"]
    comparison, folders = loaded[1]
    assert folders == {"gemini": runs["gemini"], "none": runs["none"], "capricorn": runs["capricorn"]}
    assert rows_of(comparison) == rows_of(compare_runs("", runs))
    assert loaded[2][1] == {"none": [other]}


def test_runs_of_one_system_with_other_settings_are_no_repeats(tmp_path: Path) -> None:
    spans = ("load", "layer", "load")
    folders = [
        write_folder(tmp_path, f"{k}", scenario_of("capricorn", planner={"spans": each}))
        for k, each in enumerate(spans)
    ]
    none = [
        write_folder(tmp_path, f"n{k}", scenario_of("none", planner={"spans": each})) for k, each in enumerate(spans)
    ]
    ((_, found),) = load_comparisons([*folders, *none])
    assert found == {
        "capricorn:planner.spans=load": [folders[0], folders[2]],
        "capricorn:planner.spans=layer": [folders[1]],
        "none": none,
    }


def test_runs_of_other_checkpoints_form_another_comparison_with_the_same_base(runs: Runs, tmp_path: Path) -> None:
    rarely = write_folder(tmp_path, "rarely", scenario_of("capricorn", every=2))
    none = write_folder(tmp_path, "none", scenario_of("none", every=2, replicas=1))
    loaded = load_comparisons([none, *runs["capricorn"], rarely])
    assert [folders for _, folders in loaded] == [
        {"none": [none], "capricorn": runs["capricorn"]},
        {"none": [none], "capricorn": [rarely]},
    ]


def test_runs_of_other_checkpoints_are_no_comparison(tmp_path: Path) -> None:
    often = write_folder(tmp_path, "a", scenario_of("capricorn"))
    rarely = write_folder(tmp_path, "b", scenario_of("gemini", every=3))
    with pytest.raises(ConfigError, match=r"system\.every is 1 in a and 3 in b"):
        compare_runs("", {"capricorn": [often], "gemini": [rarely]})
    none = write_folder(tmp_path, "c", scenario_of("none", every=3))
    assert compare_runs("", {"none": [none], "capricorn": [often]}).valid


def test_a_run_that_tried_settings_is_left_out(tmp_path: Path) -> None:
    sweep = write_folder(tmp_path, "sweep", scenario_of("gemini", gemini={"mu": "sweep"}))
    none = write_folder(tmp_path, "none", scenario_of("none"))
    assert [folders for _, folders in load_comparisons([sweep, none])] == [{"none": [none]}]
    with pytest.raises(ConfigError, match="no finished run to compare in"):
        load_comparisons([sweep])


def test_a_comparison_that_is_not_done_shows_what_is_there_and_how_to_go_on(runs: Runs, tmp_path: Path) -> None:
    folder, planned = plan(tmp_path, scenario_of(), "none", "capricorn", "gemini")
    planned = started(planned, "none", 1, runs["none"][0].name)
    planned = started(planned, "capricorn", 1, runs["capricorn"][0].name)
    planned = started(planned, "gemini", 1, "never-recorded", failure="node 1 gave up")
    write_compare(folder, CompareRecord(compare_id="c", started_at="", comparisons=(planned,)))
    ((comparison, folders),) = load_comparisons([folder])
    assert folders == {"none": runs["none"][:1], "capricorn": runs["capricorn"][:1], "gemini": []}
    assert comparison.faults == (
        "gemini, repeat 1: node 1 gave up",
        "2 of 6 runs are done",
    )
    rows = rows_of(comparison)
    assert (rows["gemini"].iteration_s_p50, rows["gemini"].slowdown, rows["gemini"].requested) == (None, None, 0)
    assert rows["capricorn"].slowdown is not None
    assert "gemini" in show(comparison, 80)


def test_a_run_counts_once_when_its_comparison_is_named_too(tmp_path: Path) -> None:
    folder = write_compared(tmp_path / "compared")
    names = ("none", "gemini", "capricorn")
    runs = {name: [tmp_path / "compared" / f"{name}-{repeat}" for repeat in (0, 1)] for name in names}
    loaded = load_comparisons([*runs["none"], folder, *runs["gemini"], *runs["capricorn"]])
    assert [folders.keys() for _, folders in loaded] == [{"none", "capricorn"}, {"gemini"}]


def test_an_interrupted_run_and_a_failed_one_do_not_count(runs: Runs, tmp_path: Path) -> None:
    folder, planned = plan(tmp_path, scenario_of(), "none", "gemini")
    longer = scenario_of("gemini", iterations=20)
    stopped = tmp_path / "stopped"
    stopped.mkdir()
    (stopped / "iterations.jsonl").write_bytes((runs["gemini"][0] / "iterations.jsonl").read_bytes())
    write_record(stopped, longer)
    planned = started(planned, "gemini", 1, "stopped")
    planned = started(planned, "none", 1, runs["none"][0].name, failure="a save failed")
    comparison = compare_planned(folder, planned)
    assert comparison.runs == ()
    assert "0 of 4 runs are done" in comparison.faults[-1]


def plan(out: Path, scenario: Scenario, *systems: str) -> tuple[Path, PlannedComparison]:
    variants = [Variant.parse(system) for system in systems]
    return out / "compare", PlannedComparison.plan("", scenario, variants, 2)


def started(
    planned: PlannedComparison, variant: str, repeat: int, run_id: str, failure: str = ""
) -> PlannedComparison:  # fmt: skip
    run = next(each for each in planned.runs if (each.variant, each.repeat) == (variant, repeat))
    return planned.with_run(run.model_copy(update={"run_id": run_id, "failure": failure}))


def write_compared(out: Path) -> Path:
    """A comparison that is done; returns its folder, beside which its runs lie."""
    runs = write_runs(out)
    folder, planned = plan(out, scenario_of(), "none", "capricorn")
    for variant in ("none", "capricorn"):
        for repeat in (1, 2):
            planned = started(planned, variant, repeat, runs[variant][repeat - 1].name)
    write_compare(folder, CompareRecord(compare_id="c", started_at="", comparisons=(planned,)))
    return folder


# --- a copy is no repeat


@pytest.mark.parametrize("command", ["export", "compare"])
@pytest.mark.parametrize("again", ["the same path", "another spelling", "a link", "a copy"])
def test_a_run_that_is_named_twice_is_refused(
    command: str, again: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    none, ours = finished(tmp_path, 1.0, system="none")[0], finished(tmp_path, 1.3)[0]
    twice = tmp_path / "twice"
    if again == "a link":
        twice.symlink_to(ours)
    elif again == "a copy":
        shutil.copytree(ours, twice)
    else:
        twice = ours if again == "the same path" else tmp_path / "." / none.name / ".." / ours.name
    assert cli(command, none, ours, twice) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"error: {ours} and {twice} are the same run, {ours.name}: name it once; a copy is no repeat"
    )


def test_a_copy_of_a_run_is_refused_beside_a_threshold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = finished(tmp_path, 1.0)[0]
    shutil.copytree(base, tmp_path / "copy")
    assert cli("compare", base, tmp_path / "copy", "--threshold", "5%") == 2
    assert "are the same run" in capsys.readouterr().err


@pytest.mark.parametrize("again", ["itself", "a copy of all", "a copy of one of its runs"])
def test_what_a_comparison_holds_is_not_taken_twice(
    again: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_compared(tmp_path / "results")
    if again == "a copy of all":
        shutil.copytree(tmp_path / "results", tmp_path / "copies")
    run = tmp_path / "results" / "none-0"
    shutil.copytree(run, tmp_path / "copy")
    copies = {"itself": folder, "a copy of all": tmp_path / "copies" / folder.name}
    other = copies.get(again, tmp_path / "copy")
    assert cli("export", folder, other) == 2
    assert "are the same run" in capsys.readouterr().err
    assert cli("export", folder, run) == 0  # it is left out, as the comparison has it


# --- losses that are not finite


def broken(first: int, loss: float) -> Callable[[int, int], dict[str, Any]]:
    """Losses that are not finite from that iteration on."""
    return lambda iteration, rank: {"loss": loss} if iteration >= first else {}


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_runs_whose_losses_are_not_finite_alike_are_compared(
    loss: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    none = write_folder(tmp_path, "n", scenario_of("none"), fields=broken(5, loss))
    ours = write_folder(tmp_path, "c", scenario_of(), fields=broken(5, loss))
    report = compared(capsys, "compare", none, ours)
    assert report["valid"]
    assert [note for note in report["notes"] if "finite" in note] == [
        f"{run}: the loss is not finite from iteration 5 on" for run in ("n", "c")
    ]


@pytest.mark.parametrize(
    ("ours", "theirs"), [(math.nan, math.inf), (math.nan, 1.0), (math.inf, -math.inf), (0.0, -0.0)]
)
def test_losses_of_other_bits_are_told(
    ours: float, theirs: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [
        write_folder(tmp_path, "n", scenario_of("none"), fields=broken(7, theirs)),
        write_folder(tmp_path, "c", scenario_of(), fields=broken(7, ours)),
    ]
    report = compared(capsys, "compare", *paths, code=1)
    assert f"losses differ: capricorn has {ours!r} in iteration 7 on rank 0, none {theirs!r}" in report["faults"][0]


@pytest.mark.parametrize("arguments", [["inspect"], ["compare"], ["export", "--format", "json"]])
def test_what_is_printed_of_them_is_json_for_every_reader(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_folder(tmp_path, "r", scenario_of(), fields=broken(3, math.nan))
    assert cli(*arguments, run, *([] if arguments[0] == "export" else ["--json"])) == 0
    json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    json.loads((run / RUN).read_text(), parse_constant=pytest.fail)
    frame = pd.read_json(run / ITERATIONS, lines=True)
    assert frame["loss"].dtype == float
    assert frame[frame["iteration"] >= 3]["loss"].isna().all()


def test_a_page_and_a_trace_are_made_of_them(tmp_path: Path) -> None:
    run = write_folder(tmp_path, "r", scenario_of(), fields=broken(3, math.nan))
    assert cli("export", run, "--out", tmp_path / "page.html", "--trace", tmp_path / "trace.json") == 0
    json.loads((tmp_path / "trace.json").read_text(), parse_constant=pytest.fail)
