"""The figures of a comparison: one drawing function for each, from raw samples to a picture with its words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from capricorn.compare.compare_record import BASE
from capricorn.compare.comparison import Comparison
from capricorn.report.figures.figure_data import Shown, memory_of, most_skewed, read_shown
from capricorn.report.figures.style import INK, Picture, TimeUnit, colour, new_axes, note_row, rows_axes, settle, styled
from capricorn.report.figures.timeline import draw_timeline
from capricorn.report.text import DIFFERS_NOT, NO_DIFFERENCE, format_memory, format_ratio
from capricorn.units import format_seconds

GB = 1e9


def pictures(comparison: Comparison, folders: Mapping[str, Sequence[Path]]) -> list[Picture]:
    """Returns all figures for which the runs recorded what they show.

    Raises:
        ConfigError: a run is damaged, or was made in another mode than the comparison.
    """
    systems = read_shown(comparison, folders)
    if not systems:
        return []
    with styled():
        drawn = [picture for draw in DRAWINGS if (picture := draw(comparison, systems))]
        for picture in drawn:
            settle(picture.figure)
    return drawn


def _ids(systems: Sequence[Shown]) -> tuple[str, ...]:
    return tuple(run_id for each in systems for run_id in each.run_ids)


# --- times -------------------------------------------------------------------------------------------------------


def draw_iterations(comparison: Comparison, systems: Sequence[Shown]) -> Picture:
    """Draws a box plot of the iteration time of each system."""
    unit = TimeUnit.of(max(float(each.durations_s.max()) for each in systems))
    figure, axes = rows_axes([each.label for each in systems])
    medians = []
    for row, each in enumerate(systems):
        values = each.durations_s
        medians.append(f"{each.label} {format_seconds(float(np.median(values)))}")
        _box(axes, row, values / unit.seconds, colour(each.row.system))
    axes.set_xlabel(f"iteration time ({unit.name}), {comparison.mode}")
    counts = sorted({len(each.durations_s) for each in systems})
    count = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return Picture(
        name="iteration-time",
        title="Iteration time",
        caption=(
            f"All {count} steady iterations of each system, {comparison.mode}: quartiles and median; whiskers reach "
            "the last value within 1.5 interquartile ranges, and what lies beyond is dotted."
        ),
        alt=f"Box plot, medians: {', '.join(medians)}.",
        runs=_ids(systems),
        figure=figure,
    )


def _box(axes: Axes, row: int, values: np.ndarray, face: str) -> None:
    """Draws a box by hand: how boxplot is told to lie flat depends on the version of matplotlib."""
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    reach = 1.5 * (high - low)
    inside = values[(values >= low - reach) & (values <= high + reach)]
    outside = values[(values < low - reach) | (values > high + reach)]
    axes.hlines(row, inside.min(), inside.max(), color=face, linewidth=1.2)
    axes.vlines([inside.min(), inside.max()], row - 0.12, row + 0.12, color=face, linewidth=1.2)
    axes.barh(row, high - low, left=low, height=0.5, color=face, alpha=0.75, edgecolor=face)
    axes.vlines(middle, row - 0.25, row + 0.25, color=INK, linewidth=1.8)
    axes.plot(outside, np.full(len(outside), row), "o", markersize=3, color=face, alpha=0.7, markeredgewidth=0)


def draw_stalls(comparison: Comparison, systems: Sequence[Shown]) -> Picture:
    """Draws bars of the median stall, with a line to the 95th percentile."""
    stalls_s = [np.quantile(each.stalls_s, [0.5, 0.95]).tolist() for each in systems]
    unit = TimeUnit.of(max(p95 for _, p95 in stalls_s))
    figure, axes = rows_axes([each.label for each in systems])
    for row, (each, (p50_s, p95_s)) in enumerate(zip(systems, stalls_s, strict=True)):
        axes.barh(row, p50_s / unit.seconds, height=0.55, color=colour(each.row.system))
        axes.hlines(row, p50_s / unit.seconds, p95_s / unit.seconds, color=INK, linewidth=1.2)
        axes.vlines(p95_s / unit.seconds, row - 0.12, row + 0.12, color=INK, linewidth=1.2)
        note_row(axes, row, format_seconds(p50_s))
    axes.set_xlim(left=0)
    axes.set_xlabel(f"stall of an iteration ({unit.name}), {comparison.mode}")
    words = [f"{each.label} {format_seconds(p50)}" for each, (p50, _) in zip(systems, stalls_s, strict=True)]
    return Picture(
        name="stall",
        title="Stall",
        caption=(
            "Time of a steady iteration in which training waited inside the checkpointing system, "
            f"{comparison.mode}: median (bar and figure) and 95th percentile (line)."
        ),
        alt=f"Bars, medians: {', '.join(words)}.",
        runs=_ids(systems),
        figure=figure,
    )


def draw_slowdowns(comparison: Comparison, systems: Sequence[Shown]) -> Picture | None:
    """Draws each slowdown with its interval, and a line at 1; None if none is known."""
    known = [each for each in systems if each.row.slowdown is not None and each.row.system != BASE]
    if not known:
        return None
    figure, axes = rows_axes([each.label for each in known])
    axes.axvline(1, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    words = []
    for row, each in enumerate(known):
        value, face = each.row.slowdown or 1.0, colour(each.row.system)
        low, high = each.row.slowdown_ci or (value, value)
        axes.hlines(row, low, high, color=face, linewidth=2.2)
        axes.vlines([low, high], row - 0.12, row + 0.12, color=face, linewidth=1.6)
        axes.plot(value, row, "o", markersize=7, color=face)
        text = format_ratio(each.row.slowdown, each.row.slowdown_ci)
        note_row(axes, row, text.replace(DIFFERS_NOT, f"\n{NO_DIFFERENCE}"))
        words.append(f"{each.label} {text}")
    axes.set_xlabel(f"slowdown (time / time without checkpoints), {comparison.mode}")
    return Picture(
        name="slowdown",
        title="Slowdown",
        caption=(
            f"Time of the iterations over that of the same ones without checkpoints, {comparison.mode}, with the "
            "interval that holds it with 95 % confidence; the dashed line is no slowdown."
        ),
        alt=f"Points with intervals: {'; '.join(words)}.",
        runs=_ids(systems),
        figure=figure,
    )


# --- memory and loads --------------------------------------------------------------------------------------------


def draw_memory(comparison: Comparison, systems: Sequence[Shown]) -> Picture:
    """Draws bars of resident memory, and on top of it what the stores hold."""
    figure, axes = rows_axes([each.label for each in systems])
    words = []
    for row, each in enumerate(systems):
        face, (rss_bytes, store_bytes) = colour(each.row.system), memory_of(each)
        axes.barh(row, rss_bytes / GB, height=0.55, color=face)
        axes.barh(
            row, store_bytes / GB, left=rss_bytes / GB, height=0.55, color="none", edgecolor=face, hatch="////",
            linewidth=1,
        )  # fmt: skip
        text = format_memory(rss_bytes, store_bytes)
        note_row(axes, row, text)
        words.append(f"{each.label} {text}")
    axes.set_xlim(left=0)
    axes.set_xlabel(f"memory of all ranks (GB), {comparison.mode}")
    handles = [Patch(color=INK, label="processes (RSS)"), Patch(fill=False, edgecolor=INK, hatch="////", label="store")]
    figure.legend(handles=handles, loc="outside upper center", ncols=2)
    return Picture(
        name="memory",
        title="Memory",
        caption=(
            f"Peak resident memory of the processes and largest size of the memory stores, {comparison.mode}; the run "
            "that took most."
        ),
        alt=f"Stacked bars, processes + store: {', '.join(words)}.",
        runs=_ids(systems),
        figure=figure,
    )


def draw_loads(comparison: Comparison, systems: Sequence[Shown]) -> Picture | None:
    """Draws a heat map of the share of tokens of each expert over iterations; None if no run recorded loads."""
    loads = most_skewed(systems)
    if loads is None:
        return None
    num_experts, num_iterations = loads.share_EI.shape
    figure, axes = new_axes(min(4.2, 1.7 + 0.11 * num_experts))
    first = loads.first_iteration - 0.5
    image = axes.imshow(
        100 * loads.share_EI, aspect="auto", interpolation="none", origin="lower", cmap="cividis", vmin=0,
        extent=(first, first + num_iterations, -0.5, num_experts - 0.5),
    )  # fmt: skip
    axes.set_xlabel(f"iteration, {comparison.mode}")
    axes.set_ylabel("expert")
    axes.locator_params(integer=True)
    figure.colorbar(image, ax=axes, label="share of tokens (%)", pad=0.02)
    return Picture(
        name="expert-load",
        title=f"Expert load of layer {loads.layer}",
        caption=(
            f"Share of the tokens that each expert of layer {loads.layer} got, {comparison.mode}; of all layers the "
            f"most skewed: its busiest expert has {loads.skew:.2f} times the mean, averaged over iterations. An equal "
            f"share would be {100 / num_experts:.3g} %."
        ),
        alt=f"Heat map of {num_experts} experts over {num_iterations} iterations, from 0 to "
            f"{np.nanmax(100 * loads.share_EI):.3g} % of the tokens.",
        runs=(loads.run_id,),
        figure=figure,
    )  # fmt: skip


DRAWINGS: tuple[Callable[[Comparison, Sequence[Shown]], Picture | None], ...] = (
    draw_iterations, draw_stalls, draw_slowdowns, draw_timeline, draw_loads, draw_memory,
)  # fmt: skip
