"""The command `compare`: what it runs in which order, what it goes on with, what it refuses. Training is faked."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from capricorn.cli.experiment import experiment_of
from capricorn.cli.main import app

from capricorn.comparison import CompareRecord, PlannedComparison, Variant, parse_variants, read_compare
from capricorn.config import Scenario
from capricorn.errors import CapricornError, ConfigError, TransportError
from capricorn.harness import machine
from capricorn.harness.launcher import RunListener
from capricorn.records import ITERATIONS, IterationSample, read_run, read_samples
from tests.comparisons import scenario_of, write_folder
from tests.runs import command
from tests.test_cli import Launcher, cli, python

PACES = {"none": 0.5, "capricorn": 0.55, "gemini": 0.75, "blocking": 1.0}
TINY = ("compare", "--model", "mixtral-tiny", "--iterations", "4", "--device", "cpu")
SYSTEMS = ("--systems", "none,capricorn,gemini:gemini.mu=0.9")
ROW = {
    "system", "iteration_s_p50", "stall_s_p50", "slowdown", "slowdown_ci", "speedup_of_capricorn", "speedup_ci",
    "requested", "effective", "peak_rss_bytes",
}  # fmt: skip


class Systems(Launcher):
    """Each system has its own pace; `ends` are raised in the run of that number, after two iterations."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: dict[int, BaseException] = {}
        self.slower: dict[int, float] = {}

    def launch(self, scenario: Scenario, out: Path, listener: RunListener) -> Path:
        number = self.num_runs + 1
        self.end = self.ends.get(number)
        self.stop_after = 2 if self.end else None
        self.fields = {"duration_s": PACES[scenario.system.name] * self.slower.get(number, 1.0)}
        return super().launch(scenario, out, listener)

    @property
    def order(self) -> list[str]:
        return [scenario.system.name for scenario in self.scenarios]


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Systems:
    fake = Systems()
    monkeypatch.setattr("capricorn.harness.launcher.launch", fake.launch)
    monkeypatch.setattr(machine, "require", lambda scenario: None)
    return fake


