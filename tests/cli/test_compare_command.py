"""The command `compare`: what it runs in which order, what it goes on with, what it refuses. Training is faked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from capricorn.compare.compare_record import CompareRecord, PlannedComparison, Variant, parse_variants, read_compare
from capricorn.config.scenario import Scenario
from capricorn.errors import CapricornError, ConfigError
from capricorn.launch import preflight as machine
from capricorn.launch.launcher import RunListener
from capricorn.records.samples import ITERATIONS, IterationSample, read_run, read_samples
from capricorn.systems.settings import settings_of, with_options
from tests.cli.test_cli import cli, python
from tests.support.comparisons import SYSTEMS, TINY, Systems, compared, finished, folder_of, scenario_of
from tests.support.runs import command

ROW = {
    "system", "iteration_s_p50", "stall_s_p50", "slowdown", "slowdown_ci", "speedup_of_capricorn", "speedup_ci",
    "requested", "effective", "peak_rss_bytes",
}  # fmt: skip


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Systems:
    return Systems.installed(monkeypatch)


# --- runs


def test_systems_run_there_and_back_with_all_else_alike(
    launcher: Systems, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli(*TINY, *SYSTEMS, "--set", "system.every=2", "--out", tmp_path, "-q") == 0
    there = ["none", "capricorn", "gemini"]
    assert launcher.order == [*there, *reversed(there), *there]
    alike = [each.model_copy(update={"system": launcher.scenarios[0].system}) for each in launcher.scenarios]
    assert all(each == launcher.scenarios[0] for each in alike)
    assert {each.system.every for each in launcher.scenarios} == {2}
    assert [each.system.options.get("mu") for each in launcher.scenarios[:3]] == [None, None, 0.9]


def test_json_is_one_object_with_a_row_for_each_system(
    launcher: Systems, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report = compared(capsys, *TINY, *SYSTEMS, "--repeats", "2", "--out", tmp_path)
    assert report.keys() >= {"mode", "valid", "rows", "runs"}
    assert (report["mode"], report["valid"], len(report["runs"])) == ("live", True, 6)
    assert all(row.keys() >= ROW for row in report["rows"])
    assert [row["system"] for row in report["rows"]] == ["none", "capricorn", "gemini"]
    gemini = report["rows"][2]
    assert gemini["label"] == "gemini:gemini.mu=0.9"
    assert gemini["slowdown"] == pytest.approx(1.5)
    assert gemini["slowdown_ci"] == pytest.approx([1.5, 1.5])
    assert gemini["speedup_of_capricorn"] == pytest.approx(0.75 / 0.55)
    assert (gemini["requested"], gemini["effective"]) == (8, 8)
    assert report["compare_id"] == folder_of(tmp_path).name


def test_a_pipe_gets_a_line_before_each_run_and_the_table_after_the_last(
    launcher: Systems, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli(*TINY, *SYSTEMS, "--repeats", "2", "--out", tmp_path) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    lines = re.findall(r"^run (\d) of 6: (.+), repeat (\d)", printed, re.MULTILINE)
    assert lines[:4] == [
        ("1", "none", "1"), ("2", "capricorn", "1"), ("3", "gemini:gemini.mu=0.9", "1"),
        ("4", "gemini:gemini.mu=0.9", "2"),
    ]  # fmt: skip
    assert "run 5 of 6: capricorn, repeat 2; about 10 s left" in printed
    assert re.search(r"^gemini a +0\.75 s +10 ms +1\.500 \[1\.500, 1\.500\] +1\.364 ", printed, re.MULTILINE)
    assert printed.splitlines()[-1] == str(folder_of(tmp_path))


def test_each_run_has_its_own_record_and_is_noted_when_it_starts(launcher: Systems, tmp_path: Path) -> None:
    assert cli(*TINY, "--systems", "none,capricorn", "--repeats", "1", "--out", tmp_path, "-q") == 0
    record = read_compare(folder_of(tmp_path))
    assert [(run.variant, run.repeat, run.run_id) for run in record.comparisons[0].runs] == [
        ("none", 1, "run1"), ("capricorn", 1, "run2"),
    ]  # fmt: skip
    assert [read_run(tmp_path / each).system for each in ("run1", "run2")] == ["none", "capricorn"]


def test_a_dry_run_says_what_would_run_and_starts_nothing(
    launcher: Systems, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli(*TINY, *SYSTEMS, "--repeats", "2", "--out", tmp_path / "out", "--dry-run") == 0
    printed = capsys.readouterr().out
    assert "mixtral-tiny, 2 nodes x 1 rank on cpu; 4 iterations: 6 runs" in printed
    assert re.search(r"^gemini:gemini\.mu=0\.9 +1\.53 MB +1\.47 GB +12\.5 MB ", printed, re.MULTILINE)
    report = compared(capsys, *TINY, *SYSTEMS, "--repeats", "1", "--out", tmp_path / "out", "--dry-run")
    assert report["comparisons"][0]["runs"] == ["none", "capricorn", "gemini:gemini.mu=0.9"]
    assert report["comparisons"][0]["needs"]["none"]["store_bytes"] == 0
    assert launcher.num_runs == 0
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--help", "--dry-run"])
def test_these_need_no_torch_and_no_pandas(option: str) -> None:
    code = f"""
