"""The figure of one iteration under each system: what a rank computes, communicates, and moves of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from capricorn.compare.comparison import Comparison
from capricorn.records.samples import OpSample
from capricorn.report.figures.figure_data import Shown, Timeline, typical_timelines
from capricorn.report.figures.style import INK, Picture, TimeUnit, colour, new_axes
from capricorn.stats.lanes import ALL_TO_ALL, CHECKPOINT, COMMUNICATION, COMPUTE, is_chunk, lane_of
from capricorn.units import format_bytes, format_seconds

LANE_IN, HEAD_IN = 0.2, 0.3
"""Height of a lane, and of the line with the name of a system above its lanes."""
NAMES = {COMPUTE: "compute", COMMUNICATION: "network"}
"""Names of lanes; each kind of transfer of a checkpoint has a lane of its own."""
HEAD_CHARS = 60
COMPUTING, ALL_TO_ALLS, OTHERS = "#b4bbc4", "#6b7480", "#b39b6d"
"""Colours of what is no checkpoint: they are those of no system."""
LEGEND = {"compute": COMPUTING, "all-to-all": ALL_TO_ALLS, "reduce and update": OTHERS}
CHUNKS = {"stage": 0.35, "send": 0.65, "write": 0.85}
"""How opaque each kind of transfer is, so that those which overlap are seen; all have the colour of their system."""


class _Lane(NamedTuple):
    name: str
    ops: list[OpSample]


def draw_timeline(comparison: Comparison, systems: Sequence[Shown]) -> Picture | None:
    """Draws the lanes of all systems above each other on one axis of time; None if no run sampled its ops."""
    found = typical_timelines(systems)
    shown = [each for each in systems if each.label in found]
    if not shown:
        return None
    lanes = {each.label: _lanes(found[each.label].ops) for each in shown}
    longest_s = max(timeline.duration_s for timeline in found.values())
    unit = TimeUnit.of(longest_s)
    figure, axes = new_axes(0.95 + sum(HEAD_IN + LANE_IN * len(each) for each in lanes.values()))
    ticks: dict[float, str] = {}
    top_in = 0.0
    for each in shown:
        end_in = top_in + HEAD_IN + LANE_IN * len(lanes[each.label])
        _draw_head(axes, each.label, top_in)
        _draw_end(axes, found[each.label].duration_s / unit.seconds, top_in + HEAD_IN, end_in)
        top_in += HEAD_IN
        for lane in lanes[each.label]:
            _draw_lane(axes, lane, top_in, unit, colour(each.row.system))
            ticks[top_in + LANE_IN / 2] = lane.name
            top_in += LANE_IN
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(top_in + 0.05, 0)
    axes.set_xlim(0, 1.02 * longest_s / unit.seconds)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    axes.set_xlabel(f"time since the iteration began ({unit.name}), {comparison.mode}")
    handles = [Patch(color=face, label=name) for name, face in LEGEND.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), handlelength=1.2)
    return Picture(
        name="timeline",
        title="One iteration",
        caption=(
            f"{_which(shown, found)}, {comparison.mode}. Its end on the slowest rank is dotted; transfers of a "
            "checkpoint have the colour of their system."
        ),
        alt=f"Lanes of computing, network and checkpoint over time. {' '.join(_words(shown, found))}",
        runs=tuple(found[each.label].run_id for each in shown),
        figure=figure,
    )  # fmt: skip


def _lanes(ops: Sequence[OpSample]) -> list[_Lane]:
    """Returns the lanes on which something happened, from above: computing, network, each kind of transfer."""
    lanes = [_Lane(name, [op for op in ops if lane_of(op) == lane]) for lane, name in NAMES.items()]
    chunks = [op for op in ops if lane_of(op) == CHECKPOINT]
    lanes += [_Lane(kind, [op for op in chunks if op.kind == kind]) for kind in _kinds(chunks)]
    return [lane for lane in lanes if lane.ops]


def _kinds(chunks: Sequence[OpSample]) -> list[str]:
    """Returns the kinds of transfers in the order in which a byte goes through them."""
    kinds = {op.kind for op in chunks}
    return [*(kind for kind in CHUNKS if kind in kinds), *sorted(kinds - CHUNKS.keys())]


def _draw_head(axes: Axes, label: str, top_in: float) -> None:
    """Draws the name of a system above its lanes; of a long one the begin."""
    name = label if len(label) <= HEAD_CHARS else f"{label[:HEAD_CHARS]}..."
    axes.text(0, top_in + 0.62 * HEAD_IN, name, va="center", ha="left", fontweight="bold")


def _draw_end(axes: Axes, end: float, top_in: float, bottom_in: float) -> None:
    axes.vlines(end, top_in, bottom_in, color=INK, linewidth=1.2, linestyle=":")


def _draw_lane(axes: Axes, lane: _Lane, top_in: float, unit: TimeUnit, face: str) -> None:
    height_in = 0.72 * LANE_IN
    for look, ops in _by_look(lane, face):
        bars = [(op.begin_s / unit.seconds, (op.end_s - op.begin_s) / unit.seconds) for op in ops]
        axes.broken_barh(bars, (top_in + (LANE_IN - height_in) / 2, height_in), **look)


def _by_look(lane: _Lane, face: str) -> list[tuple[dict[str, Any], list[OpSample]]]:
    """Returns the ops of a lane by how they are drawn."""
    if is_chunk(lane.ops[0]):
        return [({"facecolor": (face, CHUNKS.get(lane.name, 1.0)), "edgecolor": face, "linewidth": 0.5}, lane.ops)]
    if lane_of(lane.ops[0]) == COMPUTE:
        return [({"facecolor": COMPUTING, "linewidth": 0}, lane.ops)]
    exchanges = [op for op in lane.ops if op.kind in ALL_TO_ALL]
    others = [op for op in lane.ops if op.kind not in ALL_TO_ALL]
    return [({"facecolor": ALL_TO_ALLS, "linewidth": 0}, exchanges), ({"facecolor": OTHERS, "linewidth": 0}, others)]


def _which(shown: Sequence[Shown], found: Mapping[str, Timeline]) -> str:
    """Writes which iteration is seen, of each system if they differ."""
    chosen = {each.label: (found[each.label].iteration, found[each.label].rank) for each in shown}
    if len(set(chosen.values())) == 1:
        ((iteration, rank),) = set(chosen.values())
        return f"Iteration {iteration} on rank {rank}, of those that were sampled the most usual one"
    each = ", ".join(f"{label} {iteration}" for label, (iteration, _) in chosen.items())
    return f"The most usual iteration of those that were sampled ({each}), on the first rank"


def _words(shown: Sequence[Shown], found: Mapping[str, Timeline]) -> list[str]:
    """Writes what the lanes come to, by system."""
    words = []
    for each in shown:
        timeline = found[each.label]
        chunks = [op for op in timeline.ops if is_chunk(op)]
        moved = {kind: sum(op.bytes for op in chunks if op.kind == kind) for kind in _kinds(chunks)}
        parts = [f"{kind} {format_bytes(size)}" for kind, size in moved.items()]
        words.append(f"{each.label}: {', '.join([format_seconds(timeline.duration_s), *parts])}.")
    return words
