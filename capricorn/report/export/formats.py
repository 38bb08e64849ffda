"""Exported comparisons as Markdown, CSV and JSON, each a whole text. LaTeX and HTML are elsewhere; writes no file."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence
from typing import Any

from capricorn.compare.comparison import Comparison
from capricorn.errors import ConfigError
from capricorn.report.export.export_tables import RAW_COLUMNS, caption, columns_of, raw_rows, remarks, title
from capricorn.report.text import LEGEND

_MARKS = re.compile(r"([\\`*|<]|~(?=~)|(?<=])\(|(?<!\w)_|_(?!\w))")
"""What Markdown would not print as it is."""


def as_markdown(comparisons: Sequence[Comparison]) -> str:
    """A section for each comparison: its table, and the runs it came from."""
    sections = "\n".join(map(_markdown_section, comparisons))
    return f"{sections}\n{escaped(LEGEND)}\n"


def _markdown_section(comparison: Comparison) -> str:
    columns = columns_of(comparison)
    head = [escaped(column.head) for column in columns]
    rule = ["---:" if column.is_figure else "---" for column in columns]
    body = [[escaped(column.cell(row)) for column in columns] for row in comparison.rows]
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *body))
    lines = "".join(f"**{escaped(remark)}**\n\n" for remark in remarks(comparison))
    runs = " ".join(f"`{run}`" for run in comparison.runs) or "none"
    return f"## {escaped(title(comparison))}\n\n{escaped(caption(comparison))}\n\n{lines}{table}\n\nRuns: {runs}\n"


def escaped(text: str) -> str:
    """On one line, with what Markdown would take for a mark made plain."""
    return _MARKS.sub(r"\\\1", " ".join(text.split()))


def as_csv(comparisons: Sequence[Comparison]) -> str:
    """One row for each system of each comparison, in full precision; an empty field is not known.

    Raises:
        ConfigError: they are of several modes.
    """
    modes = sorted({comparison.mode for comparison in comparisons})
    if len(modes) > 1:
        raise ConfigError(
            f"CSV is one table, and {' and '.join(modes)} figures never share one: export them one by one, or as json"
        )
    text = io.StringIO()
    writer = csv.DictWriter(text, list(RAW_COLUMNS), lineterminator="\n")
    writer.writeheader()
    for comparison in comparisons:
        writer.writerows(raw_rows(comparison))
    return text.getvalue()


def as_json(comparisons: Sequence[Comparison]) -> str:
    """One object: `{"comparisons": [...]}`, each as `Comparison` has it."""
    whole: dict[str, Any] = {"comparisons": [comparison.model_dump(mode="json") for comparison in comparisons]}
    return json.dumps(whole, indent=2) + "\n"
