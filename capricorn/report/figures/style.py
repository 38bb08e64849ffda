"""The style of exported figures, and how they become files: one colour for each system, the same bytes for the same
data. Knows no run and no comparison.
"""

from __future__ import annotations

import html
import io
import re
import textwrap
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from capricorn.systems.registry import SYSTEMS
from capricorn.units import Seconds

SVG, PDF, PNG = "svg", "pdf", "png"
FORMATS = (SVG, PDF, PNG)

WIDTH_IN = 6.4
"""Width of every figure: 640 px where an inch has 100."""
PAD_IN = 0.08
"""Margin around the axes and what belongs to them."""
PNG_DPI = 200
LABEL_CHARS = 26
"""Most characters of a system's name on a line."""

SPARE = ("#44aa99", "#aa4499", "#ddcc77", "#117733")
"""Colours of systems that have none of their own."""

INK, FAINT = "#1c2128", "#c9ced6"
"""Colours of text and axes, and of lines that only guide the eye; no system's, so that a page can replace them."""

_STYLE: Any = {
    "font.size": 9.5, "axes.titlesize": 9.5, "axes.labelsize": 9.5, "xtick.labelsize": 9, "ytick.labelsize": 9,
    "legend.fontsize": 9, "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"],
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.8, "axes.axisbelow": True,
    "grid.color": FAINT, "grid.linewidth": 0.6, "hatch.linewidth": 0.6, "legend.frameon": False,
    "text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "capricorn", "pdf.fonttype": 42,
    "figure.facecolor": "white", "axes.facecolor": "none", "savefig.facecolor": "white",
}  # fmt: skip
_METADATA: dict[str, dict[str, Any]] = {
    SVG: dict.fromkeys(("Date", "Creator", "Format", "Type")),
    PDF: {"CreationDate": None},
    PNG: {"Software": None},
}
"""Metadata of files, without what differs from one drawing of the same data to the next."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure with the words that go with it."""

    name: str
    title: str
    caption: str
    """The text below it: what is seen, with the mode, and how it was computed."""
    alt: str
    """The text for who cannot see it, with the figures."""
    runs: tuple[str, ...]
    """Ids of the runs whose samples it shows."""
    figure: Figure


@contextmanager
def styled() -> Iterator[None]:
    """Makes figures that are drawn and saved within look as ours do, whatever the user's own settings."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        yield


def colour(system: str) -> str:
    """Returns the colour of a system, the same in every figure."""
    entry = SYSTEMS.get(system)
    return (entry.colour if entry else "") or SPARE[zlib.crc32(system.encode()) % len(SPARE)]


def wrapped(label: str) -> str:
    """Returns the name of a system on short lines, its settings below it."""
    system, _, settings = label.partition(":")
    parts = (system, *settings.split(":"))
    return "\n".join(line for part in parts for line in textwrap.wrap(part, LABEL_CHARS, break_on_hyphens=False))


class TimeUnit(NamedTuple):
    """A unit in which an axis of times has short figures."""

    name: str
    seconds: Seconds

    @classmethod
    def of(cls, longest_s: Seconds) -> TimeUnit:
        return cls("s", 1.0) if longest_s >= 1 else cls("ms", 1e-3)


def new_axes(height_in: float) -> tuple[Figure, Axes]:
    """Returns a figure of the common width with one pair of axes; labels and legends around them are given room."""
    engine = ConstrainedLayoutEngine(w_pad=PAD_IN, h_pad=PAD_IN)
    figure = Figure(figsize=(WIDTH_IN, height_in), layout=engine)
    return figure, figure.add_subplot()


def rows_axes(labels: list[str]) -> tuple[Figure, Axes]:
    """Returns axes with a row for each system, from above downwards, at 0, 1, ..."""
    num_lines = max(1 + wrapped(label).count("\n") for label in labels)
    figure, axes = new_axes(0.75 + len(labels) * max(0.4, 0.08 + 0.17 * num_lines))
    axes.set_yticks(range(len(labels)), [wrapped(label) for label in labels])
    axes.set_ylim(len(labels) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    return figure, axes


def note_row(axes: Axes, row: int, text: str) -> None:
    """Writes what is drawn in a row to the right of it."""
    place = axes.get_yaxis_transform()
    axes.text(1.02, row, text, transform=place, va="center", ha="left", fontsize=9)


def settle(figure: Figure) -> None:
    """Lays the figure out for good: done anew for each file, it would differ from one to the next."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


def encode(figure: Figure, kind: str) -> bytes:
    """Returns the figure as a file of that format; the same bytes for the same figure."""
    buffer = io.BytesIO()
    with styled():
        figure.savefig(buffer, format=kind, dpi=PNG_DPI if kind == PNG else "figure", metadata=_METADATA[kind])
    return buffer.getvalue()


def inline_svg(picture: Picture, prefix: str) -> str:
    """Returns the picture as an element of a page, with ids of its own; its ink is that of the text around it."""
    with styled():
        buffer = io.StringIO()
        picture.figure.savefig(buffer, format=SVG, metadata=_METADATA[SVG], transparent=True)
    text = buffer.getvalue()
    svg = text[text.index("<svg") :].replace(INK, "currentColor").replace(FAINT, "var(--faint)")
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    label = html.escape(f"{picture.title}. {picture.alt}", quote=True)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
