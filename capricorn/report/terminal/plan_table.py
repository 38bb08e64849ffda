"""Plans for a terminal, before anything starts: the bytes a scenario takes, the cluster that an emulation stands for,
and whether this machine suffices. Computes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from capricorn.config.cluster import IterationTimes
from capricorn.config.scenario import Scenario
from capricorn.report.terminal.grid import pairs, plain_table
from capricorn.report.text import describe, format_params, format_time
from capricorn.sizing.memory import Needs, num_moe_layers, total_params
from capricorn.sizing.scale import VALUE_BYTES
from capricorn.sizing.workload import ACTIVATION_BYTES, link_of, traffic_of
from capricorn.units import Seconds, count_noun, format_bytes, format_rate

if TYPE_CHECKING:
    from capricorn.launch.preflight import Check

PARTS = {"compute": "computing", "all_to_all": "all-to-all", "reduce": "reduce", "checkpoint": "checkpoint"}


def plan_table(scenario: Scenario, needs: Needs) -> RenderableType:
    """Shows what an emulation stands for, and the bytes a scenario takes."""
    scale = [] if scenario.emulation is None else [scale_table(scenario)]
    return Group(*scale, _needs_table(scenario, needs))


def _needs_table(scenario: Scenario, needs: Needs) -> RenderableType:
    table, topology = pairs(), scenario.topology
    shared = f"the {scenario.model.num_experts} of a layer on {count_noun(topology.expert_parallel, 'rank')}"
    copies = f", {topology.num_expert_replicas} replicas of each" if topology.num_expert_replicas > 1 else ""
    table.add_row("experts", shared + copies)
    table.add_row("state of a rank", format_bytes(needs.shard_bytes))
    table.add_row("training, a rank", format_bytes(needs.device_bytes))
    table.add_row("processes", format_bytes(needs.process_bytes))
    table.add_row("store (tmpfs)", format_bytes(needs.store_bytes))
    table.add_row("host memory", f"{format_bytes(needs.host_bytes)} = processes + store")
    if scenario.emulation is None and topology.num_nodes > 1:
        table.add_row("link of a node", _traffic_line(scenario))
    return Group(Text(f"{describe(scenario)} needs", style="bold"), table)


def _traffic_line(scenario: Scenario) -> str:
    """Returns what leaves a node in an iteration."""
    traffic = traffic_of(scenario, ACTIVATION_BYTES if scenario.cluster.device == "cuda" else VALUE_BYTES)
    parts = {
        "all-to-all": traffic.all_to_all_bytes,
        "gradients": traffic.reduce_bytes,
        "checkpoint": traffic.checkpoint_bytes,
    }
    return ", ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in parts.items() if num_bytes) + (
        " an iteration"
    )


def scale_table(scenario: Scenario) -> RenderableType:
    """Shows what a scale model stands for, and how its proportions compare with those of the target."""
    emulation, cluster, model = scenario.emulation, scenario.cluster, scenario.model
    assert emulation is not None
    here, there, target = emulation.here, emulation.there, emulation.target
    title = Text(f"{model.name} on {cluster.nodes} nodes of {cluster.name}, as a scale model", style="bold")
    if there is None or target is None:
        table = plain_table("", "there and here", gap=2)
        rows = [(label, format_time(getattr(here, f"{key}_s"))) for key, label in PARTS.items()]
        rows += [("link of a node", format_rate(emulation.link_bytes_per_s)), ("rho", f"{here.rho:.3g}")]
        for row in rows:
            table.add_row(*row)
        return Group(title, table)
    table = plain_table("", "there", "here", gap=2)
    devices = f"{cluster.devices_per_node} x {cluster.accelerator or 'device'}"
    tokens = emulation.tokens_per_device * cluster.devices_per_node
    table.add_row("node", devices, f"{count_noun(cluster.ranks_per_node, 'rank')}, paced")
    table.add_row("parameters", format_params(total_params(target)), format_params(total_params(model)))
    table.add_row("MoE layers", str(num_moe_layers(target)), str(num_moe_layers(model)))
    table.add_row("tokens of a node", f"{tokens:,.0f}", f"{model.tokens_per_rank * cluster.ranks_per_node:,}")
    table.add_row("link of a node", *map(format_rate, (link_of(cluster), emulation.link_bytes_per_s)))
    table.add_row("time", "1 s", format_time(emulation.time_factor))
    table.add_row("bytes", f"{emulation.byte_factor:,.0f}", "1")
    for key, label in PARTS.items():
        table.add_row(label, *(_part(times, key) for times in (there, here)))
    table.add_row("rho", f"{there.rho:.3g}", f"{here.rho:.3g}")
    return Group(title, table)


def _part(times: IterationTimes, key: str) -> str:
    """Writes a part of an iteration, and how it compares to computing, which must be equal there and here."""
    seconds: Seconds = getattr(times, f"{key}_s")
    return f"{format_time(seconds)} ({seconds / times.compute_s:.3f})"


def checks_table(checks: Sequence[Check]) -> RenderableType:
    """Shows what was looked at, and below it the advice for what does not suffice."""
    table = plain_table("", "check", "found", "needed", gap=2)
    for check in checks:
        mark = Text("ok", style="green") if check.ok else Text("no", style="bold red")
        table.add_row(mark, check.name, check.found, check.needed)
    advice = [Text(f"{check.name}: {check.advice}", style="yellow") for check in checks if not check.ok]
    return Group(table, *advice)


def variants_table(needs: Mapping[str, Needs]) -> RenderableType:
    """Shows what each variant of a comparison takes of this machine."""
    table = plain_table("", "state of a rank", "processes", "store (tmpfs)", "host memory", keeps_names=True)
    for label, each in needs.items():
        sizes = (each.shard_bytes, each.process_bytes, each.store_bytes, each.host_bytes)
        table.add_row(label, *map(format_bytes, sizes))
    return table
