"""Draws one iteration of a run: what each rank computed and exchanged, and when its checkpoint went out.

python docs/planner_figure.py RUN_FOLDER [ITERATION] [OUT.svg]; needs matplotlib. Of the iterations whose timeline was
sampled it is the last by default. OUT may be a .png too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from capricorn.hooks import OP_KINDS, OpKey
from capricorn.planner.profile import IterationProfile, spans_of
from capricorn.records.samples import ITERATIONS, OPS, IterationSample, OpSample, read_run, read_samples
from capricorn.report.text import describe
from capricorn.units import Bytes, BytesPerSecond, Seconds

COMPUTING, ALL_TO_ALL, REDUCE, UPDATE = "#56a0d3", "#e69f00", "#cc79a7", "#8c8c8c"
COLORS = {"dispatch": ALL_TO_ALL, "combine": ALL_TO_ALL, "reduce": REDUCE, "update": UPDATE}
HIDDEN, COLLIDING, IDLE = "#00795a", "#000000", "#dde7ed"
WAITING: dict[str, Any] = {"facecolor": "#fff6e0", "edgecolor": "#dcb35c", "hatch": "////"}
LEGEND = [
    Patch(color=COMPUTING, label="computing"),
    Patch(**WAITING, linewidth=0, label="waiting for the last rank"),
    Patch(color=ALL_TO_ALL, label="all-to-all, moving bytes"),
    Patch(color=REDUCE, label="reduce, moving bytes"),
    Patch(color=UPDATE, label="update"),
    Patch(color=IDLE, label="idle span of the link"),
    Patch(color=HIDDEN, label="checkpoint, hidden"),
    Patch(color=COLLIDING, label="checkpoint, colliding"),
]
OPS_LANE, SENDS_LANE = (0.0, 0.42), (0.46, 0.88)  # of a rank, which is 1 high, downwards


class Stretch(NamedTuple):
    """Of an iteration, in seconds since its first rank began it."""

    begin_s: Seconds
    end_s: Seconds


@dataclass(frozen=True)
class Timeline:
    """One iteration on all ranks. Of what is listed by rank, times are since the first rank began."""

    iteration: int
    ranks: list[int]
    late_s: list[Seconds]
    """By rank."""
    profile: IterationProfile
    """By the same clock."""
    sends: list[list[tuple[Stretch, Bytes]]]
    """By rank."""
    duration_s: Seconds
    link_bytes_per_s: BytesPerSecond
    """As measured on line, or else of the fastest transfer."""

    @classmethod
    def read(cls, folder: Path, iteration: int | None) -> Timeline:
        samples = list(read_samples(folder / OPS, OpSample))
        iteration = max(sample.iteration for sample in samples) if iteration is None else iteration
        samples = sorted((s for s in samples if s.iteration == iteration), key=lambda sample: sample.begin_s)
        if not samples:
            raise SystemExit(f"{folder} holds no timeline of iteration {iteration}")
        own = {s.rank: s for s in read_samples(folder / ITERATIONS, IterationSample) if s.iteration == iteration}
        ranks = sorted({sample.rank for sample in samples})
        begins_s = [own[rank].at_s - own[rank].duration_s for rank in ranks]
        late_s = [begin_s - min(begins_s) for begin_s in begins_s]
        sends = [_sends(samples, rank, late) for rank, late in zip(ranks, late_s, strict=True)]
        fastest = max((size / (at.end_s - at.begin_s) for of_rank in sends for at, size in of_rank), default=1.0)
        return cls(
            iteration=iteration,
            ranks=ranks,
            late_s=late_s,
            profile=_profile(iteration, [[s for s in samples if s.rank == rank] for rank in ranks], late_s),
            sends=sends,
            duration_s=max(own[rank].duration_s + late for rank, late in zip(ranks, late_s, strict=True)),
            link_bytes_per_s=max(own[rank].link_bytes_per_s for rank in ranks) or fastest,
        )

    def ops(self, place: int) -> Iterator[tuple[OpKey, Stretch]]:
        """The ops of the rank that stands there."""
        for op, begin_s, end_s in zip(
            self.profile.ops, self.profile.begins_s[place], self.profile.ends_s[place], strict=True
        ):
            yield op, Stretch(begin_s, end_s)

    def moving(self, place: int) -> list[tuple[OpKey, Stretch]]:
        """The communications of that rank, each from when the last rank has come to it."""
        moving_s = self.profile.moving_s()[place]
        return [(op, Stretch(at.end_s - moving_s[op], at.end_s)) for op, at in self.ops(place) if op in moving_s]

    def idle_spans(self, place: int) -> list[Stretch]:
        """Of the link of that rank."""
        ends_s = {op: at.end_s for op, at in self.ops(place)}
        begins_s = [self.late_s[place] if s.opens is None else ends_s[s.opens] for s in spans_of(self.profile.ops)]
        durations_s = self.profile.span_s()[place]
        return [Stretch(begin, begin + lasts) for begin, lasts in zip(begins_s, durations_s, strict=True)]


def _profile(iteration: int, by_rank: Sequence[Sequence[OpSample]], late_s: Sequence[Seconds]) -> IterationProfile:
    """Samples are since each rank's own begin; a profile goes by one clock."""
    rows = [{OpKey(s.layer, s.direction, s.kind): s for s in ops if s.kind in OP_KINDS} for ops in by_rank]  # type: ignore[arg-type]
    order = tuple(rows[0])
    return IterationProfile(
        iteration=iteration,
        ops=order,
        begins_s=tuple(tuple(row[op].begin_s + late for op in order) for row, late in zip(rows, late_s, strict=True)),
        ends_s=tuple(tuple(row[op].end_s + late for op in order) for row, late in zip(rows, late_s, strict=True)),
        tokens={},
        starts_s=tuple(late_s),
    )


