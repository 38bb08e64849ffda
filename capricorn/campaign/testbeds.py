"""The testbeds of a campaign: small emulated clusters for faults that need links, or a disk that keeps up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from capricorn.campaign.campaign_record import AS_CONFIGURED, TestbedName
from capricorn.campaign.small_file_systems import needed_bytes, why_no_mount
from capricorn.config.fault_kinds import DISK, kind_of
from capricorn.config.resolve import assign
from capricorn.config.scenario import Scenario
from capricorn.errors import ConfigError
from capricorn.faults.feasibility import why_no_cgroup
from capricorn.sizing.scale import scale

EMULATED: Final = (
    "cluster.name=faults", "cluster.device=cpu", "cluster.rate_bytes_per_s=400Mbit", "system.send_buffer_bytes=16KiB",
    "planner.max_chunk_bytes=64KiB", "planner.spans=layer",
)  # fmt: skip
PACES: Final[Mapping[TestbedName, tuple[str, ...]]] = MappingProxyType({
    "links": ("cluster.attention_s=0.002", "cluster.expert_s=0.002"),
    "paced": ("cluster.attention_s=0.05", "cluster.expert_s=0.1"),
})  # fmt: skip
"""How fast the cluster of a testbed computes: so slowly, on the second, that something is persisted in time."""


def needed_testbeds(kinds: Iterable[str]) -> set[TestbedName]:
    """Returns what these kinds of faults may need beside what is configured."""
    found = [kind_of(name) for name in kinds]
    needed: dict[TestbedName, bool] = {
        "links": any("links" in kind.needs for kind in found),
        "paced": any(kind.hits_persistent_tier or DISK in kind.places for kind in found),
    }
    return {testbed for testbed, is_needed in needed.items() if is_needed}


def make_testbeds(
    scenario: Scenario, kinds: Sequence[str], settings: Sequence[str]
) -> tuple[dict[TestbedName, Scenario], dict[str, str]]:
    """Returns the scenario on each testbed that the kinds need, and by kind why this machine cannot have it.

    `settings` of the user go before those of a testbed.
    """
    scenarios: dict[TestbedName, Scenario] = {AS_CONFIGURED: scenario}
    refused = _refused_here(scenario, kinds)
    for testbed in sorted(needed_testbeds(kinds)) if not scenario.cluster.is_emulated else ():
        try:
            scenarios[testbed] = scale(assign(scenario, (*EMULATED, *PACES[testbed], *settings)))
        except ConfigError as error:
            refused |= {kind: str(error) for kind in kinds if testbed in needed_testbeds([kind])}
    return scenarios, refused


def _refused_here(scenario: Scenario, kinds: Sequence[str]) -> dict[str, str]:
    mounted = [kind for kind in kinds if kind_of(kind).fills]
    refused = dict.fromkeys(mounted, why_no_mount(needed_bytes(scenario)) if mounted else "")
    refused |= {kind: reason for kind in kinds if (reason := why_no_cgroup(kind))}
    return {kind: reason for kind, reason in refused.items() if reason}
