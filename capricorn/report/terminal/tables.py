"""Records, needs, checks, names and copies as small tables for a terminal of 60 columns or a pipe. Computes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from capricorn.config.cluster import Times
from capricorn.config.scenario import Scenario
from capricorn.records.samples import RecoverySample, RunRecord
from capricorn.sizing.memory import Needs, num_moe_layers, total_params
from capricorn.sizing.workload import link_of
from capricorn.units import Seconds, count_noun, format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from capricorn.launch.preflight import Check
    from capricorn.systems.interface import Copy

NONE = "-"
PARTS = {"compute": "computing", "all_to_all": "all-to-all", "reduce": "reduce", "checkpoint": "checkpoint"}
PHASES = ("detect", "restart", "agree", "fetch", "load", "first_iteration")


def describe(scenario: Scenario) -> str:
    """What runs where, in one line."""
    system = scenario.system
    every = {0: "off", 1: "every iteration"}.get(system.every, f"every {system.every} iterations")
    ckpt = "" if system.name == "none" else f" {every}"
    return f"{scenario.model.name} under {system.name}{ckpt}, {scenario.cluster.describe()}"


# --- a run -------------------------------------------------------------------------------------------------------


def run_table(record: RunRecord, recoveries: Sequence[RecoverySample] = ()) -> RenderableType:
    """The result of one run, its recoveries and its verdict."""
    table = _pairs()
    for label, value in (*_result_rows(record), *_planning_rows(record.summary), *_fidelity_rows(record)):
        table.add_row(label, value)
    for number, recovery in enumerate(recoveries, 1):
        table.add_row(f"recovery {number}", _recovery(recovery))
    table.add_row("verdict", _verdict(record.verdict))
    return Group(Text(f"{describe(record.config)}, {record.mode}", style="bold"), table)


def repeats_table(records: Sequence[RunRecord]) -> Table:
    """One row for each of several runs of the same scenario."""
    table = _table("#", "iteration", "stall", "effective", "tokens/s", "verdict")
    for number, record in enumerate(records, 1):
        s = record.summary
        table.add_row(
            str(number), _seconds(s["iteration_s_p50"]), _seconds(s["stall_s_p50"]),
            f"{s['effective']}/{s['requested']}", _figure(s["tokens_per_s"], ",.0f"), _verdict(record.verdict),
        )  # fmt: skip
    return table


def _result_rows(record: RunRecord) -> list[tuple[str, str]]:
    s = record.summary
    if not s["iterations"]:
        return []
    return [
        ("iterations", f"{s['iterations']} of {record.config.train.iterations}, {s['measured_iterations']} measured"),
        ("iteration time", f"p50 {_seconds(s['iteration_s_p50'])}, p95 {_seconds(s['iteration_s_p95'])}"),
        ("stall", f"p50 {_seconds(s['stall_s_p50'])}, p95 {_seconds(s['stall_s_p95'])}"),
        ("first checkpoint", f"stall {_seconds(s['first_stall_s'])}"),
        ("checkpoints", _checkpoints(s)),
        *_persists(s),
        ("replica lag", f"p50 {_figure(s['replica_lag_p50'], '.3g')}, max {_figure(s['replica_lag_max'], '.0f')}"),
        ("bytes moved", _moved(s)),
        ("memory", f"RSS {format_bytes(s['peak_rss_bytes'])} + store {_bytes(s['store_bytes'])}"),
        ("throughput", f"{_figure(s['tokens_per_s'], ',.0f')} tokens/s"),
        ("final loss", _figure(s["final_loss"], ".6g")),
    ]


def _planning_rows(s: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What planning took and what it hid; none where nothing was planned, nor for records older than planning."""
    if not (s.get("planned_bytes_per_iteration") or s.get("profiled_frac")):
        return []
    rows = [
        ("planning", f"profiled {_percent(s['profiled_frac'])} of iterations, {count_noun(s['replanned'], 'replan')}; "
                     f"took p50 {_seconds(s['planning_s_p50'])}, {_fine(s['planning_frac'])}"),
        ("hidden", f"{_fine(s['hidden_frac'])} of bytes, colliding {_fine(s['colliding_frac'])}, overflow "
                   f"{_fine(s['overflow_frac'])}; accuracy {_figure(s['partition_accuracy_frac'], '.3g')}"),
    ]  # fmt: skip
    if s["lower_bound_s"]:
        beyond, idle = _seconds(s["lower_bound_s"]), _seconds(s["idle_s"])
        rows.append(("lower bound", f"{beyond} an iteration cannot hide in {idle} of idle spans"))
    return rows


