"""Which faults can happen to which run: a system without a memory store has no copy in one that could be damaged.

Pure; whether this machine can have them is asked in `feasibility`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from capricorn.config.fault_kinds import NO_LINKS, Need, kind_of
from capricorn.config.fault_spec import FaultSpec
from capricorn.config.scenario import Scenario
from capricorn.systems.registry import SystemEntry, find
from capricorn.systems.settings import file_settings_of

SEVERAL_MACHINES: Final = "it needs all nodes, or what takes it back, on one machine; leave out --nnodes"
ENDLESS: Final = "over paced links nobody finds the node that is cut off; use seconds=S or cluster.links=namespaces"
FOR_GOOD: Final = "nobody would be there to end it; use seconds=S"
BY_TORCHRUN: Final = "torchrun starts the ranks here; leave out launch.restart"


def why_not(fault: FaultSpec, scenario: Scenario) -> str:
    """Returns why the fault cannot happen in a run of that scenario; nothing if it can."""
    entry = find(scenario.system.name)
    name, tier = entry.label, _has_persistent_tier(entry, scenario)
    in_memory = entry.replicates or (tier and file_settings_of(scenario).in_memory)
    missing: Mapping[Need, str] = {
        "memory copies": "" if entry.replicates else f"{name} keeps no copies in the memory store",
        "replicas": "" if scenario.system.replicas > 1 else "there is one copy of each shard; use --replicas 2",
        "persistent tier": "" if tier else f"{name} writes no files here; {_advice(entry)}",
        "stored state": "" if entry.replicates or tier else f"{name} keeps nothing that a kill could tear",
        "memory files": "" if in_memory else f"{name} keeps nothing in memory",
        "one machine": SEVERAL_MACHINES if scenario.launch.nnodes else "",
        "links": "" if scenario.cluster.is_emulated else NO_LINKS,
        "fork server": BY_TORCHRUN if scenario.launch.by_torchrun else "",
        "an end": _why_endless(fault, scenario),
    }
    reasons = (missing.get(need, "") for need in kind_of(fault.kind).needs_of(fault.where))
    return next(filter(None, reasons), "")


def _has_persistent_tier(entry: SystemEntry, scenario: Scenario) -> bool:
    return scenario.persist.every > 0 if entry.replicates else entry.writes_files


def _why_endless(fault: FaultSpec, scenario: Scenario) -> str:
    """Returns why a fault may not last for good; nothing if it does not, or may."""
    if fault.seconds != 0:
        return ""
    if kind_of(fault.kind).stops_launcher:
        return FOR_GOOD
    return ENDLESS if scenario.cluster.links == "paced" else ""


def _advice(entry: SystemEntry) -> str:
    return "use --persist-every N" if entry.replicates else "use a system that does"
