"""What failures at random times cost each system: measured from the samples of its run, and put beside the formulas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from capricorn.campaign.economics import Economics, MeasuredEconomics, expected_ettr, wasted_s
from capricorn.campaign.verdict import PHASES, Outcome
from capricorn.errors import CapricornError
from capricorn.records.samples import IterationSample, RecoverySample
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


# --- measuring ---------------------------------------------------------------------------------------------------


def mean_iteration_s(samples: Sequence[IterationSample], warmup: int) -> Seconds:
    """Time from the end of one iteration to the end of the next on the slowest rank, all that comes between included.

    Raises:
        CapricornError: fewer than two iterations were recorded after warm-up.
    """
    ends = _ends(sample for sample in samples if sample.iteration > warmup)
    if len(ends) < 2:
        raise CapricornError("the run without checkpoints and failures has too few iterations to be timed; use more")
    first, last = min(ends), max(ends)
    return (ends[last] - ends[first]) / (last - first)


def mean_stall_s(samples: Iterable[IterationSample]) -> Seconds:
    """How long an iteration waits for checkpoints on the slowest rank, where one is made in each."""
    stalls: dict[int, Seconds] = {}
    for sample in samples:
        if sample.requested:
            stalls[sample.iteration] = max(stalls.get(sample.iteration, 0.0), sample.stall_s)
    return fmean(stalls.values()) if stalls else 0.0


def mean_complete_s(samples: Sequence[IterationSample]) -> Seconds:
    """From the end of an iteration until the end of the one in which its checkpoint was complete everywhere."""
    ends = _ends(samples)
    seen: dict[int, Seconds] = {}
    for sample in samples:
        for iteration in sample.completed:
            seen[iteration] = min(seen.get(iteration, sample.at_s), sample.at_s)
    delays = [max(0.0, at_s - ends[iteration]) for iteration, at_s in seen.items() if iteration in ends]
    return fmean(delays) if delays else 0.0


def measured(
    planned: MeasuredEconomics, outcome: Outcome, *, iteration_s: Seconds, num_iterations: int, mtbf_s: Seconds
) -> MeasuredEconomics:
    """The system with what its run under the schedule came to."""
    facts = {"run_id": outcome.run_id, "failure": outcome.failure, "iteration_s": iteration_s}
    if outcome.failure:
        return planned.model_copy(update=facts)
    begin_s = max(e.at_s for e in outcome.events if e.event == "ready" and e.attempt == 0)
    wall_s = max(sample.at_s for sample in outcome.samples) - begin_s
    recovery_s = sum(map(_way_back_s, outcome.recoveries))
    redone = _redone(outcome.samples)
    redone_s = sum(redone) + sum(_broken_off_s(each, outcome, begin_s) for each in outcome.recoveries)
    useful_s = num_iterations * iteration_s
    mean_recovery_s = recovery_s / len(outcome.recoveries) if outcome.recoveries else 0.0
    interval_s = planned.every * iteration_s
    return planned.model_copy(
        update=facts
        | {
            "wall_s": wall_s,
            "num_failures": sum(event.event == "fault" for event in outcome.events),
            "redone_iterations": len(redone),
            "redone_s": redone_s,
            "recovery_s": recovery_s,
            "checkpointing_s": wall_s - useful_s - redone_s - recovery_s,
            "ettr": useful_s / wall_s,
            "predicted_ettr": expected_ettr(interval_s, planned.checkpoint_s, mean_recovery_s, mtbf_s),
            "predicted_wasted_s": wasted_s(min(planned.complete_s, interval_s), interval_s, mean_recovery_s),
        }
    )


def _ends(samples: Iterable[IterationSample]) -> dict[int, Seconds]:
    """By iteration: when the last rank was through with it."""
    ends: dict[int, Seconds] = {}
    for sample in samples:
        ends[sample.iteration] = max(ends.get(sample.iteration, 0.0), sample.at_s)
    return ends


def _way_back_s(recovery: RecoverySample) -> Seconds:
    """From the failure until the state was restored."""
    total: Seconds = sum(getattr(recovery, phase) or 0.0 for phase in PHASES[:-1])
    return total


def _redone(samples: Iterable[IterationSample]) -> list[Seconds]:
    """Of each finished iteration that did not last: how long it took on the slowest rank."""
    took: dict[tuple[int, int], Seconds] = {}
    for sample in samples:
        key = (sample.iteration, sample.attempt)
        took[key] = max(took.get(key, 0.0), sample.duration_s)
    newest = dict(sorted(took))
    return [duration_s for (iteration, attempt), duration_s in took.items() if attempt != newest[iteration]]


def _broken_off_s(recovery: RecoverySample, outcome: Outcome, begin_s: Seconds) -> Seconds:
    """What had been done of the iteration that the failure struck."""
    struck_s = recovery.detected_at_s - recovery.detect_s
    ends = [sample.at_s for sample in outcome.samples if sample.at_s <= struck_s]
    starts = [e.at_s for e in outcome.events if e.event in ("ready", "resumed") and e.at_s <= struck_s]
    return struck_s - max([*ends, *starts, begin_s], default=struck_s) if struck_s > begin_s else 0.0


# --- showing -----------------------------------------------------------------------------------------------------


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
    """The same as a section of a report."""
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