def _fidelity_rows(record: RunRecord) -> list[tuple[str, str]]:
    """How faithful the scale model was; none for a live run."""
    s, cluster = record.summary, record.config.cluster
    if record.config.emulation is None or not s["paced_ops"]:
        return []
    low_class = " with a low class" if cluster.qos else ""
    return [
        ("rho", f"{s['rho']:.3g} (checkpoint transfer / computing)"),
        ("links", f"{cluster.links}{low_class}, {_links(s)}"),
        ("pacing", f"{s['paced_ops']} ops, off by p50 {_seconds(s['pace_error_s_p50'])}, "
                   f"p99 {_seconds(s['pace_error_s_p99'])}; {s['overrun_frac']:.1%} too slow"),
        ("CPU", f"{_percent(s['cpu_ours_frac'])} by this run, {_percent(s['cpu_others_frac'])} by others"),
    ]  # fmt: skip


def _links(s: Mapping[str, Any]) -> str:
    if s["link_rate_frac_min"] is None:
        return "not measured"
    low, high = s["link_rate_frac_min"], s["link_rate_frac_max"]
    rate, trip = format_rate(s["link_bytes_per_s"]), _seconds(s["round_trip_s_p50"])
    underway = "" if s["buffers_s"] is None else f", a checkpoint has {_seconds(s['buffers_s'])} underway"
    return f"{low:.3f}-{high:.3f} of {rate}, round trip {trip}{underway}"


def _percent(frac: float | None) -> str:
    return NONE if frac is None else f"{frac:.0%}"


def _fine(frac: float | None) -> str:
    """A part that may be near nothing or near all of it: `99.93%`, `0.07%`."""
    return NONE if frac is None else f"{round(100 * frac, 2):g}%"


def _checkpoints(s: Mapping[str, Any]) -> str:
    sign = "=" if s["requested"] == s["effective"] else ">"
    failed = f", {s['failed_saves']} saves failed" if s["failed_saves"] else ""
    return f"requested {s['requested']} {sign} effective {s['effective']}{failed}"


