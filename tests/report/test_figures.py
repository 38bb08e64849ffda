"""The exported figures: what they show of known samples, the same bytes each time, and the files they become."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

import pytest

from capricorn.compare.comparison import Comparison
from capricorn.errors import ConfigError
from capricorn.records.samples import ITERATIONS, LOADS, OPS, IterationSample, append
from capricorn.report.export.gallery import figure_files
from capricorn.report.figures.comparison_figures import pictures
from capricorn.report.figures.figure_data import Shown, memory_of, most_skewed, read_shown, typical_timelines
from capricorn.report.figures.style import SPARE, Picture, colour, encode, inline_svg, wrapped
from capricorn.systems.registry import SYSTEMS
from tests.support.recorded import (
    LAYER_S,
    NUM_ITERATIONS,
    SAMPLED_EVERY,
    WARMUP,
    comparison,
    row,
    write_run_folder,
)

SETTLED = 3
"""Iteration after which a system counts that checkpoints every one."""
SYSTEM_NAMES = ("none", "capricorn", "blocking")
FIGURES = ["iteration-time", "stall", "slowdown", "timeline", "expert-load", "memory"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    root = tmp_path_factory.mktemp("runs")
    stalls = {"none": 0.0, "capricorn": 0.002, "blocking": 0.05}
    return {
        name: [write_run_folder(root / f"run-{name}-{n}", name, fields={"stall_s": stalls[name]}) for n in (1, 2)]
        for name in SYSTEM_NAMES
    }


@pytest.fixture(scope="module")
def whole(folders: Mapping[str, Sequence[Path]]) -> Comparison:
    runs = {name: tuple(folder.name for folder in each) for name, each in folders.items()}
    base = row("none", slowdown=1.0, slowdown_ci=(1, 1), runs=runs["none"])
    return comparison(base, *(row(name, runs=runs[name]) for name in SYSTEM_NAMES[1:]))


@pytest.fixture(scope="module")
def drawn(whole: Comparison, folders: Mapping[str, Sequence[Path]]) -> dict[str, Picture]:
    return {picture.name: picture for picture in pictures(whole, folders)}


@pytest.fixture(scope="module")
def shown(whole: Comparison, folders: Mapping[str, Sequence[Path]]) -> list[Shown]:
    return read_shown(whole, folders)


# --- what they show


def test_there_is_every_figure_with_its_words_and_runs(drawn: Mapping[str, Picture]) -> None:
    assert list(drawn) == FIGURES
    for picture in drawn.values():
        assert "live" in picture.caption
        assert picture.caption.endswith(".")
        assert len(picture.alt) > 30
    assert len(drawn["iteration-time"].runs) == 6
    assert drawn["slowdown"].runs == drawn["iteration-time"].runs, "what it is measured from is part of it"
    assert drawn["timeline"].runs == ("run-none-1", "run-capricorn-1", "run-blocking-1")
    assert drawn["expert-load"].runs == ("run-none-1",)


def test_steady_iterations_of_all_repeats_are_shown(shown: Sequence[Shown], drawn: Mapping[str, Picture]) -> None:
    none, capricorn, _ = shown
    assert len(none.durations_s) == 2 * (NUM_ITERATIONS - WARMUP)
    assert len(capricorn.durations_s) == 2 * (NUM_ITERATIONS - SETTLED)
    counted = f"All {2 * (NUM_ITERATIONS - SETTLED)} to {2 * (NUM_ITERATIONS - WARMUP)} steady iterations"
    assert counted in drawn["iteration-time"].caption


def test_bars_are_as_long_as_what_they_stand_for_and_start_at_0(drawn: Mapping[str, Picture]) -> None:
    (axes,) = drawn["stall"].figure.axes
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([0, 2, 50])
    assert axes.get_xlim()[0] == 0
    assert "(ms)" in axes.get_xlabel()
    assert "blocking 50 ms" in drawn["stall"].alt


def test_the_interval_of_a_slowdown_is_drawn_and_written(drawn: Mapping[str, Picture]) -> None:
    (axes,) = drawn["slowdown"].figure.axes
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    assert [float(dot.get_xdata()[0]) for dot in dots] == [1.25, 1.25]
    assert axes.get_xlim()[0] < 1 < axes.get_xlim()[1]
    assert "1.250 [1.125, 1.375]" in [text.get_text() for text in axes.texts]


def test_memory_is_that_of_all_ranks_and_of_the_stores(shown: Sequence[Shown], drawn: Mapping[str, Picture]) -> None:
    assert memory_of(shown[1]) == (600_000_000, 4_000_000)
    assert "600 MB + 4 MB" in drawn["memory"].alt


def test_the_most_skewed_layer_is_shown(shown: Sequence[Shown], drawn: Mapping[str, Picture]) -> None:
    loads = most_skewed(shown)
    assert loads is not None
    assert (loads.layer, loads.first_iteration, loads.share_EI.shape) == (1, 1, (8, NUM_ITERATIONS))
    assert loads.share_EI[0] == pytest.approx(200 / (200 + 7 * 56))
    assert loads.skew == pytest.approx(8 * 200 / (200 + 7 * 56))
    assert "layer 1" in drawn["expert-load"].title


def test_a_timeline_is_of_one_iteration_that_all_have_sampled(
    shown: Sequence[Shown], drawn: Mapping[str, Picture]
) -> None:
    found = typical_timelines(shown)
    assert {timeline.iteration for timeline in found.values()} == {SAMPLED_EVERY}
    assert {timeline.rank for timeline in found.values()} == {0}
    (axes,) = drawn["timeline"].figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "compute", "network", *["compute", "network", "stage", "send"] * 2,
    ]  # fmt: skip
    ends = [box.x1 for collection in axes.collections for box in [collection.get_datalim(axes.transData)]]
    assert max(ends) == pytest.approx(1000 * max(0.1, 11 * LAYER_S / 2))


def slow_down(run: Path, iteration: int) -> None:
    """Makes that iteration four times as long in the record."""
    path = run / ITERATIONS
    samples = [IterationSample.model_validate_json(line) for line in path.read_text().splitlines()]
    path.unlink()
    for each in samples:
        append(path, each.model_copy(update={"duration_s": 0.4}) if each.iteration == iteration else each)


def test_the_most_usual_of_the_sampled_iterations_is_chosen(tmp_path: Path) -> None:
    run = write_run_folder(tmp_path / "run")
    slow_down(run, SAMPLED_EVERY)
    shown = read_shown(comparison(row()), {"capricorn": [run]})
    assert typical_timelines(shown)["capricorn"].iteration == 2 * SAMPLED_EVERY


def test_a_timeline_is_taken_from_the_repeat_in_which_it_was_most_usual(tmp_path: Path) -> None:
    runs = [write_run_folder(tmp_path / f"run-{number}") for number in (1, 2)]
    slow_down(runs[0], SAMPLED_EVERY)
    slow_down(runs[0], 2 * SAMPLED_EVERY)
    found = typical_timelines(read_shown(comparison(row()), {"capricorn": runs}))["capricorn"]
    assert (found.run_id, found.iteration) == ("run-2", SAMPLED_EVERY)


def test_what_was_not_recorded_is_not_drawn(tmp_path: Path) -> None:
    run = write_run_folder(tmp_path / "run")
    (run / OPS).unlink()
    (run / LOADS).unlink()
    alone = comparison(row(slowdown=None, slowdown_ci=None))
    assert [picture.name for picture in pictures(alone, {"capricorn": [run]})] == ["iteration-time", "stall", "memory"]


def test_runs_of_another_mode_are_never_drawn(folders: Mapping[str, Sequence[Path]]) -> None:
    with pytest.raises(ConfigError, match="is live, its comparison emulated"):
        pictures(comparison(row(), mode="emulated"), folders)


# --- how they look


def test_every_system_has_a_colour_of_its_own_in_all_figures(drawn: Mapping[str, Picture]) -> None:
    colours = [entry.colour for entry in SYSTEMS.values() if entry.colour]
    assert len(set(colours) | set(SPARE)) == len(colours) + len(SPARE)
    assert len(set(map(colour, SYSTEMS))) == len(SYSTEMS), "give the new system its colour"
    for name in ("iteration-time", "stall", "slowdown", "timeline", "memory"):
        svg = inline_svg(drawn[name], "x")
        assert colour("capricorn") in svg, name
        assert colour("blocking") in svg, name


def test_the_same_samples_give_the_same_bytes(
    whole: Comparison, folders: Mapping[str, Sequence[Path]], drawn: Mapping[str, Picture]
) -> None:
    again = {picture.name: picture for picture in pictures(whole, folders)}
    for kind, name in (*product(["svg"], FIGURES), ("pdf", "slowdown"), ("png", "expert-load"), ("png", "timeline")):
        first = encode(drawn[name].figure, kind)
        assert encode(drawn[name].figure, kind) == first, f"{name} drawn once, saved twice as {kind}"
        assert encode(again[name].figure, kind) == first, f"{name} drawn twice as {kind}"


def test_text_stays_text_and_fonts_are_embedded(drawn: Mapping[str, Picture]) -> None:
    svg = encode(drawn["stall"].figure, "svg").decode()
    assert "<text" in svg
    assert "stall of an iteration" in svg
    assert "<dc:date>" not in svg
    pdf = encode(drawn["stall"].figure, "pdf")
    assert b"/FontFile2" in pdf
    assert b"/Type3" not in pdf
    assert b"CreationDate" not in pdf


def test_nothing_that_is_written_lies_outside_of_a_picture(drawn: Mapping[str, Picture]) -> None:
    for picture in drawn.values():
        inside = picture.figure.bbox
        for axes in picture.figure.axes:
            box = axes.get_tightbbox()
            assert box is not None
            assert box.x0 >= inside.x0 - 1, picture.name
            assert box.x1 <= inside.x1 + 1, picture.name
            assert box.y0 >= inside.y0 - 1, picture.name
            assert box.y1 <= inside.y1 + 1, picture.name


def test_long_names_are_wrapped() -> None:
    lines = wrapped("capricorn:planner.replan=every-10:" + 60 * "x").splitlines()
    assert lines[:2] == ["capricorn", "planner.replan=every-10"]
    assert max(map(len, lines)) <= 26


# --- files


def test_figures_become_files_with_a_list_of_their_runs(whole: Comparison, drawn: Mapping[str, Picture]) -> None:
    files = figure_files([whole], [list(drawn.values())], ["svg", "png"])
    names = {f"mixtral-tiny-live-{name}.{kind}" for name in FIGURES for kind in ("svg", "png")}
    assert files.keys() == names | {"figures.json", "FIGURES.md"}
    index = json.loads(files["figures.json"])["figures"]
    assert {file for entry in index for file in entry["files"]} == names
    assert all(entry["mode"] == "live" and entry["runs"] for entry in index)
    page = files["FIGURES.md"].decode()
    assert "](mixtral-tiny-live-stall.svg)" in page
    assert "`run-blocking-2`" in page
