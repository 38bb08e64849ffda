"""The command `ablate`: policies by its lists, replayed over a made-up trace, or trained by a fake."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capricorn.config.planner import PlannerConfig
from capricorn.config.resolve import load_model
from capricorn.config.scenario import Scenario
from capricorn.launch import preflight as machine
from capricorn.launch.launcher import RunListener
from capricorn.loads.synthetic import synthetic_shares
from capricorn.records.samples import RunRecord
from capricorn.report.terminal.ablation_table import bootstrap, compared
from tests.cli.test_cli import Launcher, cli

KEYS = {"spans", "replan", "gate", "rho", "slowdown", "profiled_frac", "accuracy_frac"}
SMALL = ("--set", "trace.num_chunks=60", "--set", "trace.iterations=40")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three layers of eight experts, every other iteration."""
    shares_IME = synthetic_shares("settling", num_layers=3, num_experts=8, top_k=2, first=1, num_iterations=60, seed=0)
    np.savez(tmp_path / "loads.npz", iterations=np.arange(1, 61, 2), load_share=shares_IME[::2])
    return tmp_path / "loads.npz"


# --- replayed


def test_a_replay_prints_one_object(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli("ablate", "--trace", trace, *SMALL, "--json") == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert printed.err == ""
    assert report["mode"] == "simulated"
    assert all(row.keys() >= KEYS for row in report["rows"])
    policies = {(row["spans"], row["replan"], row["gate"]) for row in report["rows"]}
    assert len(policies) == 2 * 5 * 2 + 2
    assert len(report["rows"]) == 3 * len(policies)
    assert {row["rho"] for row in report["rows"]} == {0.5, 0.9, 1.5}
    assert {each["name"] for each in report["references"]} == {"blocking", "gemini", "lower bound"}
    assert all(row["slowdown"] >= 1 and 0 <= row["profiled_frac"] <= 1 for row in report["rows"])


def test_lists_choose_what_is_compared(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lists = ("--spans", "layer,load", "--replan", "every-5", "--replan", "oracle", "--gate", "off", "--rho", "0.7,0.7")
    assert cli("ablate", "--trace", trace, *SMALL, *lists, "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    named = [(row["spans"], row["replan"], row["gate"], row["rho"]) for row in rows]
    assert named == [(s, r, False, 0.7) for s in ("layer", "load") for r in ("every-5", "oracle")]


def test_a_replay_is_the_same_every_time_and_follows_its_settings(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ("ablate", "--trace", trace, *SMALL, "--spans", "layer", "--replan", "every-10", "--json")
    printed = []
    for more in ((), (), ("--set", "trace.seed=1"), ("--set", "planner.profile_iterations=2")):
        assert cli(*few, *more) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert len(set(printed)) == 3


def test_the_table_of_a_replay_fits_80_columns(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli("ablate", "--trace", trace, *SMALL, "--gate", "on") == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert re.search(r"^layer +speculative +on +\d\.\d{3} +\d\.\d{3} +\d\.\d{3} ", printed, re.MULTILINE)
    assert re.search(r"^blocking +1\.29\d +1\.52\d +1\.88\d ", printed, re.MULTILINE)
    assert "Simulated: 40 iterations of loads.npz" in printed
    assert cli("ablate", "--trace", trace, *SMALL, "--spans", "load", "-q") == 0
    assert "Simulated" not in capsys.readouterr().out


def test_an_interrupted_replay_shows_what_is_done(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from capricorn.simulate import policy

    replay_policy, calls = policy.replay_policy, []

    def twice(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) > 2:
            raise KeyboardInterrupt
        return replay_policy(*arguments)

    monkeypatch.setattr(policy, "replay_policy", twice)
    assert cli("ablate", "--trace", trace, *SMALL, "--json") == 130
    printed = capsys.readouterr()
    assert len(json.loads(printed.out)["rows"]) == 2
    assert printed.err.strip() == "interrupted"


# --- trained


class Paced(Launcher):
    """Iterations take half a second, and a tenth more under a checkpointing system."""

    def launch(self, scenario: Scenario, out: Path, listener: RunListener) -> Path:
        self.fields = {"duration_s": 0.5 if scenario.system.name == "none" else 0.55}
        return super().launch(scenario, out, listener)

    @property
    def order(self) -> list[str]:
        return [
            "none" if s.system.name == "none" else f"{s.planner.spans} {s.planner.replan} {s.planner.gate}"
            for s in self.scenarios
        ]


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Paced:
    fake = Paced()
    monkeypatch.setattr("capricorn.launch.launcher.launch", fake.launch)
    monkeypatch.setattr(machine, "require", lambda scenario: None)
    return fake


TINY = ("ablate", "--model", "mixtral-tiny", "--iterations", "3")


def test_policies_are_trained_there_and_back_against_none(
    launcher: Paced, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lists = ("--spans", "layer,load", "--gate", "on")
    assert cli(*TINY, *lists, "--repeats", "2", "--json", "--out", tmp_path) == 0
    there = ["none", "layer speculative True", "load speculative True"]
    assert launcher.order == [*there, *reversed(there)]
    report = json.loads(capsys.readouterr().out)
    assert report["mode"] == "live"
    assert [row["spans"] for row in report["rows"]] == ["layer", "load"]
    assert all(row.keys() >= KEYS for row in report["rows"])
    row = report["rows"][0]
    assert row["slowdown"] == pytest.approx(1.1)
    assert row["slowdown_ci"] == pytest.approx([1.1, 1.1])
    assert len(row["runs"]) == 2
    assert len(report["runs"]) == 6


def test_by_default_a_selection_is_trained_with_all_other_settings_alike(
    launcher: Paced, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli(*TINY, "--set", "planner.risk=0.3", "-q", "--out", tmp_path) == 0
    assert len(launcher.order) == len(set(launcher.order)) == 9
    assert launcher.order[0] == "none"
    assert {s.planner.risk for s in launcher.scenarios} == {0.3}
    printed = capsys.readouterr().out
    assert re.search(r"^layer +never +on +1\.100", printed, re.MULTILINE)


def test_a_verdict_that_is_not_ok_is_told_and_ends_with_1(
    launcher: Paced, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "capricorn.stats.run_summary.verdict", lambda summary, scenario: "lost 3" if summary["requested"] else "ok"
    )
    assert cli(*TINY, "--spans", "layer", "-q", "--out", tmp_path) == 1
    assert "run2: lost 3" in capsys.readouterr().out


def test_an_interrupt_shows_what_was_measured(
    launcher: Paced, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = launcher.launch

    def stop(scenario: Scenario, out: Path, listener: RunListener) -> Path:
        if launcher.num_runs == 2:
            raise KeyboardInterrupt
        return done(scenario, out, listener)

    monkeypatch.setattr("capricorn.launch.launcher.launch", stop)
    assert cli(*TINY, "--json", "--out", tmp_path) == 130
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["replan"], row["slowdown_ci"]) for row in rows] == [("never", None)]


def record(run_id: str, iteration_s: float, verdict: str = "ok") -> RunRecord:
    summary = {"iteration_s_p50": iteration_s, "profiled_frac": iteration_s, "rho": 0.9}
    return RunRecord(
        run_id=run_id, started_at="2026-11-29T15:00:00Z", mode="live", system="capricorn", seed=0,
        config=Scenario(model=load_model("mixtral-tiny")), environment=machine.environment("cpu"), summary=summary,
        verdict=verdict,
    )  # fmt: skip


def test_runs_are_paired_by_repeat_also_where_one_left_no_record() -> None:
    ours = [record("a", 2.2), None, record("c", 12.0), record("d", 1.0)]
    row = compared(PlannerConfig(), ours, [record("x", 2.0), record("y", 5.0), record("z", 10.0)])
    assert row.slowdown == pytest.approx((1.1 * 1.2) ** 0.5)
    assert row.runs == ("a", "c", "d")
    assert compared(PlannerConfig(), ours, [None, record("y", 5.0)]).slowdown is None


def test_no_figure_counts_of_a_run_that_went_wrong() -> None:
    ours = [record("a", 2.2), record("b", 9.0, "stopped after 1 of 3 iterations"), record("c", 1.0)]
    base = [record("x", 2.0), record("y", 1.0), record("z", 1.0, "no checkpoint became complete")]
    row = compared(PlannerConfig(), ours, base)
    assert (row.slowdown, row.profiled_frac) == (pytest.approx(1.1), pytest.approx(1.6))
    assert row.runs == ("a", "b", "c")
    alone = compared(PlannerConfig(), ours[1:2], base)
    assert (alone.slowdown, alone.profiled_frac, alone.rho) == (None, None, 0.9)


def test_a_run_that_stops_early_is_told_and_left_out_of_the_row(
    launcher: Paced, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = launcher.launch

    def stop(scenario: Scenario, out: Path, listener: RunListener) -> Path:
        if launcher.num_runs == 2:
            launcher.stop_after, launcher.end = 1, KeyboardInterrupt()
        return done(scenario, out, listener)

    monkeypatch.setattr("capricorn.launch.launcher.launch", stop)
    assert cli(*TINY, "--spans", "layer", "--repeats", "2", "--json", "--out", tmp_path) == 130
    report = json.loads(capsys.readouterr().out)
    assert report["faults"] == [pytest.approx("run3: stopped after 1 of 3 iterations")]
    assert [(len(row["runs"]), row["slowdown"]) for row in report["rows"]] == [(2, pytest.approx(1.1))]


def test_sending_as_soon_as_staged_is_one_row_whatever_the_other_lists(
    launcher: Paced, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lists = ("--spans", "none,layer", "--replan", "never,every-2", "--gate", "on")
    assert cli(*TINY, *lists, "--json", "--out", tmp_path) == 0
    assert launcher.order == ["none", "none never False", "layer never True", "layer every-2 True"]
    row = json.loads(capsys.readouterr().out)["rows"][0]
    assert (row["spans"], row["replan"], row["gate"]) == ("none", "never", False)


def test_the_bootstrap_holds_the_mean_of_the_ratios() -> None:
    interval = bootstrap([1.0, 1.1, 1.2])
    assert interval is not None
    assert 1.0 <= interval[0] < (1.0 * 1.1 * 1.2) ** (1 / 3) < interval[1] <= 1.2
    assert bootstrap([1.1]) is None


# --- mistakes

MISTAKES = [
    (("--trace", "none.npz"), "trace none.npz cannot be read"),
    (("--trace", "TRACE", "--nodes", "3"), "--nodes says nothing about a replay"),
    (("--trace", "TRACE", "--repeats", "2"), "--repeats says nothing about a replay"),
    (("--trace", "TRACE", "--set", "trace.compute_noize=0"), "did you mean 'trace.compute_noise'?"),
    (("--trace", "TRACE", "--set", "model.hidden=64"), "unknown key 'model.hidden'"),
    (("--trace", "TRACE", "--set", "trace.ranks"), "is not key=value"),
    (("--trace", "TRACE", "--set", "trace.ranks=x"), "ranks = 'x'"),
    (("--trace", "TRACE", "--set", "trace.rho=1"), "use --rho"),
    (("--trace", "TRACE", "--set", "trace.first=61"), "comes after the last iteration"),
    (("--trace", "TRACE", "--set", "trace.ranks=9"), "9 ranks cannot share 8 experts"),
    (("--set", "planner.gate=on"), "use --gate"),
    (("--replan", "oracle"), "--trace FILE.npz"),
    (("--rho", "0.9"), "--rho is for a replay"),
    (("--rho", "-1"), "--rho '-1' is no number from"),
    (("--trace", "TRACE", "--rho", "0.5,1e-310"), "--rho '1e-310' is no number from"),
    (("--trace", "TRACE", "--rho", "inf"), "--rho 'inf' is no number from"),
    (("--trace", "TRACE", "--rho", "nan"), "--rho 'nan' is no number from"),
    (("--trace", "TRACE", "--out", "there"), "--out says nothing about a replay"),
    (("--trace", "TRACE", "--spans", "none"), "plans nothing to replay"),
    (("--trace", "TRACE", "--set", "trace.tokens=1"), "trace.tokens 1 is less than one for each of 8 ranks"),
    (("--trace", "TRACE", "--set", "trace.top_k=9"), "trace.top_k 9 exceeds the 8 experts"),
    (("--trace", "TRACE", "--set", "trace.profile_cost_frac=inf"), "profile_cost_frac = 'inf'"),
    (("--trace", "TRACE", "--set", "trace.iterations=1000000000000"), "iterations = '1000000000000'"),
    (("--trace", "TRACE", "--set", "trace.num_chunks=1000000000000"), "num_chunks = '1000000000000'"),
    (("--trace", "TRACE", "--set", "planner.max_chunk_bytes=1000000TiB"), "should be less than or equal to 1073741824"),
    (("--set", "system.name=blocking"), "system blocking plans nothing to compare"),
    (("--ckpt", "off"), "all policies are one: leave out --ckpt off"),
    (("--replicas", "1"), "all policies are one: use --nodes 2 --replicas 2"),
    (("--nodes", "1"), "all policies are one: use --nodes 2 --replicas 2"),
    (("--spans", "layers"), "did you mean 'layer'?"),
    (("--replan", "every-0"), "unknown --replan 'every-0'"),
    (("--replan", "every-²"), "unknown --replan 'every-²'"),
    (("--replan", "every-" + "0" * 5000 + "1"), "unknown --replan 'every-000"),
    (("--replan", "every-" + "9" * 5000), "unknown --replan 'every-999"),
    (("--set", "planner.risk=nan"), "planner.risk"),
    (("--gate", "maybe"), "unknown --gate 'maybe'"),
    (("--model", "mixtral-smal"), "did you mean 'mixtral-small'?"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[" ".join(a)[:60] for a, _ in MISTAKES])
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], message: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli("ablate", *(trace if argument == "TRACE" else argument for argument in arguments)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]