def _sends(samples: Sequence[OpSample], rank: int, late_s: Seconds) -> list[tuple[Stretch, Bytes]]:
    return [
        (Stretch(s.begin_s + late_s, s.end_s + late_s), s.bytes)
        for s in samples
        if s.rank == rank and s.kind == "send" and s.end_s > s.begin_s
    ]


def _overlaps(stretch: Stretch, others: Sequence[Stretch]) -> Iterator[Stretch]:
    for other in others:
        both = Stretch(max(stretch.begin_s, other.begin_s), min(stretch.end_s, other.end_s))
        if both.begin_s < both.end_s:
            yield both


def _bar(axes: Axes, at: Stretch, top: float, height: float, **style: Any) -> None:
    axes.barh(top, 1e3 * (at.end_s - at.begin_s), height, left=1e3 * at.begin_s, align="edge", linewidth=0, **style)


def _draw_ops(axes: Axes, timeline: Timeline, place: int) -> None:
    """A rank waits from the end of the op before until all have come; the counts of the routers come first, too."""
    top, height = place + OPS_LANE[0], OPS_LANE[1] - OPS_LANE[0]
    moving, before_s = dict(timeline.moving(place)), timeline.late_s[place]
    for op, at in timeline.ops(place):
        if op.kind in ("dispatch", "combine", "reduce"):
            _bar(axes, Stretch(before_s, moving[op].begin_s), top, height, **WAITING)
            at = moving[op]
        _bar(axes, at, top, height, color=COLORS.get(op.kind, COMPUTING))
        before_s = at.end_s


def _draw_sends(axes: Axes, timeline: Timeline, place: int) -> None:
    """Transfers standing on the floor of their lane, as high as their rate, so that areas are bytes."""
    whole = Stretch(0.0, timeline.duration_s)
    moving = [at for _, at in timeline.moving(place)]
    for at, num_bytes in timeline.sends[place]:
        height = min(1.0, num_bytes / (at.end_s - at.begin_s) / timeline.link_bytes_per_s) * (
            SENDS_LANE[1] - SENDS_LANE[0]
        )
        top = place + SENDS_LANE[1] - height
        for part in _overlaps(at, [whole]):
            _bar(axes, part, top, height, color=HIDDEN)
            for colliding in _overlaps(part, moving):
                _bar(axes, colliding, top, height, color=COLLIDING)


def _draw(axes: Axes, timeline: Timeline) -> None:
    for place in range(len(timeline.ranks)):
        for span in timeline.idle_spans(place):
            _bar(axes, span, place - 0.04, 0.96, color=IDLE)
        _draw_ops(axes, timeline, place)
        _draw_sends(axes, timeline, place)
        axes.axhline(place + SENDS_LANE[1], color="#888888", linewidth=0.5)
    lanes = [place + sum(lane) / 2 for place in range(len(timeline.ranks)) for lane in (OPS_LANE, SENDS_LANE)]
    axes.set_yticks(lanes, [name for rank in timeline.ranks for name in (f"rank {rank}:  ops", "checkpoint")])
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.set(xlabel="ms", xlim=(0, 1e3 * timeline.duration_s), ylim=(len(timeline.ranks) - 0.05, -0.06))


def main() -> None:
    """Writes the figure."""
    folder, *options = sys.argv[1:]
    iteration = next((int(option) for option in options if option.isdecimal()), None)
    out = next((Path(option) for option in options if not option.isdecimal()), Path(__file__).with_name("planner.svg"))
    record, timeline = read_run(Path(folder)), Timeline.read(Path(folder), iteration)
    plt.rcParams |= {"svg.hashsalt": "capricorn", "hatch.linewidth": 0.6, "font.size": 9}
    figure, axes = plt.subplots(figsize=(9, 1.5 + 0.75 * len(timeline.ranks)), layout="constrained")
    _draw(axes, timeline)
    title = f"iteration {timeline.iteration}: {describe(record.config)}, {record.mode}"
    figure.legend(handles=LEGEND, title=title, ncols=4, loc="outside upper left", alignment="left", frameon=False)
    figure.savefig(out, metadata={"Date": None}, dpi=100)
    print(out)


if __name__ == "__main__":
    main()
