"""Exported comparisons as one page that needs nothing beside it: tables, verdicts and figures. Writes no file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

import capricorn
from capricorn.compare.comparison import Comparison
from capricorn.report.columns import NOTES, columns_of
from capricorn.report.figures.style import Picture, inline_svg
from capricorn.report.text import LEGEND, caption, remarks, slugs, title

TEMPLATE = "page.html"


def as_html(comparisons: Sequence[Comparison], pictures: Sequence[Sequence[Picture]]) -> str:
    """Returns the page of these comparisons, each with its pictures; it loads nothing and runs no script."""
    source = resources.files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    names = slugs(comparisons)
    sections = [_section(*each) for each in zip(comparisons, names, pictures, strict=True)]
    modes = sorted({comparison.mode for comparison in comparisons})
    return environment.from_string(source).render(
        sections=sections, modes=modes, legend=LEGEND, version=capricorn.__version__, notes=NOTES
    )


def _section(comparison: Comparison, name: str, pictures: Sequence[Picture]) -> dict[str, Any]:
    return {
        "id": name,
        "title": title(comparison),
        "caption": caption(comparison),
        "comparison": comparison,
        "columns": columns_of(comparison),
        "remarks": remarks(comparison),
        "figures": [_figure(picture, name) for picture in pictures],
    }


def _figure(picture: Picture, name: str) -> Mapping[str, Any]:
    prefix = f"{name}-{picture.name}"
    # Its text is escaped where it is drawn and where its label is added.
    return {"id": prefix, "picture": picture, "svg": Markup(inline_svg(picture, prefix))}