def compared(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> dict[str, Any]:
    """What the command prints as JSON."""
    assert cli(*arguments, "--json") == code
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def folder_of(out: Path) -> Path:
    """The folder of the only comparison."""
    (found,) = out.glob("*-compare-*")
    return found


# --- runs


def test_systems_run_there_and_back_with_all_else_alike(
    launcher: Systems, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli(*TINY, *SYSTEMS, "--set", "system.every=2", "--out", tmp_path, "-q") == 0
    there = ["none", "capricorn", "gemini"]
    assert launcher.order == [*there, *reversed(there), *there]
    alike = [
        each.model_copy(update={"system": launcher.scenarios[0].system, "gemini": launcher.scenarios[0].gemini})
        for each in launcher.scenarios
    ]
    assert all(each == launcher.scenarios[0] for each in alike)
    assert {each.system.every for each in launcher.scenarios} == {2}
    assert [each.gemini.mu for each in launcher.scenarios[:3]] == ["auto", "auto", 0.9]


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
    assert re.search(r"^gemini:gemini\.mu=0\.9 +1\.53 MB +1\.46 GB +12\.5 MB ", printed, re.MULTILINE)
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


# --- what ends early


def test_an_interrupt_shows_what_is_done_and_how_to_go_on(
    launcher: Systems, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    launcher.ends = {4: KeyboardInterrupt()}
    assert cli(*TINY, *SYSTEMS, "--repeats", "2", "--out", tmp_path) == 130
    printed = capsys.readouterr()
    folder = folder_of(tmp_path)
    assert printed.err.strip() == "interrupted"
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
        "capricorn.report.summary.verdict", lambda summary, scenario: "lost 3" if summary["requested"] else "ok"
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
    assert "has schema version 99; this version reads 1" in capsys.readouterr().err


# --- tuning


class Tuning:
    """Stands in for the sweep that finds a factor."""

    def __init__(self) -> None:
        self.calls: list[Scenario] = []
        self.end: CapricornError | None = None

    @staticmethod
    def needs_tuning(scenario: Scenario) -> bool:
        return scenario.system.name == "gemini" and scenario.gemini.mu == "auto"

    def tune(self, scenario: Scenario, out: Path, listener: RunListener) -> tuple[Scenario, str]:
        self.calls.append(scenario)
        if self.end:
            raise self.end
        gemini = scenario.gemini.model_copy(update={"mu": 0.85, "tuned_in": "SWEEP"})
        return scenario.model_copy(update={"gemini": gemini}), "SWEEP"


@pytest.fixture
def tuning(monkeypatch: pytest.MonkeyPatch) -> Tuning:
    fake = Tuning()
    monkeypatch.setattr("capricorn.harness.tuning.needs_tuning", fake.needs_tuning)
    monkeypatch.setattr("capricorn.harness.tuning.tune", fake.tune)
    return fake


def test_a_factor_is_tuned_once_and_kept_for_all_repeats_and_a_resume(
    launcher: Systems, tuning: Tuning, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    launcher.ends = {3: KeyboardInterrupt()}
    asked = ("--systems", "none,gemini", "--repeats", "2", "--out", tmp_path)
    compared(capsys, *TINY, *asked, code=130)
    report = compared(capsys, "compare", "--resume", folder_of(tmp_path))
    assert len(tuning.calls) == 1
    assert {each.gemini.mu for each in launcher.scenarios if each.system.name == "gemini"} == {0.85}
    assert report["rows"][1]["notes"] == ["mu 0.85, tuned in SWEEP"]
    tuned = read_compare(folder_of(tmp_path)).comparisons[0].tuned["gemini"]
    assert (tuned.run_id, set(tuned.assignments)) == ("SWEEP", {"gemini.mu=0.85", "gemini.tuned_in=SWEEP"})


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


# --- a file of comparisons


def experiment(*arguments: str | Path) -> list[PlannedComparison]:
    """What the command would carry out."""
    asked = app.commands["compare"].make_context("compare", [str(each) for each in arguments])
    with asked:
        return experiment_of(asked, asked.params["file"]).comparisons


def write_toml(folder: Path, text: str) -> Path:
    path = folder / "experiment.toml"
    path.write_text(text)
    return path


TWO = """
systems = ["none", "capricorn", "gemini:gemini.mu=0.9"]
model = "mixtral-tiny"
iterations = 6
repeats = 2
set = ["system.every=2", "planner.risk=0.2"]
keep_store = true
device = "cpu"

[[comparisons]]
label = "short"

[[comparisons]]
label = "long"
iterations = 9
ranks_per_node = 2
systems = "none, blocking"
set = ["planner.risk=0.4"]
"""


def test_a_file_says_all_and_each_comparison_overrides_what_it_names(tmp_path: Path) -> None:
    short, long = experiment("--scenario", write_toml(tmp_path, TWO))
    assert [short.label, long.label] == ["short", "long"]
    assert [each.scenario.train.iterations for each in (short, long)] == [6, 9]
    assert [each.repeats for each in (short, long)] == [2, 2]
    assert [each.scenario.cluster.ranks_per_node for each in (short, long)] == [1, 2]
    assert [variant.label for variant in short.variants] == ["none", "capricorn", "gemini:gemini.mu=0.9"]
    assert [variant.label for variant in long.variants] == ["none", "blocking"]
    assert [each.scenario.planner.risk for each in (short, long)] == [0.2, 0.4]
    assert {each.scenario.system.every for each in (short, long)} == {2}
    assert short.scenario.store.keep


def test_an_empty_list_of_settings_drops_those_that_all_share(tmp_path: Path) -> None:
    added, dropped = experiment(
        "--scenario", write_toml(tmp_path, TWO.replace('set = ["planner.risk=0.4"]', "set = []"))
    )
    assert (added.scenario.system.every, dropped.scenario.system.every) == (2, 1)


def test_the_command_line_goes_before_the_file(tmp_path: Path) -> None:
    file = write_toml(tmp_path, TWO)
    more = ("--iterations", "7", "--set", "planner.risk=0.6", "--repeats", "1", "--systems", "none")
    for planned in experiment("--scenario", file, *more):
        assert planned.scenario.train.iterations == 7
        assert (planned.scenario.planner.risk, planned.scenario.system.every) == (0.6, 2)
        assert (planned.repeats, len(planned.runs)) == (1, 1)


def test_without_comparisons_a_file_is_one_and_defaults_are_those_of_the_command(tmp_path: Path) -> None:
    (planned,) = experiment("--scenario", write_toml(tmp_path, 'systems = ["none"]'))
    assert (planned.label, planned.scenario.model.name, planned.repeats) == ("", "mixtral-small", 3)
    (planned,) = experiment("--systems", "none, capricorn")
    assert [variant.label for variant in planned.variants] == ["none", "capricorn"]


def test_several_comparisons_run_one_after_the_other_and_each_has_a_table(
    launcher: Systems, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = write_toml(tmp_path, TWO + f'[[comparisons]]\nlabel = "again"\nsystems = ["none"]\n\n# {tmp_path}')
    report = compared(capsys, "compare", "--scenario", file, "--out", tmp_path / "out")
    assert report["valid"]
    assert [each["label"] for each in report["comparisons"]] == ["short", "long", "again"]
    assert all(each.keys() >= {"mode", "valid", "rows", "runs", "label"} for each in report["comparisons"])
    assert report["runs"] == [run for each in report["comparisons"] for run in each["runs"]]
    assert launcher.order[:6] == ["none", "capricorn", "gemini", "gemini", "capricorn", "none"]
    assert launcher.order[6:] == ["none", "blocking", "blocking", "none", "none", "none"]
    assert cli("compare", folder_of(tmp_path / "out")) == 0
    printed = capsys.readouterr().out
    assert re.findall(r"^(\w+), live: mixtral-tiny", printed, re.MULTILINE) == ["short", "long", "again"]


def test_a_file_may_say_where_results_go(launcher: Systems, tmp_path: Path) -> None:
    text = f'model = "mixtral-tiny"\nsystems = ["none"]\nrepeats = 1\niterations = 2\nout = "{tmp_path}/there"'
    assert cli("compare", "--scenario", write_toml(tmp_path, text), "-q") == 0
    assert folder_of(tmp_path / "there")


FILES = [
    ("iteration = 3", "unknown key 'iteration'; did you mean 'iterations'?"),
    ("json = true", "unknown key 'json'"),
    ("system = 'none'", "unknown key 'system'; did you mean 'systems'?"),
    ("iterations = 'x'", "iterations = 'x': 'x' is not a valid integer range"),
    ("iterations = 0", "iterations = 0: 0 is not in the range x>=1"),
    ("iterations = true", "iterations = True: 'True' is not a valid integer range"),
    ("iterations = [3]", "iterations takes one value, not [3]"),
    ("systems = ['none', 'capricron']", "did you mean 'capricorn'?"),
    ("systems = []", "--systems names no system"),
    ("set = ['sytem.every=1']", "did you mean 'system.every'?"),
    ("model = 'mixtral-smal'", "did you mean 'mixtral-small'?"),
    ("model = ", "is not TOML"),
    ("comparisons = 3", "comparisons is no list of tables"),
    ("comparisons = []", "comparisons is no list of tables"),
    ("[[comparisons]]\nlabel = 3", "label = 3 is no text"),
    ("[[comparisons]]\nout = 'x'", "unknown key 'out'"),
    ("[[comparisons]]\nlabel = 'x'\nmodel = 'y'", "experiment.toml, 'x': unknown model 'y'"),
    ("[[comparisons]]\n[[comparisons]]\nset = ['a=1']", "experiment.toml, comparison 2: --set 'a=1'"),
    ("[[comparisons]]\nrepeats = 0", "repeats = 0: 0 is not in the range"),
    ("[comparisons]\nlabel = 'x'", "comparisons is no list of tables"),
]


@pytest.mark.parametrize(("text", "message"), FILES, ids=[text for text, _ in FILES])
def test_a_mistake_in_the_file_is_one_line(
    text: str, message: str, launcher: Systems, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli("compare", "--scenario", write_toml(tmp_path, text)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert launcher.num_runs == 0


# --- finished runs


def finished(out: Path, *paces: float, system: str = "capricorn") -> list[Path]:
    return [
        write_folder(out, f"{system}{k}", scenario_of(system, iterations=22), pace=pace, seed=k)
        for k, pace in enumerate(paces)
    ]


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
def test_a_run_that_is_slower_than_the_first_beyond_doubt_ends_with_1(
    paces: tuple[float, ...], threshold: str, code: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    base, *later = finished(tmp_path, *paces)
    report = compared(capsys, "compare", base, *later, "--threshold", threshold, code=code)
    assert [check["run"] for check in report["checks"]] == [path.name for path in later]
    assert any(check["slower"] for check in report["checks"]) == (code == 1)
    for check, pace in zip(report["checks"], paces[1:], strict=True):
        assert check["ratio"] == pytest.approx(pace / paces[0], rel=0.05)
    assert cli("compare", base, *later, "--threshold", threshold) == code
    said = [line for line in capsys.readouterr().out.splitlines() if "beyond doubt" in line]
    assert len(said) == len(later)


def test_what_is_slower_only_in_doubt_passes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    base = write_folder(tmp_path, "a", scenario_of(), seed=1)
    noisy = write_folder(
        tmp_path, "b", scenario_of(), seed=2, fields=lambda i, rank: {"duration_s": 9.0 if i == 12 else 0.6}
    )
    report = compared(capsys, "compare", base, noisy, "--threshold", "20%")
    assert report["checks"][0]["ratio"] > 1.2 > report["checks"][0]["ci"][0]


@pytest.mark.parametrize(
    ("sections", "record", "message"),
    [
        ({}, {"mode": "emulated"}, "mode is live in"),
        ({"train": {"iterations": 22, "warmup": 2, "seed": 3}}, {}, "train.seed is 0 in"),
        ({"loads": {"source": "stable"}}, {}, "loads.source is router in"),
    ],
)
def test_runs_of_other_work_are_refused_by_name(
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
    (("--repeats", "0"), "'--repeats': 0"),
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
    text = "torchsnapshot:storage.medium=tmpfs:train.iterations=12"
    variant = Variant.parse(f" {text} ")
    assert variant.assignments == ("storage.medium=tmpfs", "train.iterations=12")
    assert variant.label == text
    scenario = Variant.parse("gemini:storage.medium=tmpfs:train.iterations=6").of(scenario_of())
    assert (scenario.system.name, scenario.storage.medium, scenario.train.iterations) == ("gemini", "tmpfs", 6)
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
