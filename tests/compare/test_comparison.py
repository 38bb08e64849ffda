"""What a comparison makes of hand-made runs: every figure of a row is computed here again, from the files alone."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

from capricorn.compare.comparison import compare_runs
from capricorn.compare.finished_runs import ratio_of
from capricorn.errors import ConfigError
from capricorn.records.samples import append
from tests.support.comparisons import (
    Runs,
    rows_of,
    sample_of,
    scenario_of,
    show,
    write_folder,
    write_record,
    write_runs,
)

WARMUP = 2


# --- the same again, in plain Python


def lasting(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """By iteration, its samples of all ranks, of the last attempt."""
    by_iteration: dict[int, list[dict[str, Any]]] = {}
    for line in (folder / "iterations.jsonl").read_text().splitlines():
        by_iteration.setdefault(json.loads(line)["iteration"], []).append(json.loads(line))
    last = {i: max(each["attempt"] for each in samples) for i, samples in by_iteration.items()}
    return {i: [each for each in samples if each["attempt"] == last[i]] for i, samples in by_iteration.items()}


def steady(folder: Path, system: str) -> dict[int, list[dict[str, Any]]]:
    done = lasting(folder)
    requested = [i for i, samples in done.items() if samples[0]["requested"] and system != "none"]
    begin = max(WARMUP, *sorted(requested)[:3], 0)
    return {i: samples for i, samples in done.items() if i > begin}


def durations(folder: Path, system: str) -> dict[int, float]:
    return {i: max(each["duration_s"] for each in samples) for i, samples in steady(folder, system).items()}


def summed(folders: Sequence[Path], system: str, base: Sequence[Path], base_system: str) -> list[list[list[float]]]:
    """By repeat, the durations of both in the iterations that both have."""
    pairs = []
    for ours, theirs in zip(folders, base, strict=False):
        one, other = durations(ours, system), durations(theirs, base_system)
        both = sorted(one.keys() & other.keys())
        pairs.append([[one[i] for i in both], [other[i] for i in both]])
    return pairs


def interval(pairs: list[list[list[float]]]) -> tuple[float, float]:
    """Repeats drawn anew, and of each its iterations, by another generator than the report's."""
    draw, ratios = random.Random(5), []
    for _ in range(3000):
        ours_s = theirs_s = 0.0
        for ours, theirs in draw.choices(pairs, k=len(pairs)):
            chosen = draw.choices(range(len(ours)), k=len(ours))
            ours_s += sum(ours[i] for i in chosen)
            theirs_s += sum(theirs[i] for i in chosen)
        ratios.append(ours_s / theirs_s)
    ratios.sort()
    return ratios[75], ratios[2924]


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return write_runs(tmp_path)


@pytest.mark.parametrize("system", ["none", "capricorn", "gemini"])
def test_every_figure_of_a_row_is_that_of_the_samples(runs: Runs, system: str) -> None:
    row = rows_of(compare_runs("", runs))[system]
    counted = [samples for folder in runs[system] for samples in steady(folder, system).values()]
    assert row.iteration_s_p50 == median(max(each["duration_s"] for each in samples) for samples in counted)
    assert row.stall_s_p50 == median(max(each["stall_s"] for each in samples) for samples in counted)
    assert row.sent_bytes_per_iteration == fmean(sum(each["sent_bytes"] for each in samples) for samples in counted)
    for base, value, ci in (
        ("none", row.slowdown, row.slowdown_ci),
        ("capricorn", row.speedup_of_capricorn, row.speedup_ci),
    ):
        pairs = summed(runs[system], system, runs[base], base)
        assert value == pytest.approx(sum(sum(one) for one, _ in pairs) / sum(sum(other) for _, other in pairs))
        assert ci == pytest.approx(interval(pairs), rel=0.01)
    every = [lasting(folder) for folder in runs[system]]
    due = [i for done in every for i, samples in done.items() if samples[0]["requested"] and system != "none"]
    assert (row.requested, row.effective) == (len(due), len(due))
    peaks = []
    for folder in runs[system]:
        samples = [json.loads(line) for line in (folder / "iterations.jsonl").read_text().splitlines()]
        peaks.append(sum(max(each["rss_bytes"] for each in samples if each["rank"] == rank) for rank in range(2)))
    assert row.peak_rss_bytes == max(peaks)
    stores = [json.loads((folder / "store.json").read_text())["store_bytes"] for folder in runs[system]]
    assert row.store_bytes == max(stores)
    assert row.runs == tuple(folder.name for folder in runs[system])


