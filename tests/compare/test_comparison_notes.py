"""What a comparison has to say of itself and of its rows beside figures and faults."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from capricorn.compare.compare_record import CompareRecord, PlannedComparison, parse_variants, write_compare
from capricorn.compare.comparison import compare_runs
from capricorn.compare.finished_runs import load_comparisons
from tests.support.comparisons import ENVIRONMENT, Runs, rows_of, scenario_of, show, write_folder, write_runs


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return write_runs(tmp_path)


def test_it_is_noted_what_was_tuned_and_where_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from capricorn.systems.registry import SYSTEMS, SystemEntry

    monkeypatch.setitem(SYSTEMS, "filing", SystemEntry("filing", "x:y", "writes files", "files", ("persistent",)))
    tuned = scenario_of("gemini", gemini={"mu": 0.85, "tuned_in": "SWEEP"})
    filed = scenario_of("filing", storage={"medium": "tmpfs", "fsync": True})
    rows = rows_of(
        compare_runs(
            "",
            {
                "gemini": [write_folder(tmp_path, "a", tuned)],
                "filing:storage.medium=tmpfs": [write_folder(tmp_path, "b", filed)],
            },
        )
    )
    assert rows["gemini"].notes == ("mu 0.85, tuned in SWEEP",)
    assert rows["gemini"].tiers == ("local", "peer")
    filing = rows["filing:storage.medium=tmpfs"]
    assert filing.notes == ("storage.medium=tmpfs", "files go to memory (tmpfs), with fsync")
    assert (filing.system, filing.tiers) == ("filing", ("persistent",))


def test_runs_of_several_machines_are_noted(tmp_path: Path) -> None:
    here = write_folder(tmp_path, "a", scenario_of("none"))
    there = ENVIRONMENT.model_copy(update={"host": "elsewhere"})
    comparison = compare_runs("", {"none": [here, write_folder(tmp_path, "b", scenario_of("none"), environment=there)]})
    assert f"runs of several machines: {', '.join(sorted([ENVIRONMENT.host, 'elsewhere']))}" in comparison.notes


ONCE = "one run of each: intervals leave out how one run differs from the next; use --repeats"


def test_intervals_of_one_run_each_are_noted(runs: Runs) -> None:
    once = compare_runs("", {system: each[:1] for system, each in runs.items()})
    assert once.notes == (ONCE,)
    assert ONCE in " ".join(show(once, 80).split())
    assert once.valid
    assert compare_runs("", runs).notes == ()


@pytest.mark.parametrize(
    ("system", "spans", "is_noted"),
    [("capricorn", "none", True), ("capricorn", "load", False), ("gemini", "none", False)],
)
def test_it_is_noted_where_capricorn_plans_nothing(tmp_path: Path, system: str, spans: str, is_noted: bool) -> None:
    run = write_folder(tmp_path, "a", scenario_of(system, planner={"spans": spans}))
    note = "planner.spans=none sends as soon as staged: nothing is planned where the CPU that computes moves the bytes"
    assert rows_of(compare_runs("", {system: [run]}))[system].notes == ((note,) if is_noted else ())


def test_runs_that_are_in_no_ratio_are_named(runs: Runs, tmp_path: Path) -> None:
    third = write_folder(tmp_path, "capricorn-2", scenario_of("capricorn"), pace=3.0, seed=9)
    ours = [*runs["capricorn"], third]
    comparison = compare_runs("", {"none": runs["none"], "capricorn": ours, "gemini": [None, runs["gemini"][1]]})
    rows = rows_of(comparison)
    said = "not in the slowdown, without a run of none that has the repeat and iterations in common: capricorn-2"
    assert rows["capricorn"].notes == (said,)
    assert rows["capricorn"].runs == tuple(folder.name for folder in ours)
    assert rows["capricorn"].slowdown == rows_of(compare_runs("", runs))["capricorn"].slowdown
    assert (rows["none"].notes, rows["gemini"].notes) == ((), ())
    assert said in " ".join(show(comparison, 80).split())


def test_a_run_without_a_common_iteration_is_in_no_ratio_either(runs: Runs, tmp_path: Path) -> None:
    late = write_folder(
        tmp_path, "late", scenario_of("gemini"), fields=lambda i, rank: {"requested": i == 12, "completed": (12,)}
    )
    short = write_folder(tmp_path, "short", scenario_of("none", iterations=6))
    row = rows_of(compare_runs("", {"none": [short], "gemini": [late]}))["gemini"]
    assert row.slowdown is None
    assert re.match("not in the slowdown, .*: late", row.notes[0])


def test_a_variant_that_was_planned_with_other_checkpoints_is_compared_and_noted(tmp_path: Path) -> None:
    variants = parse_variants(["none", "capricorn", "capricorn:system.replicas=1", "none:system.every=3"])
    planned = PlannedComparison.plan("", scenario_of(), variants, 1)
    for number, variant in enumerate(variants):
        write_folder(tmp_path, f"run{number}", planned.scenario_of(variant.label), seed=number)
    done = [run.model_copy(update={"run_id": f"run{number}"}) for number, run in enumerate(planned.runs)]
    planned = planned.model_copy(update={"runs": tuple(done)})
    write_compare(tmp_path / "c", CompareRecord(compare_id="c", started_at="", comparisons=(planned,)))
    ((comparison, _),) = load_comparisons([tmp_path / "c"])
    rows = rows_of(comparison)
    assert rows["capricorn:system.replicas=1"].notes == (
        "system.replicas=1",
        "makes other checkpoints than the others: system.replicas is 1, theirs is 2",
    )
    assert (rows["capricorn"].notes, rows["none:system.every=3"].notes) == ((), ("system.every=3",))
    assert rows["capricorn:system.replicas=1"].slowdown is not None
    assert comparison.valid
