"""Exported comparisons as Markdown, and what other reports in Markdown need. Writes no file."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from capricorn.compare.comparison import Comparison
from capricorn.report.columns import columns_of
from capricorn.report.text import LEGEND, caption, remarks, title

_MARKS = re.compile(r"([\\`*|<]|~(?=~)|(?<=])\(|(?<!\w)_|_(?!\w))")
"""Characters that Markdown would not print as they are."""


def as_markdown(comparisons: Sequence[Comparison]) -> str:
    """Returns a section for each comparison: its table, and the runs it came from."""
    sections = "\n".join(map(_section, comparisons))
    return f"{sections}\n{escaped(LEGEND)}\n"


def _section(comparison: Comparison) -> str:
    columns = columns_of(comparison)
    table = markdown_table(
        [column.head for column in columns],
        [[column.cell(row) for column in columns] for row in comparison.rows],
        figures=[number for number, column in enumerate(columns) if column.is_figure],
    )
    lines = "".join(f"**{escaped(remark)}**\n\n" for remark in remarks(comparison))
    runs = " ".join(f"`{run}`" for run in comparison.runs) or "none"
    return f"## {escaped(title(comparison))}\n\n{escaped(caption(comparison))}\n\n{lines}{table}\n\nRuns: {runs}\n"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], *, figures: Collection[int] = ()) -> str:
    """Returns a table; the columns of these numbers, from 0, hold figures and are aligned to the right."""
    rule = ["---:" if number in figures else "---" for number in range(len(head))]
    lines = [list(map(escaped, head)), rule, *(list(map(escaped, row)) for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def escaped(text: str) -> str:
    """Returns the text on one line, with what Markdown would take for a mark made plain."""
    return _MARKS.sub(r"\\\1", " ".join(text.split()))