def test_every_figure_of_a_row_is_in_the_table(runs: Runs) -> None:
    comparison = compare_runs("", runs)
    printed = show(comparison, 80).splitlines()
    for row in comparison.rows:
        times, costs = (line.split() for line in printed if line.startswith(row.label))
        assert row.iteration_s_p50 is not None
        assert row.stall_s_p50 is not None
        assert times[1] == f"{row.iteration_s_p50:.3g}"
        assert times[3] == f"{row.stall_s_p50:.3g}"
        assert costs[1] == (f"{row.effective}/{row.requested}" if row.requested else "-")
        if row.slowdown_ci and row.label != "none":
            assert row.slowdown is not None
            low, high = row.slowdown_ci
            assert " ".join(times[5:8]) == f"{row.slowdown:.3f} [{low:.3f}, {high:.3f}]"
    assert show(comparison, 80).startswith("live: mixtral-tiny, 2 nodes x 1 rank on cpu; 12 iterations, 2 repeats\n")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_fits(runs: Runs, width: int) -> None:
    labels = {"none": "none", "capricorn": "capricorn", "gemini": "gemini:gemini.mu=0.85:storage.medium=tmpfs"}
    printed = show(compare_runs("large", {labels[system]: each for system, each in runs.items()}), width)
    assert max(map(len, printed.splitlines())) <= width
    assert "gemini a: gemini.mu=0.85; storage.medium=tmpfs" in " ".join(printed.split())


def test_what_nothing_tells_from_1_is_no_difference(tmp_path: Path) -> None:
    runs = {
        "none": [write_folder(tmp_path, "n", scenario_of("none"), seed=1)],
        "capricorn": [write_folder(tmp_path, "c", scenario_of("capricorn"), seed=2)],
    }
    comparison = compare_runs("", runs)
    low, high = rows_of(comparison)["capricorn"].slowdown_ci or (0, 0)
    assert low < 1 < high
    lines = show(comparison, 80).splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("capricorn"))
    assert "no difference" in lines[at]
    assert f"[{low:.3f}, {high:.3f}]" in lines[at + 1]


def test_a_system_and_itself_are_1(runs: Runs) -> None:
    rows = rows_of(compare_runs("", runs))
    assert (rows["none"].slowdown, rows["none"].slowdown_ci) == (1.0, (1.0, 1.0))
    assert (rows["capricorn"].speedup_of_capricorn, rows["capricorn"].speedup_ci) == (1.0, (1.0, 1.0))


def test_what_is_left_out_is_not_known_and_said(runs: Runs) -> None:
    comparison = compare_runs("", {"gemini": runs["gemini"]})
    row = comparison.rows[0]
    assert (row.slowdown, row.slowdown_ci, row.speedup_of_capricorn, row.speedup_ci) == (None, None, None, None)
    assert comparison.valid
    assert comparison.notes == (
        "slowdowns are unknown without none",
        "the speedup of Capricorn is unknown without capricorn",
    )


def test_a_repeat_that_is_missing_does_not_shift_the_others(runs: Runs) -> None:
    gap: dict[str, list[Path | None]] = {"none": list(runs["none"]), "capricorn": [None, runs["capricorn"][1]]}
    row = rows_of(compare_runs("", gap))["capricorn"]
    ((ours, theirs),) = summed(runs["capricorn"][1:], "capricorn", runs["none"][1:], "none")
    assert row.slowdown == pytest.approx(sum(ours) / sum(theirs))


# --- what makes it invalid


def test_it_is_valid_when_all_went_well(runs: Runs) -> None:
    comparison = compare_runs("", runs)
    assert (comparison.valid, comparison.faults, comparison.notes) == (True, (), ())


def test_other_losses_make_it_invalid_and_are_named(runs: Runs, tmp_path: Path) -> None:
    other = write_folder(
        tmp_path, "wrong", scenario_of("gemini"), fields=lambda i, rank: {"loss": 4.5} if (i, rank) == (7, 1) else {}
    )
    comparison = compare_runs("", {**runs, "gemini": [other]})
    assert not comparison.valid
    expected = 5 - 7 / 100 + 1 / 1000
    assert comparison.faults == (
        f"losses differ: gemini has 4.5 in iteration 7 on rank 1, none {expected!r} (wrong, none-0)",
    )


def test_the_loss_of_the_last_attempt_counts(runs: Runs) -> None:
    folder = runs["capricorn"][0]
    append(folder / "iterations.jsonl", sample_of(12, 0, 1.0, attempt=1))
    append(folder / "iterations.jsonl", sample_of(12, 1, 1.0, attempt=1, loss=1.0))
    write_record(folder, scenario_of("capricorn"))
    assert "capricorn has 1.0 in iteration 12 on rank 1" in compare_runs("", runs).faults[0]


def test_a_verdict_that_is_not_ok_makes_it_invalid(runs: Runs, tmp_path: Path) -> None:
    lost = write_folder(
        tmp_path, "lost", scenario_of("gemini"), fields=lambda i, rank: {"completed": ()} if i == 9 else {}
    )
    comparison = compare_runs("", {**runs, "gemini": [lost]})
    row = rows_of(comparison)["gemini"]
    assert (row.requested, row.effective, comparison.valid) == (12, 11, False)
    assert comparison.faults == ("lost: effective checkpoints 11 of 12 requested",)