import sys
from capricorn.cli.main import main
try:
    main(["compare", "--model", "mixtral-tiny", "--systems", "none,capricorn", "{option}"])
except SystemExit:
    print("loaded:", [name for name in ("torch", "pandas", "matplotlib") if name in sys.modules])
"""
    assert "loaded: []" in python(code)


# --- tuning


class Tuning:
    """Stands in for the sweep that finds a factor."""

    def __init__(self) -> None:
        self.calls: list[Scenario] = []
        self.end: CapricornError | None = None

    @staticmethod
    def needs_tuning(scenario: Scenario) -> bool:
        return scenario.system.name == "gemini" and settings_of(scenario).mu == "auto"

    def tune(self, scenario: Scenario, out: Path, listener: RunListener, start: object) -> tuple[Scenario, str]:
        self.calls.append(scenario)
        if self.end:
            raise self.end
        return with_options(scenario, mu=0.85, tuned_in="SWEEP"), "SWEEP"


@pytest.fixture
def tuning(monkeypatch: pytest.MonkeyPatch) -> Tuning:
    fake = Tuning()
    monkeypatch.setattr("capricorn.launch.tuning.needs_tuning", fake.needs_tuning)
    monkeypatch.setattr("capricorn.launch.tuning.tune", fake.tune)
    return fake


def test_a_factor_is_tuned_once_and_kept_for_all_repeats_and_a_resume(
    launcher: Systems, tuning: Tuning, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    launcher.ends = {3: KeyboardInterrupt()}
    asked = ("--systems", "none,gemini", "--repeats", "2", "--out", tmp_path)
    compared(capsys, *TINY, *asked, code=130)
    report = compared(capsys, "compare", "--resume", folder_of(tmp_path))
    assert len(tuning.calls) == 1
    assert {settings_of(each).mu for each in launcher.scenarios if each.system.name == "gemini"} == {0.85}
    assert report["rows"][1]["notes"] == ["mu 0.85, tuned in SWEEP"]
    tuned = read_compare(folder_of(tmp_path)).comparisons[0].tuned["gemini"]
    assert (tuned.run_id, set(tuned.assignments)) == (
        "SWEEP",
        {"system.options.mu=0.85", "system.options.tuned_in=SWEEP"},
    )


def test_a_variant_that_cannot_be_tuned_fails_once_and_the_others_go_on(
    launcher: Systems, tuning: Tuning, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tuning.end = CapricornError("the sweep found nothing")
    report = compared(
        capsys, *TINY, "--systems", "none,gemini", "--repeats", "2", "--out", tmp_path, code=1
    )  # fmt: skip
    assert (len(tuning.calls), launcher.order) == (1, ["none", "none"])
    assert report["faults"][:2] == [f"gemini, repeat {k}: the sweep found nothing" for k in (1, 2)]


def test_a_factor_that_is_given_is_not_tuned(launcher: Systems, tuning: Tuning, tmp_path: Path) -> None:
    assert cli(*TINY, *SYSTEMS, "--repeats", "1", "--out", tmp_path, "-q") == 0
    assert not tuning.calls


# --- mistakes

MISTAKES: list[tuple[tuple[str, ...], str]] = [
    (("--systems", "none,capricron"), "did you mean 'capricorn'?"),
    (("--systems", "none,none"), "names 'none' twice"),
    (("--systems", "none,,capricorn"), "names no system"),
    (("--systems", ""), "names no system"),
    (("--systems", "capricorn:planner.risk"), "'planner.risk' is not key=value"),
    (("--systems", "capricorn:"), "'' is not key=value"),
    (("--systems", "capricorn:=3"), "'=3' is not key=value"),
    (("--systems", "capricorn:planner.rsk=0.1"), "did you mean 'planner.risk'?"),
    (("--systems", "capricorn:planner.risk=x"), "planner.risk = 'x'"),
    (("--systems", "capricorn:train.seed=1"), "would do other work than the others; use --set train.seed=1"),
    (("--systems", "capricorn:system.name=none"), "system.name is the name before the first colon"),
    (("--systems", "capricorn:train.iterations=3"), "warmup 3 leaves nothing of 3 iterations"),
    (("--set", "system.name=none"), "here system.name is a list; use --systems"),
    (("--threshold", "5%"), "--threshold is for finished runs"),
    (("RUN", "--threshold", "5%"), "--threshold compares runs with"),
    (("RUN", "RUN", "--threshold", "5"), "write 5% or 0.05"),
    (("RUN", "RUN", "--threshold", "-5%"), "write 5% or 0.05"),
    (("RUN", "RUN", "--threshold", "nan"), "write 5% or 0.05"),
    (("RUN", "--iterations", "3"), "--iterations says nothing about finished runs"),
    (("RUN", "--systems", "none"), "--systems says nothing about finished runs"),
    (("/no/such",), "/no/such holds no run"),
    (("--scenario", "none.toml"), "cannot read none.toml"),
    (("--resume", "/no/such"), "/no/such holds no comparison"),
    (("--repeats", "0"), "'--repeats': '0' is not a whole number, 1 or more"),
    (("--systems", "none", "--out", "/dev/null/x"), "--out /dev/null/x"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[" ".join(a) for a, _ in MISTAKES])
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: Sequence[str], message: str, launcher: Systems, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (here,) = finished(tmp_path, 1.0)
    usual = () if "RUN" in arguments or "--resume" in arguments or "/no/such" in arguments else TINY[1:]
    assert cli("compare", *usual, *(here if each == "RUN" else each for each in arguments)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert launcher.num_runs == 0


def test_a_folder_of_a_comparison_stands_alone(
    launcher: Systems, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cli(*TINY, "--systems", "none", "--repeats", "1", "--out", tmp_path, "-q")
    assert cli("compare", folder_of(tmp_path), tmp_path / "run1") == 2
    assert "name the folders of its runs instead" in capsys.readouterr().err


def test_a_machine_that_is_too_small_for_one_of_them_starts_none(
    launcher: Systems, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def require(scenario: Scenario) -> None:
        if scenario.system.name == "gemini":
            raise ConfigError("host memory: too small")

    monkeypatch.setattr(machine, "require", require)
    assert cli(*TINY, *SYSTEMS, "--out", tmp_path / "out") == 2
    assert capsys.readouterr().err == "error: host memory: too small\n"
    assert not (tmp_path / "out").exists()


# --- values


def test_a_variant_is_spelled_as_it_is_parsed() -> None:
    text = "gemini:mu=0.5:train.iterations=12"
    variant = Variant.parse(f" {text} ")
    assert variant.assignments == ("mu=0.5", "train.iterations=12")
    assert variant.label == text
    scenario = Variant.parse("gemini:mu=0.5:train.iterations=6").of(scenario_of())
    assert (scenario.system.name, settings_of(scenario).mu, scenario.train.iterations) == ("gemini", 0.5, 6)
    assert [each.label for each in parse_variants(["gemini", "gemini:gemini.mu=0.9"])] == [
        "gemini", "gemini:gemini.mu=0.9",
    ]  # fmt: skip


def test_a_record_survives_being_written() -> None:
    planned = PlannedComparison.plan("x", scenario_of(), parse_variants(["none", "gemini:gemini.mu=0.9"]), 2)
    assert [(run.variant, run.repeat) for run in planned.runs] == [
        ("none", 1), ("gemini:gemini.mu=0.9", 1), ("gemini:gemini.mu=0.9", 2), ("none", 2),
    ]  # fmt: skip
    record = CompareRecord(compare_id="c", started_at="2026-11-30T10:00:00+00:00", comparisons=(planned,))
    assert CompareRecord.model_validate_json(record.model_dump_json()) == record


# --- for real


def test_two_systems_are_compared_for_real(tmp_path: Path) -> None:
    options = ("--model", "mixtral-tiny", "--device", "cpu", "--systems", "none,capricorn", "--iterations", "8")
    done = command("compare", *options, "--repeats", "1", "--json", "--out", tmp_path)
    assert (done.exit_code, done.stderr) == (0, "")
    report = done.json
    assert (report["valid"], report["faults"]) == (True, [])
    none, ours = report["rows"]
    assert (none["slowdown"], none["requested"]) == (1.0, 0)
    assert (ours["requested"], ours["effective"]) == (8, 8)
    folders = [tmp_path / run for run in report["runs"]]
    steady = [
        {
            iteration: max(sample.duration_s for sample in samples if sample.iteration == iteration)
            for iteration in (6, 7, 8)
        }
        for samples in ([*read_samples(folder / ITERATIONS, IterationSample)] for folder in folders)
    ]
    assert ours["slowdown"] == pytest.approx(sum(steady[1].values()) / sum(steady[0].values()))
    assert ours["slowdown_ci"][0] <= ours["slowdown"] <= ours["slowdown_ci"][1]
    assert ours["sent_bytes_per_iteration"] > 1_000_000
    losses = [
        {(each.iteration, each.rank): each.loss for each in read_samples(folder / ITERATIONS, IterationSample)}
        for folder in folders
    ]
    assert losses[0] == losses[1]