def _persists(s: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What became of checkpoints that were to go to disk; none where none were, nor for records older than that."""
    words = {"persisted": "complete", "skipped_persists": "skipped while busy", "failed_persists": "failed"}
    told = [f"{s[key]} {word}" for key, word in words.items() if s.get(key)]
    return [("on disk", ", ".join(told))] if told else []


def _moved(s: Mapping[str, Any]) -> str:
    rate = "" if s["sent_bytes_per_s"] is None else f" ({format_bytes(s['sent_bytes_per_s'])}/s)"
    return f"staged {format_bytes(s['staged_bytes'])}, sent {format_bytes(s['sent_bytes'])}{rate}"


def _recovery(recovery: RecoverySample) -> str:
    durations = {phase: float(getattr(recovery, f"{phase}_s") or 0.0) for phase in PHASES}
    phases = ", ".join(f"{phase.replace('_', ' ')} {_seconds(value)}" for phase, value in durations.items())
    sources = ", ".join(sorted(set(recovery.sources))) or "nothing"
    return (
        f"{recovery.what}: back to {recovery.resumed_iteration} from {sources}, lost {recovery.lost_iterations}; "
        f"{_seconds(sum(durations.values()))} = {phases}"
    )


def _verdict(verdict: str) -> Text:
    return Text(verdict, style="green" if verdict == "ok" else "bold red")


# --- needs, checks, names, copies --------------------------------------------------------------------------------


def plan_table(scenario: Scenario, needs: Needs) -> RenderableType:
    """Before anything starts: what an emulation stands for, and the bytes a scenario takes."""
    scale = [] if scenario.emulation is None else [scale_table(scenario)]
    return Group(*scale, _needs_table(scenario, needs))


def _needs_table(scenario: Scenario, needs: Needs) -> RenderableType:
    """The bytes a scenario takes."""
    table = _pairs()
    table.add_row("state of a rank", format_bytes(needs.shard_bytes))
    table.add_row("training, a rank", format_bytes(needs.device_bytes))
    table.add_row("processes", format_bytes(needs.process_bytes))
    table.add_row("store (tmpfs)", format_bytes(needs.store_bytes))
    table.add_row("host memory", f"{format_bytes(needs.host_bytes)} = processes + store")
    return Group(Text(f"{describe(scenario)} needs", style="bold"), table)


def scale_table(scenario: Scenario) -> RenderableType:
    """What a scale model stands for, and how its proportions compare with the target's."""
    emulation, cluster, model = scenario.emulation, scenario.cluster, scenario.model
    assert emulation is not None
    here, there, target = emulation.here, emulation.there, emulation.target
    title = Text(f"{model.name} on {cluster.nodes} nodes of {cluster.name}, as a scale model", style="bold")
    if there is None or target is None:
        table = _table("", "there and here")
        rows = [(label, _seconds(getattr(here, f"{key}_s"))) for key, label in PARTS.items()]
        rows += [("link of a node", format_rate(emulation.link_bytes_per_s)), ("rho", f"{here.rho:.3g}")]
        for row in rows:
            table.add_row(*row)
        return Group(title, table)
    table = _table("", "there", "here")
    devices = f"{cluster.devices_per_node} x {cluster.accelerator or 'device'}"
    tokens = emulation.tokens_per_device * cluster.devices_per_node
    table.add_row("node", devices, f"{count_noun(cluster.ranks_per_node, 'rank')}, paced")
    table.add_row("parameters", _params(total_params(target)), _params(total_params(model)))
    table.add_row("MoE layers", str(num_moe_layers(target)), str(num_moe_layers(model)))
    table.add_row("tokens of a node", f"{tokens:,.0f}", f"{model.tokens_per_rank * cluster.ranks_per_node:,}")
    table.add_row("link of a node", *map(format_rate, (link_of(cluster), emulation.link_bytes_per_s)))
    table.add_row("time", "1 s", _seconds(emulation.time_factor))
    table.add_row("bytes", f"{emulation.byte_factor:,.0f}", "1")
    for key, label in PARTS.items():
        table.add_row(label, *(_part(times, key) for times in (there, here)))
    table.add_row("rho", f"{there.rho:.3g}", f"{here.rho:.3g}")
    return Group(title, table)


def _part(times: Times, key: str) -> str:
    """One part of an iteration, and how it compares to computing, which is what must be equal there and here."""
    seconds: Seconds = getattr(times, f"{key}_s")
    return f"{_seconds(seconds)} ({seconds / times.compute_s:.3f})"


def checks_table(checks: Sequence[Check]) -> RenderableType:
    """What was looked at, and below it the advice for what does not suffice."""
    table = _table("", "check", "found", "needed")
    for check in checks:
        mark = Text("ok", style="green") if check.ok else Text("no", style="bold red")
        table.add_row(mark, check.name, check.found, check.needed)
    advice = [Text(f"{check.name}: {check.advice}", style="yellow") for check in checks if not check.ok]
    return Group(table, *advice)


def names_table(kind: str, details: Mapping[str, Mapping[str, Any]]) -> Table:
    """Known names of one kind, with what there is to say of each."""
    facts: Mapping[str, Any] = next(iter(details.values()), {})
    table = _table(kind, *(fact.removesuffix("_bytes") for fact in facts))
    table.columns[0].no_wrap = True
    for name, values in details.items():
        table.add_row(name, *(_fact(fact, value) for fact, value in values.items()))
    return table


def copies_table(copies: Sequence[tuple[str, Copy, bool | None]]) -> Table:
    """Copies in a store: where each lies, and whether its checksums match (None: it was not complete to check)."""
    table = _table("owner", "iteration", "where", "state", "verified", "size")
    for where, copy, verified in copies:
        mark = {None: Text(NONE), True: Text("yes", style="green"), False: Text("NO", style="bold red")}[verified]
        table.add_row(str(copy.owner), str(copy.iteration), where, copy.state, mark, format_bytes(copy.num_bytes))
    return table


def _fact(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return format_bytes(value)
    return _params(value) if name in ("params", "active") else str(value)


# --- small parts -------------------------------------------------------------------------------------------------


def _pairs() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _params(number: int) -> str:
    unit, size = next((u, s) for u, s in (("B", 1e9), ("M", 1e6), ("K", 1e3), ("", 1)) if number >= s)
    return f"{number / size:.3g} {unit}"


def _seconds(value: Seconds | None) -> str:
    return NONE if value is None else format_seconds(value)


def _bytes(value: int | None) -> str:
    return NONE if value is None else format_bytes(value)


def _figure(value: float | None, spec: str) -> str:
    return NONE if value is None else format(value, spec)
