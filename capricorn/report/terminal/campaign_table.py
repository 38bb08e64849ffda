"""What a campaign of faults came to: verdicts of systems x faults, and times of recovery; for a terminal and as
Markdown. Injects and judges nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from string import ascii_lowercase

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from capricorn.campaign.campaign_record import CampaignRecord, Case, must_pass, remark_of, verdict_words
from capricorn.campaign.verdict import VERDICTS, Judgement
from capricorn.records.samples import RECOVERY_PHASES
from capricorn.report.export.markdown import escaped
from capricorn.units import Seconds

NONE = "-"
STYLES = {
    "PASS": "green", "LOST_WORK": "yellow", "SILENT_DIVERGENCE": "bold red", "HARD_FAIL": "red",
    "NOTHING_LEFT": "cyan", "NOT_TRIGGERED": "magenta",
}  # fmt: skip
TIMES_HEAD = ("fault", "system", "n", "median", "worst", *(phase.split("_")[0] for phase in RECOVERY_PHASES))
"""The last phase is the first iteration after the restore; phases are medians."""
LEGEND = (
    "PASS: it went on, every loss and the last state are those of the undisturbed run bit for bit, and no more was "
    "done again than the tier explains. LOST_WORK(n): equal, but in a case up to n finished iterations were done "
    "again. SILENT_DIVERGENCE: it ended well with other losses or another state. HARD_FAIL: it did not end well. "
    "NOTHING_LEFT: it ended early, as it must, since no copy outlived the fault. "
    "NOT_TRIGGERED: the moment of the fault did not come."
)


@dataclass(frozen=True, slots=True)
class CellPart:
    """Some cases of a cell that came to the same."""

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Grid:
    """Verdicts of systems x faults."""

    systems: tuple[str, ...]
    rows: Mapping[str, tuple[tuple[CellPart, ...], ...]]
    """By kind of fault, a cell for each system."""
    notes: tuple[str, ...]
    """What the letters in it stand for."""


@dataclass(frozen=True, slots=True)
class RecoveryTimes:
    """How long the recoveries of a system from one kind of failure took, in seconds."""

    kind: str
    system: str
    num_cases: int
    median_s: Seconds
    worst_s: Seconds
    phases_s: tuple[Seconds, ...]
    """Medians, in the order of RECOVERY_PHASES."""


# --- figures -----------------------------------------------------------------------------------------------------


def grid_of(record: CampaignRecord) -> Grid:
    """The verdicts so far."""
    systems = tuple(variant.label for variant in record.variants)
    kinds = dict.fromkeys([case.fault.kind for case in record.cases] + [each.kind for each in record.not_run])
    letters = dict(zip(dict.fromkeys(each.reason for each in record.not_run), ascii_lowercase, strict=False))
    reasons = {(each.system, each.kind): letters.get(each.reason, "*") for each in record.not_run}
    rows = {}
    for kind in sorted(kinds):
        cells = []
        for system in systems:
            cases = [case for case in record.cases if (case.fault.kind, case.system) == (kind, system)]
            cells.append(_cell(cases) or (CellPart(f"{NONE} {reasons.get((system, kind), '')}".rstrip(), "dim"),))
        rows[kind] = tuple(cells)
    return Grid(systems, rows, tuple(f"{letter}: {reason}" for reason, letter in letters.items()))


def _cell(cases: Sequence[Case]) -> tuple[CellPart, ...]:
    judged = [case.judgement for case in cases if case.judgement is not None]
    parts = [
        CellPart(verdict_words(verdict, each), STYLES[verdict])
        for verdict in VERDICTS
        if (each := [judgement for judgement in judged if judgement.verdict == verdict])
    ]
    left = len(cases) - len(judged)
    return (*parts, CellPart(f"{left} left", "dim")) if left else tuple(parts)


def times_of(record: CampaignRecord) -> dict[str, list[RecoveryTimes]]:
    """By mode: recovery times of each kind and system."""
    groups: dict[tuple[str, str, str], list[Judgement]] = {}
    for case in record.cases:
        if case.judgement is not None and case.judgement.recovery_s is not None:
            key = (case.judgement.mode, case.fault.kind, case.system)
            groups.setdefault(key, []).append(case.judgement)
    times: dict[str, list[RecoveryTimes]] = {}
    for (mode, kind, system), judgements in sorted(groups.items()):
        totals = [each.recovery_s or 0.0 for each in judgements]
        phases = tuple(median(each.phases_s[phase] for each in judgements) for phase in RECOVERY_PHASES)
        times.setdefault(mode, []).append(RecoveryTimes(kind, system, len(totals), median(totals), max(totals), phases))
    return times


def differences_of(record: CampaignRecord) -> list[str]:
    """Runs without a failure that are not what they should be, each in a line."""
    return [f"{run.system} without a failure: {run.difference}" for run in record.undisturbed if run.difference]


# --- a terminal --------------------------------------------------------------------------------------------------


def campaign_tables(record: CampaignRecord, *, caption: bool) -> RenderableType:
    """The verdicts, and the times of recovery of each mode."""
    grid = grid_of(record)
    table = _table("fault", *grid.systems)
    for kind, cells in grid.rows.items():
        table.add_row(kind, *map(_coloured, cells))
    parts: list[RenderableType] = [table, *(Text(note, style="dim") for note in grid.notes)]
    for mode, times in times_of(record).items():
        parts += [Text(), Text(f"recovery, {mode}, in seconds", style="bold"), _times_table(times)]
    return Group(*parts, *([Text(LEGEND, style="dim")] if caption else []))


def case_lines(record: CampaignRecord) -> list[Text]:
    """What is wrong or remarkable, and below each case that did not pass the command that repeats it, to be copied."""
    lines = [Text(remark, style="bold red") for remark in differences_of(record)]
    for case in record.cases:
        if remark := remark_of(case):
            lines += [Text(remark, style="bold red" if must_pass(case) else "yellow"), Text(f"  {case.repro}")]
    return lines


def _coloured(cell: Sequence[CellPart]) -> Text:
    return Text(" ").join(Text(part.text, style=part.style) for part in cell)


def _times_table(times: Sequence[RecoveryTimes]) -> Table:
    table = _table(*TIMES_HEAD)
    for each in times:
        table.add_row(*_times_row(each))
    return table


def _times_row(times: RecoveryTimes) -> tuple[str, ...]:
    seconds = (times.median_s, times.worst_s, *times.phases_s)
    return times.kind, times.system, str(times.num_cases), *(f"{each:.3f}" for each in seconds)


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for number, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=number == 0)
    return table


# --- Markdown ----------------------------------------------------------------------------------------------------


def campaign_markdown(record: CampaignRecord) -> str:
    """Returns the verdicts, times and remarks as a report in Markdown."""
    grid = grid_of(record)
    cells = [[kind, *(" ".join(part.text for part in cell) for cell in row)] for kind, row in grid.rows.items()]
    sections = [
        f"# Campaign {record.campaign_id}",
        escaped(LEGEND),
        markdown_table(["fault", *grid.systems], cells),
        "\n".join(f"- {escaped(note)}" for note in grid.notes),
    ]
    for mode, times in times_of(record).items():
        rows = [_times_row(each) for each in times]
        sections += [f"## Recovery, {mode}, in seconds", markdown_table(TIMES_HEAD, rows)]
    if lines := [line.plain for line in case_lines(record)]:
        sections += ["## Not passed", "\n".join(f"    {line}" for line in lines)]
    return "\n\n".join(filter(None, sections)) + "\n"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Text in the first column, and whatever follows it."""
    lines = [list(map(escaped, head)), ["---"] * len(head), *(list(map(escaped, row)) for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
