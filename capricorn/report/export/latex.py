"""Exported comparisons as LaTeX tables, to be read in by a document. Knows no figure and writes no file."""

from __future__ import annotations

import re
from collections.abc import Sequence

from capricorn.compare.comparison import Comparison, ComparisonRow
from capricorn.report.columns import COLUMNS, Column
from capricorn.report.text import DIFFERS_NOT, LEGEND, NO_DIFFERENCE, caption, remarks, slugs, title

MAX_RUNS = 6
"""Most runs that a caption names; of more it says how many."""

_ESCAPES = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "%": r"\%", "#": r"\#", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': "''", "--": "-{}-",
}  # fmt: skip
_SPECIAL = re.compile("|".join(map(re.escape, sorted(_ESCAPES, key=len, reverse=True))))
_PREAMBLE = "% By capricorn-bench export. The preamble needs \\usepackage{booktabs} and \\usepackage{graphicx}.\n"
_DAGGER = r"$^{\dagger}$"


def escaped(text: str) -> str:
    """Returns the text on one line, so that LaTeX prints it literally; what pdflatex has no glyph for becomes a `?`."""
    plain = "".join(char if _has_glyph(char) else "?" for char in " ".join(text.split()))
    return _SPECIAL.sub(lambda found: _ESCAPES[found[0]], plain)


def _has_glyph(char: str) -> bool:
    return (char.isprintable() and ord(char) < 0x180) or char in "–—‘’“”…"


def as_latex(comparisons: Sequence[Comparison]) -> str:
    """Returns a floating table for each comparison, never wider than the text; needs booktabs and graphicx."""
    tables = [_table(comparison, slug) for comparison, slug in zip(comparisons, slugs(comparisons), strict=True)]
    return _PREAMBLE + "\n".join(tables)


def _table(comparison: Comparison, slug: str) -> str:
    marks = _marks(comparison.rows)
    body = "\n".join(f"    {_cells(row, marks)} \\\\" for row in comparison.rows)
    lines = _below(comparison, marks, has_dagger=_DAGGER in body)
    below = "".join(f"  \\par\\smallskip\\footnotesize\\raggedright {line}\n" for line in lines)
    return rf"""\begin{{table*}}[tbp]
  \centering
  \caption{{{escaped(f"{title(comparison)}. {caption(comparison)} {_runs(comparison.runs)}")}}}
  \label{{tab:{slug}}}
  \setlength{{\tabcolsep}}{{4pt}}
  \resizebox{{\ifdim\width>\textwidth\textwidth\else\width\fi}}{{!}}{{%
  \begin{{tabular}}{{{"".join(map(_side, COLUMNS))}}}
    \toprule
    {" & ".join(map(_head, COLUMNS))} \\
    \midrule
{body}
    \bottomrule
  \end{{tabular}}}}
{below}\end{{table*}}
"""


def _side(column: Column) -> str:
    return "r" if column.is_figure else "l"


def _head(column: Column) -> str:
    """Returns a head of two lines, as a table of its own."""
    lines = r" \\ ".join(f"{{{escaped(line)}}}" for line in column.head.split("\n"))
    return rf"\begin{{tabular}}[b]{{@{{}}{_side(column)}@{{}}}}{lines}\end{{tabular}}"


def _cells(row: ComparisonRow, marks: dict[str, str]) -> str:
    figures = (_cell(column.cell(row)) for column in COLUMNS[1:])
    signs = ",".join(marks[note] for note in _notes(row))
    # Braces, for a row that begins with a bracket or a star would be taken for an option of the row before.
    return " & ".join([f"{{{escaped(row.system)}}}" + (f"$^{{{signs}}}$" if signs else ""), *figures])


def _cell(text: str) -> str:
    value = escaped(text.removesuffix(DIFFERS_NOT)) + (_DAGGER if text.endswith(DIFFERS_NOT) else "")
    return re.sub(r"(?<=\d) us\b", r"~$\\mu$s", value)


def _notes(row: ComparisonRow) -> list[str]:
    """Returns the notes of a row, after the settings in its label, which would make the table too wide."""
    return list(dict.fromkeys([*row.label.split(":")[1:], *row.notes]))


def _marks(rows: Sequence[ComparisonRow]) -> dict[str, str]:
    """Returns the number of each note."""
    notes = dict.fromkeys(note for row in rows for note in _notes(row))
    return {note: str(number) for number, note in enumerate(notes, 1)}


def _below(comparison: Comparison, marks: dict[str, str], *, has_dagger: bool) -> list[str]:
    """Returns the paragraphs under a table: what is wrong with it, what its marks stand for, how it is read."""
    faults = [rf"\textbf{{{escaped(remark)}}}" for remark in remarks(comparison)]
    notes = [f"$^{{{sign}}}$~{escaped(note)}" for note, sign in marks.items()]
    if has_dagger:
        notes.append(f"{_DAGGER}~{NO_DIFFERENCE}: the interval holds 1")
    return [*faults, *([r"\quad ".join(notes)] if notes else []), escaped(LEGEND)]


def _runs(runs: Sequence[str]) -> str:
    if len(runs) <= MAX_RUNS:
        return f"Runs: {', '.join(runs) or 'none'}."
    return f"{len(runs)} runs, {runs[0]} to {runs[-1]}; the JSON, CSV and HTML exports name them all."
