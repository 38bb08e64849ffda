"""The formats of exported comparisons: one entry for each. A format is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from capricorn.compare.comparison import Comparison
    from capricorn.report.figures.style import Picture


@dataclass(frozen=True, slots=True)
class ExportFormat:
    """A format that `export` writes."""

    suffix: str
    """Of the files by which `--out` chooses it."""
    target: str
    """`module:function` beside this one; the function makes the whole text of some comparisons."""
    is_page: bool = False
    """Whether it shows the figures too, which its function is given, and is nothing to read in a terminal."""


FORMATS: Final[Mapping[str, ExportFormat]] = MappingProxyType({
    "md": ExportFormat(".md", "markdown:as_markdown"),
    "csv": ExportFormat(".csv", "data_formats:as_csv"),
    "json": ExportFormat(".json", "data_formats:as_json"),
    "latex": ExportFormat(".tex", "latex:as_latex"),
    "html": ExportFormat(".html", "page:as_html", is_page=True),
})  # fmt: skip
BY_SUFFIX: Final[Mapping[str, str]] = MappingProxyType({each.suffix: name for name, each in FORMATS.items()})


def render(name: str, comparisons: Sequence[Comparison], pictures: Sequence[Sequence[Picture]]) -> str:
    """Returns the comparisons in that format; `pictures` are those of each, for a page."""
    module, _, function = FORMATS[name].target.partition(":")
    make = getattr(import_module(f"capricorn.report.export.{module}"), function)
    text: str = make(comparisons, pictures) if FORMATS[name].is_page else make(comparisons)
    return text
