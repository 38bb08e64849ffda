"""Draws the figures of docs/architecture.md: rooms.svg, checkpoint.svg and failure.svg.

python docs/architecture_figure.py [FOLDER] [svg|png]; needs matplotlib and no run. A text that does not fit its box is
an error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch
from matplotlib.text import Text

WIDTH = 9.0
"""Of every figure, in inches; all lengths are."""
BASIS, RUNS, TELLS, NEUTRAL = "#dbe9f6", "#dff0e0", "#fdebd3", "#eeeeee"
TRAINING, LANE, INK, FAINT = "#c9d8e6", "#f6f6f6", "#222222", "#777777"
ALARM = "#f7d4d0"
LINE = 0.145
"""Between two lines of small text."""


class Box(NamedTuple):
    """A rectangle; y goes downwards."""

    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y + self.height / 2


class Drawing:
    """A white sheet that is drawn on in inches from its upper left corner."""

    def __init__(self, height: float) -> None:
        self.figure = plt.figure(figsize=(WIDTH, height), facecolor="white", dpi=72)  # as the canvas of SVG
        self._axes = self.figure.add_axes((0, 0, 1, 1))
        self._axes.set(xlim=(0, WIDTH), ylim=(height, 0))
        self._axes.axis("off")
        self._fitted: list[tuple[Text, Box]] = []
        self._free: list[Text] = []

    def box(self, at: Box, title: str = "", text: str = "", *, color: str) -> Box:
        """Draws a box with a bold title and small text below it, line by line."""
        self.area(at, color=color, edge="#9a9a9a")
        lines = text.splitlines()
        x, y = at.middle
        top = y - LINE * (len(lines) + bool(title) - 1) / 2
        if title:
            self._note(at, x, top, title, weight="bold", size=8.5)
        for number, line in enumerate(lines, bool(title)):
            self._note(at, x, top + number * LINE, line, size=7.5)
        return at

    def area(self, at: Box, *, color: str, edge: str = "none") -> None:
        """Draws an empty box."""
        style = "round,pad=0,rounding_size=0.05"
        patch = FancyBboxPatch((at.x, at.y), at.width, at.height, style, facecolor=color, edgecolor=edge, linewidth=0.8)
        self._axes.add_patch(patch)

    def write(
        self,
        x: float,
        y: float,
        text: str,
        *,
        align: str = "left",
        faint: bool = False,
        bold: bool = False,
        upright: bool = False,
    ) -> None:
        """Writes small text that stands alone; `upright` text reads from below."""
        style = {"color": FAINT if faint else INK, "weight": "bold" if bold else "normal", "rotation": 90 * upright}
        self._free.append(self._axes.text(x, y, text, ha=align, va="center", size=7.5, linespacing=1.35, **style))

    def arrow(self, begin: tuple[float, float], end: tuple[float, float], *, dashed: bool = False) -> None:
        """Draws an arrow from one point to another."""
        style = {"arrowstyle": "-|>", "color": INK, "linewidth": 0.9, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 8}
        self._axes.annotate("", end, begin, arrowprops={**style, "linestyle": "dashed" if dashed else "solid"})

    def line(self, begin: tuple[float, float], end: tuple[float, float], *, dashed: bool = False) -> None:
        """Draws a thin line from one point to another."""
        style = "dashed" if dashed else "solid"
        self._axes.plot([begin[0], end[0]], [begin[1], end[1]], color=FAINT, linewidth=0.8, linestyle=style)

    def save(self, path: Path) -> None:
        """Writes the figure.

        Raises:
            SystemExit: a text is wider or higher than its box, or two texts lie on each other.
        """
        self._check()
        self.figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)
        plt.close(self.figure)
        print(path)

    def _note(self, at: Box, x: float, y: float, text: str, *, size: float, weight: str = "normal") -> None:
        note = self._axes.text(x, y, text, ha="center", va="center", size=size, weight=weight, color=INK)
        self._fitted.append((note, at))

    def _check(self) -> None:
        to_inches = self._axes.transData.inverted()
        extents = []
        for note in (*(note for note, _ in self._fitted), *self._free):
            bounds = note.get_window_extent().transformed(to_inches)
            extents.append((note.get_text(), bounds))
        for (text, bounds), (_, at) in zip(extents, self._fitted, strict=False):
            top, bottom = sorted((bounds.y0, bounds.y1))
            fits = at.x <= bounds.x0 and bounds.x1 <= at.x + at.width and at.y <= top and bottom <= at.y + at.height
            if not fits:
                raise SystemExit(f"{text!r} does not fit its box")
        for number, (text, bounds) in enumerate(extents):
            for other, theirs in extents[number + 1 :]:
                if bounds.overlaps(theirs):
                    raise SystemExit(f"{text!r} lies on {other!r}")


# --- rooms -------------------------------------------------------------------------------------------------------

LAYERS: Sequence[Sequence[tuple[str, str, str]]] = (
    (("cli/", "parses, calls, prints", NEUTRAL),),
    (
        ("baselines/", "the systems we compare with, and their settings", RUNS),
        ("report/", "terminal/  export/  figures/", TELLS),
    ),
    (
        ("campaign/", "a verdict on each failure", TELLS),
        ("conformance/", "rules for any system", TELLS),
        ("simulate/", "virtual time", TELLS),
    ),
    (
        ("machines/", "one run over several machines", RUNS),
        ("compare/", "systems on the same work", TELLS),
    ),
    (("launch/", "launcher, node agents, fork server, torchrun, worker, recorder", RUNS),),
    (
        ("trainer/", "the one MoE trainer", RUNS),
        ("loads/", "load sources", RUNS),
        ("faults/", "inject and revert", RUNS),
        ("stats/", "figures of one run", TELLS),
    ),
    (("runtime/", "store/  comm/  save/  schedule/  persist/", RUNS),),
    (
        ("systems/", "interface and registry", BASIS),
        ("planner/", "what is sent when", RUNS),
        ("sizing/", "how large it is", BASIS),
        ("emulation/", "a cluster in a box", RUNS),
    ),
    (
        ("config/", "what a run is", BASIS),
        ("records/", "what a run leaves", TELLS),
    ),
    (("vocabulary", "units  errors  hooks  topology  process", NEUTRAL),),
)
"""From the top; a room imports rooms below it and none above."""


def draw_rooms() -> Drawing:
    """Draws the rooms as layers, and the way of the data through the folder of results."""
    left, right, top, height, gap = 0.45, 6.8, 0.42, 0.46, 0.1
    drawing = Drawing(top + len(LAYERS) * (height + gap) + 0.1)
    keys = ((BASIS, "says what a run is"), (RUNS, "makes it run"), (TELLS, "tells what came of it"))
    for number, (color, meaning) in enumerate(keys):
        drawing.area(Box(left + 2.0 * number, 0.13, 0.2, 0.15), color=color, edge="#9a9a9a")
        drawing.write(left + 2.0 * number + 0.27, 0.205, meaning)
    tops = [top + number * (height + gap) for number in range(len(LAYERS))]
    for y, layer in zip(tops, LAYERS, strict=True):
        width = (right - left - gap * (len(layer) - 1)) / len(layer)
        for number, (name, what, color) in enumerate(layer):
            drawing.box(Box(left + number * (width + gap), y, width, height), name, what, color=color)
    drawing.arrow((0.33, tops[0]), (0.33, tops[-1] + height))
    drawing.write(0.2, (tops[0] + tops[-1] + height) / 2, "imports", align="center", upright=True)
    results = drawing.box(
        Box(7.75, tops[1], 1.1, tops[4] + height - tops[1]),
        "results/",
        "data only:\nthe record,\nraw samples,\none folder\nfor each run",
        color=NEUTRAL,
    )
    for row, what in ((1, "read"), (2, "read, written"), (3, "read, written"), (4, "written")):
        y = tops[row] + height / 2
        drawing.write((right + results.x) / 2, y - 0.1, what, align="center")
        if "read" in what:
            drawing.arrow((results.x, y), (right, y))
        if "written" in what:
            drawing.arrow((right, y), (results.x, y))
    return drawing


# --- one checkpoint ----------------------------------------------------------------------------------------------


def lanes(drawing: Drawing, names: Sequence[tuple[str, float]], top: float, x: float) -> dict[str, float]:
    """Draws the lanes below each other, each with its height; yields where each begins."""
    tops = {}
    for name, height in names:
        drawing.area(Box(0.1, top, WIDTH - 0.2, height), color=LANE)
        drawing.write(0.2, top + height / 2, name, bold=True)
        tops[name], top = top, top + height + 0.08
    drawing.line((x - 0.1, min(tops.values())), (x - 0.1, top - 0.08))
    return tops


def draw_checkpoint() -> Drawing:
    """Draws the way of the checkpoint of iteration i from the live state to complete."""
    training, hooks = "training\nthread", "hooks, on\nthat thread"
    staging, sending, server = "staging\nthread", "sending\nthread", "server\nthread"
    drawing = Drawing(4.9)
    what = "The checkpoint of iteration i, from one owner to one holder. Time goes to the right."
    drawing.write(0.2, 0.17, what, faint=True)
    drawing.write(0.2, 0.42, "the owner, a rank: one process", faint=True)
    owner = lanes(drawing, ((training, 0.42), (hooks, 0.78), (staging, 0.68), (sending, 0.82)), 0.55, 1.05)
    drawing.write(0.2, 3.9, "the holder, a rank of another node", faint=True)
    holder = lanes(drawing, ((server, 0.72),), 4.05, 1.05)

    for x, width, what in (
        (1.05, 0.85, "update i"), (1.95, 4.65, "forward and backward of iteration i + 1"),
        (6.65, 0.75, "reduce"), (7.45, 1.35, "update i + 1"),
    ):  # fmt: skip
        drawing.box(Box(x, owner[training] + 0.07, width, 0.28), text=what, color=TRAINING)

    def step(lane: float, x: float, width: float, height: float, title: str, text: str) -> Box:
        return drawing.box(Box(x, lane + 0.06, width, height), title, text, color=RUNS)

    capture = step(owner[hooks], 1.45, 1.4, 0.66, "1 capture", "small values are taken,\nthe plan is chosen")
    slot = step(owner[staging], 1.75, 1.75, 0.56, "2 local slot", "copied and checksummed\nby blocks, then committed")
    chunks = step(owner[sending], 2.1, 1.7, 0.7, "3 chunks", "as the plan cuts them,\neach once it is staged")
    gate = step(owner[sending], 4.0, 1.5, 0.7, "4 gate", "waits until the link is\nidle at both ends")
    kept = step(holder[server], 3.55, 2.4, 0.6, "6 holder", "into its slot, checksums compared,\nthen committed")
    told = step(owner[sending], 5.7, 1.25, 0.7, "7 acknowledged", "only now does\nthe replica count")
    vote = step(owner[hooks], 6.45, 1.15, 0.66, "8 vote", "of all ranks, a\nsmall reduction")
    complete = step(owner[hooks], 7.75, 1.1, 0.66, "9 complete", "i is kept, the\nolder slot is free")

    down(drawing, capture, slot, 2.3)
    down(drawing, slot, chunks, 2.8)
    across(drawing, chunks, gate)
    down(drawing, gate, kept, gate.middle[0])
    drawing.write(gate.middle[0] - 0.08, 3.65, "5 wire", align="right", bold=True)
    drawing.write(gate.middle[0] + 0.08, 3.65, "TCP, low class")
    drawing.line((kept.x + kept.width, kept.middle[1]), (told.middle[0], kept.middle[1]))
    drawing.arrow((told.middle[0], kept.middle[1]), (told.middle[0], told.y + told.height))
    drawing.arrow((6.75, told.y), (6.75, vote.y + vote.height))
    across(drawing, vote, complete)
    drawing.line((slot.x + slot.width, slot.middle[1]), (3.9, slot.middle[1]), dashed=True)
    drawing.write(3.96, slot.middle[1], "the update i + 1 waits for this alone", faint=True)
    return drawing


def down(drawing: Drawing, above: Box, below: Box, x: float) -> None:
    """Draws an arrow from one box straight down to another."""
    drawing.arrow((x, above.y + above.height), (x, below.y))


def across(drawing: Drawing, left: Box, right: Box) -> None:
    """Draws an arrow from one box to its neighbour on the right."""
    drawing.arrow((left.x + left.width, left.middle[1]), (right.x, right.middle[1]))


# --- one failure -------------------------------------------------------------------------------------------------


def draw_failure() -> Drawing:
    """Draws what happens from an injected fault to the first iteration after it."""
    rank, agent, launcher = "rank that\nfails", "its node\nagent", "launcher"
    server, ranks = "fork\nserver", "all ranks"
    drawing = Drawing(4.85)
    what = "One failure on one machine, from an injected fault to the first iteration after it. Time goes to the right."
    drawing.write(0.2, 0.17, what, faint=True)
    heights = ((rank, 0.6), (agent, 0.72), (launcher, 0.72), (server, 0.72), (ranks, 0.82))
    tops = lanes(drawing, heights, 0.33, 1.0)

    def step(lane: str, x: float, width: float, title: str, text: str, color: str = RUNS, height: float = 0.6) -> Box:
        return drawing.box(Box(x, tops[lane] + 0.06, width, height), title, text, color=color)

    fault = step(rank, 1.0, 1.4, "1 fault injected", "at its op, once a run", ALARM, 0.48)
    seen = step(agent, 1.65, 1.5, "2 detected", "the rank has ended, or\ngives no sign of life")
    ends = step(launcher, 2.2, 1.5, "3 attempt ends", "all nodes are told\nthe next one")
    lost = step(server, 2.95, 1.75, "4 lost nodes replaced", "forked with all imported,\nas ranks are by agents")
    left = step(
        ranks, 1.05, 1.85, "3 survivors let go", "end a local copy, shut their\ngroups, keep their process", height=0.7
    )
    words = (
        ("5 ranks meet", "under the name\nof the attempt"), ("6 agree", "on the newest\ncommon iteration"),
        ("7 fetch", "local, peer or\npersistent; verify"), ("8 load", "into the live\nstate"),
        ("9 first iteration", "replicas are made\nagain beside it"),
    )  # fmt: skip
    width, gap = 1.08, 0.08
    met, agreed, fetched, loaded, first = (
        step(ranks, 3.06 + number * (width + gap), width, *each, height=0.7) for number, each in enumerate(words)
    )

    down(drawing, fault, seen, 2.0)
    down(drawing, seen, ends, 2.7)
    down(drawing, ends, lost, 3.3)
    down(drawing, ends, left, 2.55)
    down(drawing, lost, met, 3.6)
    for one, other in ((left, met), (met, agreed), (agreed, fetched), (fetched, loaded), (loaded, first)):
        across(drawing, one, other)
    above, agreed_x, fetched_x = agreed.y - 0.28, agreed.middle[0] + 0.2, fetched.middle[0]
    drawing.line((fetched_x, fetched.y), (fetched_x, above), dashed=True)
    drawing.line((fetched_x, above), (agreed_x, above), dashed=True)
    drawing.arrow((agreed_x, above), (agreed_x, agreed.y), dashed=True)
    drawing.write(fetched_x + 0.08, above, "a damaged copy is discarded, and all agree again", faint=True)

    y = tops[ranks] + 0.82 + 0.12
    drawing.write(0.2, y + 0.1, "recorded as", faint=True)
    ends_at = (1.0, seen.x, met.x + width, *(each.x + width for each in (agreed, fetched, loaded)), first.x + width)
    names = ("detect_s", "restart_s", "agree_s", "fetch_s", "load_s", "first_iteration_s")
    for begin, end, name in zip(ends_at, ends_at[1:], names, strict=False):
        drawing.box(Box(begin + 0.02, y, end - begin - 0.04, 0.2), text=name, color=TELLS)
    return drawing


FIGURES: dict[str, Callable[[], Drawing]] = {
    "rooms": draw_rooms, "checkpoint": draw_checkpoint, "failure": draw_failure,
}  # fmt: skip


def main() -> None:
    """Writes the figures."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    kind = sys.argv[2] if len(sys.argv) > 2 else "svg"
    plt.rcParams |= {"svg.hashsalt": "capricorn"}
    for name, draw in FIGURES.items():
        draw().save(folder / f"{name}.{kind}")


if __name__ == "__main__":
    main()
