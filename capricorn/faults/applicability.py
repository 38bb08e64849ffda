"""Which failures can happen to which run: a system without a memory store has no copy in one that could be damaged.

Pure; whether this machine can have them is asked in `harness`.
"""

from __future__ import annotations

from typing import Final

from capricorn.config.fault_spec import LINK_KINDS, NO_LINKS, FaultSpec
from capricorn.config.scenario import Scenario
from capricorn.systems.registry import SystemEntry, find
from capricorn.systems.settings import file_settings_of

SEVERAL_MACHINES: Final = "it strikes nodes of several machines at once; leave out --nnodes"
ENDLESS: Final = "over paced links nobody finds the node that is cut off; use seconds=S or cluster.links=namespaces"


def why_not(fault: FaultSpec, scenario: Scenario) -> str:
    """Why the failure cannot happen in a run of that scenario; empty if it can."""
    entry = find(scenario.system.name)
    name = entry.label
    missing = {
        "memory": "" if entry.replicates else f"{name} keeps no copies in the memory store",
        "replica": "" if scenario.system.replicas > 1 else "there is one copy of each shard; use --replicas 2",
        "files": "" if _has_slow_tier(scenario) else f"{name} writes no files here; {_advice(entry)}",
        "changes": ""
        if entry.replicates or _has_slow_tier(scenario)
        else f"{name} keeps nothing that a kill could tear",
        "tmpfs": "" if entry.replicates or _writes_to_memory(scenario) else f"{name} keeps nothing in memory",
        "one machine": SEVERAL_MACHINES if scenario.launch.nnodes else "",
        "links": "" if scenario.cluster.is_emulated else NO_LINKS,
        "an end": ENDLESS if scenario.cluster.links == "paced" and fault.seconds == 0 else "",
    }
    return next(filter(None, (missing[need] for need in _needs(fault))), "")


def _needs(fault: FaultSpec) -> tuple[str, ...]:
    if fault.kind in LINK_KINDS:
        return ("links", "an end") if fault.kind == "partition" else ("links",)
    place = f"{fault.kind}-{fault.where}" if fault.where else fault.kind
    return _NEEDS.get(place, ())


_NEEDS: Final = {
    "group-loss": ("one machine",), "torn-commit": ("changes",), "tmpfs-full": ("tmpfs",),
    "disk-full": ("files",), "disk-slow": ("files",),
    "corrupt-slot": ("memory",), "corrupt-replica": ("memory", "replica"), "corrupt-wire": ("memory", "replica"),
    "corrupt-disk": ("files", "one machine"),
    "truncate-slot": ("memory",), "truncate-replica": ("memory", "replica"), "truncate-disk": ("files", "one machine"),
}  # fmt: skip
"""By kind, and by place where that matters."""


def _has_slow_tier(scenario: Scenario) -> bool:
    entry = find(scenario.system.name)
    return scenario.persist.every > 0 if entry.replicates else entry.writes_files


def _writes_to_memory(scenario: Scenario) -> bool:
    return _has_slow_tier(scenario) and file_settings_of(scenario).in_memory


def _advice(entry: SystemEntry) -> str:
    return "use --persist-every N" if entry.replicates else "use a system that does"
