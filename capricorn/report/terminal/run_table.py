"""The result of runs, for a terminal of 60 columns or a pipe. Computes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from capricorn.records.samples import RecoverySample, RunRecord
from capricorn.report.terminal.grid import pairs, plain_table
from capricorn.report.text import describe, format_figure, format_percent, format_size, format_time
from capricorn.units import count_noun, format_bytes, format_rate


def run_table(record: RunRecord, recoveries: Sequence[RecoverySample] = ()) -> RenderableType:
    """Shows the result of one run, its recoveries and its verdict."""
    table = pairs()
    for label, value in (*_result_rows(record), *_planning_rows(record.summary), *_fidelity_rows(record)):
        table.add_row(label, value)
    for number, recovery in enumerate(recoveries, 1):
        table.add_row(f"recovery {number}", _recovery(recovery))
    table.add_row("verdict", _verdict(record.verdict))
    for note in notes_of(record):
        table.add_row("note", note)
    return Group(Text(f"{describe(record.config)}, {record.mode}", style="bold"), table)


def repeats_table(records: Sequence[RunRecord]) -> Table:
    """Shows a row for each of several runs of the same scenario."""
    table = plain_table("#", "iteration", "stall", "effective", "tokens/s", "verdict", gap=2)
    for number, record in enumerate(records, 1):
        s = record.summary
        table.add_row(
            str(number), format_time(s["iteration_s_p50"]), format_time(s["stall_s_p50"]),
            f"{s['effective']}/{s['requested']}", format_figure(s["tokens_per_s"], ",.0f"), _verdict(record.verdict),
        )  # fmt: skip
    return table


def notes_of(record: RunRecord) -> Sequence[str]:
    """Returns what is to be known of a run beside its verdict; nothing for records older than notes."""
    notes: Sequence[str] = record.summary.get("notes", ())
    return notes


def _result_rows(record: RunRecord) -> list[tuple[str, str]]:
    s = record.summary
    if not s["iterations"]:
        return []
    lag, most = format_figure(s["replica_lag_p50"], ".3g"), format_figure(s["replica_lag_max"], ".0f")
    return [
        ("iterations", f"{s['iterations']} of {record.config.train.iterations}, {s['measured_iterations']} measured"),
        ("iteration time", f"p50 {format_time(s['iteration_s_p50'])}, p95 {format_time(s['iteration_s_p95'])}"),
        ("stall", f"p50 {format_time(s['stall_s_p50'])}, p95 {format_time(s['stall_s_p95'])}"),
        ("first checkpoint", f"stall {format_time(s['first_stall_s'])}"),
        ("checkpoints", _checkpoints(s)),
        *_persists(s),
        ("replica lag", f"p50 {lag}, max {most}"),
        ("bytes moved", _moved(s)),
        ("memory", f"RSS {format_bytes(s['peak_rss_bytes'])} + store {format_size(s['store_bytes'])}"),
        ("throughput", f"{format_figure(s['tokens_per_s'], ',.0f')} tokens/s"),
        ("final loss", format_figure(s["final_loss"], ".6g")),
    ]


def _planning_rows(s: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns what planning took and hid; nothing where nothing was planned, nor for records older than planning."""
    if not (s.get("planned_bytes_per_iteration") or s.get("profiled_frac")):
        return []
    profiled, accuracy = format_figure(s["profiled_frac"], ".0%"), format_figure(s["partition_accuracy_frac"], ".3g")
    hidden, colliding, overflow = (format_percent(s[f"{fate}_frac"]) for fate in ("hidden", "colliding", "overflow"))
    rows = [
        ("planning", f"profiled {profiled} of iterations, {count_noun(s['replanned'], 'replan')}; "
                     f"took p50 {format_time(s['planning_s_p50'])}, {format_percent(s['planning_frac'])}"),
        ("hidden", f"{hidden} of bytes, colliding {colliding}, overflow {overflow}; accuracy {accuracy}"),
    ]  # fmt: skip
    if s["lower_bound_s"]:
        beyond, idle = format_time(s["lower_bound_s"]), format_time(s["idle_s"])
        rows.append(("lower bound", f"{beyond} an iteration cannot hide in {idle} of idle spans"))
    return rows


def _fidelity_rows(record: RunRecord) -> list[tuple[str, str]]:
    """Returns how faithful the scale model was; nothing for a live run."""
    s, cluster = record.summary, record.config.cluster
    if record.config.emulation is None or not s["paced_ops"]:
        return []
    ours, others = (format_figure(s[f"cpu_{whose}_frac"], ".0%") for whose in ("ours", "others"))
    low_class = " with a low class" if cluster.qos else ""
    return [
        ("rho", f"{s['rho']:.3g} (checkpoint transfer / computing)"),
        ("links", f"{cluster.links}{low_class}, {_links(s)}"),
        ("pacing", f"{s['paced_ops']} ops, off by p50 {format_time(s['pace_error_s_p50'])}, "
                   f"p99 {format_time(s['pace_error_s_p99'])}; {s['overrun_frac']:.1%} too slow"),
        ("CPU", f"{ours} by this run, {others} by others"),
    ]  # fmt: skip


def _links(s: Mapping[str, Any]) -> str:
    if s["link_rate_frac_min"] is None:
        return "not measured"
    low, high = s["link_rate_frac_min"], s["link_rate_frac_max"]
    rate, trip = format_rate(s["link_bytes_per_s"]), format_time(s["round_trip_s_p50"])
    underway = "" if s["buffers_s"] is None else f", a checkpoint has {format_time(s['buffers_s'])} underway"
    return f"{low:.3f}-{high:.3f} of {rate}, round trip {trip}{underway}"


def _checkpoints(s: Mapping[str, Any]) -> str:
    sign = "=" if s["requested"] == s["effective"] else ">"
    failed = f", {s['failed_saves']} saves failed" if s["failed_saves"] else ""
    return f"requested {s['requested']} {sign} effective {s['effective']}{failed}"


def _persists(s: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns what became of checkpoints for the persistent tier; nothing where none were, nor for older records."""
    words = {"persisted": "complete", "skipped_persists": "skipped while busy", "failed_persists": "failed"}
    told = [f"{s[key]} {word}" for key, word in words.items() if s.get(key)]
    missing = (s.get("due_persists") or 0) - sum(s.get(key) or 0 for key in words)
    told += [f"{missing} cut off"] if missing > 0 else []
    return [("persistent tier", ", ".join(told))] if told else []


def _moved(s: Mapping[str, Any]) -> str:
    rate = "" if s["sent_bytes_per_s"] is None else f" ({format_bytes(s['sent_bytes_per_s'])}/s)"
    return f"staged {format_bytes(s['staged_bytes'])}, sent {format_bytes(s['sent_bytes'])}{rate}"


def _recovery(recovery: RecoverySample) -> str:
    phases = ", ".join(
        f"{phase.removesuffix('_s').replace('_', ' ')} {format_time(value)}"
        for phase, value in recovery.phases_s.items()
    )
    sources = ", ".join(sorted(set(recovery.sources))) or "nothing"
    return (
        f"{recovery.what}: back to {recovery.resumed_iteration} from {sources}, lost {recovery.lost_iterations}; "
        f"{format_time(sum(recovery.phases_s.values()))} = {phases}"
    )


def _verdict(verdict: str) -> Text:
    return Text(verdict, style="green" if verdict == "ok" else "bold red")
