"""A comparison of planning policies, trained or replayed: their rows, and one table of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from capricorn.compare.paired_ratio import RESAMPLES, Interval, interval_of
from capricorn.config.fields import FrozenModel
from capricorn.config.planner import PlannerConfig
from capricorn.records.samples import Mode, RunRecord
from capricorn.report.terminal.grid import plain_table
from capricorn.report.text import NONE, format_figure, format_percents

if TYPE_CHECKING:
    from capricorn.simulate.replay import ReplayOutcome


class Row(FrozenModel):
    """One policy at one rho; None is not known."""

    spans: str
    replan: str
    gate: bool
    rho: float | None
    slowdown: float | None
    slowdown_ci: Interval | None = None
    profiled_frac: float | None = None
    """The share of iterations that were profiled."""
    accuracy_frac: float | None = None
    """The share of the bytes planned into idle spans that left in them."""
    collision_frac: float | None = None
    """The delay of communication, as a share of the time without checkpoints."""
    overflow_frac: float | None = None
    """The time in which updates waited for what was left, as a share of the time without checkpoints."""
    runs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ablation:
    """The result of a comparison of policies."""

    mode: Mode
    rows: tuple[Row, ...]
    caption: str
    references: Mapping[float, Mapping[str, float]] = field(default_factory=dict)
    """Slowdowns to compare with, by rho and name."""
    faults: tuple[str, ...] = ()
    """Faults of its runs."""
    runs: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Returns the ablation as machines read it."""
        references = [
            {"name": name, "rho": rho, "slowdown": slowdown}
            for rho, each in self.references.items()
            for name, slowdown in each.items()
        ]
        rows = [row.model_dump(mode="json") for row in self.rows]
        faults = {"faults": list(self.faults), "runs": list(self.runs)} if self.runs else {}
        return {"mode": self.mode, "rows": rows, "references": references} | faults


def simulated(policy: PlannerConfig, rho: float, outcome: ReplayOutcome) -> Row:
    """Returns the row of a replay."""
    return Row(
        **_named(policy),
        rho=rho,
        slowdown=outcome.slowdown,
        profiled_frac=outcome.profiled_frac,
        accuracy_frac=outcome.accuracy_frac,
        collision_frac=outcome.collision_s / outcome.base_s,
        overflow_frac=outcome.overflow_s / outcome.base_s,
    )


def compared(policy: PlannerConfig, records: Sequence[RunRecord | None], base: Sequence[RunRecord | None]) -> Row:
    """Returns the row of a policy's runs, each paired with the run without checkpoints of the same repeat.

    Both are by repeat, None where a run has no record; one may be longer, if the comparison was cut short. No figure
    counts of a run whose verdict is not ok.
    """
    ratios = [
        ours / theirs
        for one, other in zip(records, base, strict=False)
        if (ours := _iteration_s(one)) and (theirs := _iteration_s(other))
    ]
    there = [record for record in records if record is not None]
    summaries = [record.summary for record in there if record.verdict == "ok"]
    return Row(
        **_named(policy),
        rho=_mean("rho", [record.summary for record in there]),
        slowdown=float(np.exp(np.log(ratios).mean())) if ratios else None,
        slowdown_ci=bootstrap(ratios),
        profiled_frac=_mean("profiled_frac", summaries),
        accuracy_frac=_mean("partition_accuracy_frac", summaries),
        runs=tuple(record.run_id for record in there),
    )


def _iteration_s(record: RunRecord | None) -> float | None:
    """Returns the median iteration of a run that went well."""
    return record.summary["iteration_s_p50"] if record is not None and record.verdict == "ok" else None


def bootstrap(ratios: Sequence[float]) -> Interval | None:
    """Returns the interval that holds the geometric mean of such ratios; None for less than two.

    Source: Efron, "Bootstrap methods: another look at the jackknife" (1979); the percentile interval.
    """
    if len(ratios) < 2:
        return None
    logs = np.log(ratios)
    means = np.random.default_rng(0).choice(logs, (RESAMPLES, len(logs))).mean(1)
    return interval_of(means)


def _named(policy: PlannerConfig) -> dict[str, Any]:
    return {"spans": policy.spans, "replan": policy.replan, "gate": policy.gate}


def _mean(key: str, summaries: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns the mean of a figure over the runs that have it."""
    values = [value for summary in summaries if (value := summary.get(key)) is not None]
    return float(np.mean(values)) if values else None


# --- table -------------------------------------------------------------------------------------------------------


def ablation_table(ablation: Ablation, *, caption: bool = True) -> RenderableType:
    """Shows a row for each policy, with its slowdown at each rho; then the references, and what is wrong."""
    by_rho: dict[float | None, dict[str, Row]] = {}
    for row in ablation.rows:
        by_rho.setdefault(row.rho, {})[_key(row)] = row
    table = plain_table()
    for column in ("spans", "replan", "gate"):
        table.add_column(column, no_wrap=True)
    for rho in by_rho or [None]:
        table.add_column("slowdown" if rho is None else f"rho {rho:.3g}", justify="right", no_wrap=True)
    for column in ("profiled", "accuracy"):
        table.add_column(column, justify="right", no_wrap=True)
    for key, row in {_key(row): row for row in ablation.rows}.items():
        rows = [each.get(key) for each in by_rho.values()]
        spread = (format_percents(getattr(r, name) for r in rows if r) for name in ("profiled_frac", "accuracy_frac"))
        table.add_row(row.spans, row.replan, "on" if row.gate else "off", *map(_slowdown, rows), *spread)
    for name in next(iter(ablation.references.values()), {}):
        cells = [format_figure(ablation.references.get(rho or 0.0, {}).get(name), ".3f") for rho in by_rho]
        table.add_row(Text(name, style="dim"), "", "", *cells)
    faults = [Text(fault, style="bold red") for fault in ablation.faults]
    return Group(table, *([Text(ablation.caption, style="dim")] if caption else []), *faults)


def _key(row: Row) -> str:
    return f"{row.spans} {row.replan} {row.gate}"


def _slowdown(row: Row | None) -> str:
    if row is None:
        return NONE
    interval = "" if row.slowdown_ci is None else f" [{row.slowdown_ci[0]:.3f}, {row.slowdown_ci[1]:.3f}]"
    return format_figure(row.slowdown, ".3f") + interval
