"""What failures at random times cost each system, as measured and by the formulas: for a terminal and as Markdown."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from capricorn.campaign.economics import Economics, MeasuredEconomics
from capricorn.report.export.markdown import escaped
from capricorn.report.terminal.campaign_table import NONE, markdown_table
from capricorn.units import Seconds, format_seconds

HEAD = (
    "system", "every", "n", "wall", "ETTR", "formula", "ckpt", "redone", "recovery", "each", "formula",
)  # fmt: skip
LEGEND = (
    "ETTR: time of the iterations without checkpoints and failures / time that training took; its formula, with "
    "interval, blocking time and mean recovery as measured: (1 - (tau/2 + R)/M) / (1 + delta/tau). n: failures. "
    "Wasted: ckpt, stalls and slower iterations; redone, iterations done again; recovery. Each: redone and recovery of "
    "a failure; its formula, Gemini's: t_ckpt + 1/(2f) + t_retrieve."
)


def economics_table(economics: Economics, *, caption: bool) -> RenderableType:
    """Measured beside predicted, one row a system."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for column in HEAD:
        table.add_column(column, overflow="fold")
    for row in economics.rows:
        table.add_row(*_cells(row))
    failures = [Text(f"{row.system} did not come to its end: {row.failure}", style="bold red")
                for row in economics.rows if row.failure]  # fmt: skip
    below = [Text(LEGEND, style="dim")] if caption else []
    return Group(Text(_title(economics), style="bold"), table, *failures, *below)


def economics_markdown(economics: Economics) -> str:
    """Returns what was measured beside what was predicted as a section of a report."""
    rows = [_cells(row) for row in economics.rows]
    parts = [f"## {escaped(_title(economics))}", escaped(LEGEND), markdown_table(HEAD, rows)]
    parts += [f"- {escaped(f'{row.system}: {row.failure}')}" for row in economics.rows if row.failure]
    return "\n\n".join(parts) + "\n"


def _title(economics: Economics) -> str:
    mode = economics.rows[0].mode if economics.rows else ""
    iteration = "" if economics.iteration_s is None else f", iterations of {format_seconds(economics.iteration_s)}"
    what = f"{len(economics.schedule)} failures, MTBF {format_seconds(economics.mtbf_s)}{iteration}; all in seconds"
    return f"{mode}: {what}" if mode else what


def _cells(row: MeasuredEconomics) -> tuple[str, ...]:
    if row.ettr is None:
        return row.system, str(row.every), *[NONE] * (len(HEAD) - 2)
    a_failure_s = (row.redone_s + row.recovery_s) / row.num_failures if row.num_failures else None
    wasted = (row.checkpointing_s, row.redone_s, row.recovery_s, a_failure_s, row.predicted_wasted_s)
    return (
        row.system, str(row.every), str(row.num_failures), f"{row.wall_s:.1f}", f"{row.ettr:.3f}",
        NONE if row.predicted_ettr is None else f"{row.predicted_ettr:.3f}", *map(_seconds, wasted),
    )  # fmt: skip


def _seconds(value: Seconds | None) -> str:
    return NONE if value is None else f"{value:.2f}"