def test_a_system_that_never_got_to_a_checkpoint_makes_it_invalid(runs: Runs, tmp_path: Path) -> None:
    watching = write_folder(tmp_path, "w", scenario_of("gemini"), fields=lambda i, rank: {"requested": False})
    comparison = compare_runs("", {**runs, "gemini": [watching]})
    assert not comparison.valid
    assert rows_of(comparison)["gemini"].slowdown is None
    due = "no checkpoint came due in 12 iterations: train longer, or make them more often"
    assert comparison.faults == (f"w: {due}",)


DIFFERENT: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"mode": "emulated"}, "mode is live in a and emulated in b"),
    ({"train": {"iterations": 12, "warmup": 2, "seed": 3}}, {}, "train.seed is 0 in a and 3 in b"),
    ({"loads": {"source": "stable"}}, {}, "loads.source is router in a and stable in b"),
    ({"data": {"path": "/some/text"}}, {}, "data.path is stdlib in a and /some/text in b"),
    ({"cluster": {"nodes": 2, "device": "cuda"}}, {}, "cluster.device is cpu in a and cuda in b"),
    ({"cluster": {"nodes": 2, "links": "paced", "device": "cpu", "name": "x", "attention_s": 1, "expert_s": 1}}, {},
     "cluster.name is local in a and x in b"),
    ({"faults": [{"kind": "kill-all", "iteration": 3}]}, {"verdict": "ok"}, "faults is [] in a and ['kill-all@"),
]  # fmt: skip


@pytest.mark.parametrize(("sections", "record", "message"), DIFFERENT, ids=[message for _, _, message in DIFFERENT])
def test_other_work_is_refused_and_named(
    tmp_path: Path, sections: dict[str, Any], record: dict[str, Any], message: str
) -> None:
    here = write_folder(tmp_path, "a", scenario_of("none"))
    there = write_folder(tmp_path, "b", scenario_of("capricorn", **sections), **record)
    with pytest.raises(ConfigError) as raised:
        compare_runs("", {"none": [here], "capricorn": [there]})
    assert message in str(raised.value)


def test_links_in_user_space_and_in_namespaces_are_not_the_same(tmp_path: Path) -> None:
    measured = {"nodes": 2, "device": "cpu", "name": "x", "attention_s": 1, "expert_s": 1}
    folders = [
        write_folder(tmp_path, way, scenario_of("none", cluster=measured | {"links": way}))
        for way in ("paced", "namespaces")
    ]
    with pytest.raises(ConfigError, match=r"cluster\.links is paced in paced and namespaces in namespaces"):
        compare_runs("", {"none": folders})


def test_a_shorter_run_and_other_settings_of_a_system_are_the_same_work(tmp_path: Path) -> None:
    here = write_folder(tmp_path, "a", scenario_of("none"))
    shorter = scenario_of("gemini", iterations=6, gemini={"mu": 0.5}, planner={"risk": 0.1})
    comparison = compare_runs("", {"none": [here], "gemini": [write_folder(tmp_path, "b", shorter, pace=2.0)]})
    assert comparison.valid
    pairs = summed([tmp_path / "b"], "gemini", [here], "none")
    assert len(pairs[0][0]) == 3
    assert comparison.rows[1].slowdown == pytest.approx(sum(pairs[0][0]) / sum(pairs[0][1]))
    assert "6 to 12 iterations" in comparison.what


# --- two runs


def test_the_ratio_of_two_runs_of_one_system_is_that_of_their_iterations(runs: Runs) -> None:
    first, second = runs["capricorn"]
    ((ours, theirs),) = summed([second], "capricorn", [first], "capricorn")
    assert ratio_of(second, first).value == pytest.approx(sum(ours) / sum(theirs))
    assert ratio_of(first, first) == (1.0, (1.0, 1.0))


def test_runs_without_a_common_iteration_have_no_ratio(runs: Runs, tmp_path: Path) -> None:
    late = write_folder(
        tmp_path, "late", scenario_of("capricorn"), fields=lambda i, rank: {"requested": i == 12, "completed": (12,)}
    )
    short = write_folder(tmp_path, "short", scenario_of("none", iterations=6))
    with pytest.raises(ConfigError, match="no iteration in common; train longer"):
        ratio_of(late, short)


def test_a_damaged_line_is_left_out_and_named(runs: Runs) -> None:
    path = runs["none"][0] / "iterations.jsonl"
    path.write_text(f"{{}}\n{path.read_text()}")
    comparison = compare_runs("", runs)
    assert comparison.valid
    assert "none-0: iterations.jsonl: 1 line is damaged and left out (1)" in comparison.notes


def test_a_run_of_which_every_line_is_damaged_makes_a_comparison_invalid(runs: Runs) -> None:
    (runs["none"][0] / "iterations.jsonl").write_text("{}\n" * 8)
    comparison = compare_runs("", runs)
    assert not comparison.valid
    assert "none-0: iterations.jsonl: 8 lines are damaged and left out (1, 2, 3, 4, 5, ...)" in comparison.notes
