"""Which failures can happen to which run: a system without a memory store has no copy in one that could be damaged.

Pure; whether this machine can have them is asked in `harness`.
"""

from __future__ import annotations

from typing import Final

from capricorn.config.fault_spec import LINK_KINDS, NO_LINKS, FaultSpec
from capricorn.config.scenario import Scenario
from capricorn.systems.registry import FILES, SYSTEMS

OURS: Final = frozenset({"capricorn", "blocking", "gemini", "gemini-staged"})
"""Systems that keep copies in the memory store, and may write them to a slow tier too."""

SEVERAL_MACHINES: Final = "it strikes nodes of several machines at once; leave out --nnodes"
ENDLESS: Final = "over paced links nobody finds the node that is cut off; use seconds=S or cluster.links=namespaces"


def why_not(fault: FaultSpec, scenario: Scenario) -> str:
    """Why the failure cannot happen in a run of that scenario; empty if it can."""
    name = scenario.system.name
    missing = {
        "memory": "" if name in OURS else f"{name} keeps no copies in the memory store",
        "replica": "" if scenario.system.replicas > 1 else "there is one copy of each shard; use --replicas 2",
        "files": "" if _has_slow_tier(scenario) else f"{name} writes no files here; {_advice(name)}",
        "changes": "" if name in OURS or _has_slow_tier(scenario) else f"{name} keeps nothing that a kill could tear",
        "tmpfs": "" if name in OURS or _writes_to_memory(scenario) else f"{name} keeps nothing in memory",
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
    if scenario.system.name in OURS:
        return scenario.persist.every > 0
    return SYSTEMS[scenario.system.name].tiers == FILES


def _writes_to_memory(scenario: Scenario) -> bool:
    return _has_slow_tier(scenario) and scenario.storage.medium == "tmpfs"


def _advice(name: str) -> str:
    return "use --persist-every N" if name in OURS else "use a system that does"
