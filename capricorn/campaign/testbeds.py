"""The testbeds of a campaign: small emulated clusters for faults that need links, or a disk that keeps up; a launcher
that is process 1; and all of these in several shapes.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from capricorn.campaign.campaign_record import AS_CONFIGURED, LINKS, PACED, PID_1, TestbedName, testbed_name
from capricorn.campaign.small_file_systems import needed_bytes, why_no_mount
from capricorn.config.fault_kinds import NO_LINKS, kind_of
from capricorn.config.resolve import assign
from capricorn.config.scenario import Scenario
from capricorn.errors import ConfigError
from capricorn.faults.feasibility import why_not_of_machine
from capricorn.sizing.scale import scale

EMULATED: Final = (
    "cluster.name=faults", "cluster.device=cpu", "cluster.rate_bytes_per_s=400Mbit", "system.send_buffer_bytes=16KiB",
    "planner.max_chunk_bytes=64KiB", "planner.spans=layer",
)  # fmt: skip
PACES: Final[Mapping[TestbedName, tuple[str, ...]]] = MappingProxyType({
    LINKS: ("cluster.attention_s=0.002", "cluster.expert_s=0.002"),
    PACED: ("cluster.attention_s=0.05", "cluster.expert_s=0.1"),
})  # fmt: skip
"""How fast the cluster of a testbed computes: so slowly, on the second, that training goes on while a disk is full."""

ENTER: Final = ("unshare", "--pid", "--fork", "--mount-proc")
"""Before a command: it becomes process 1 of a new namespace."""


def needed_testbeds(kinds: Iterable[str]) -> set[TestbedName]:
    """Returns what these kinds of faults may need beside what is configured."""
    found = [kind_of(name) for name in kinds]
    needed: dict[TestbedName, bool] = {
        LINKS: any("links" in kind.needs for kind in found),
        PACED: any(kind.takes_time for kind in found),
    }
    return {testbed for testbed, is_needed in needed.items() if is_needed}


def make_testbeds(
    scenario: Scenario, kinds: Sequence[str], settings: Sequence[str], shapes: Sequence[str], *, is_drawn: bool
) -> tuple[dict[TestbedName, Scenario], dict[str, str]]:
    """Returns the scenario on each testbed that the kinds need, and by kind why this machine cannot have it.

    Args:
        scenario: as it is configured.
        kinds: of faults.
        settings: of the user, which go before those of a testbed.
        shapes: nodes and ranks of each, `3x1`; none leaves what is configured.
        is_drawn: whether the faults are drawn, and so some of them come to a launcher that is process 1.

    Raises:
        ConfigError: the scenario cannot have one of the shapes.
    """
    scenarios: dict[TestbedName, Scenario] = {AS_CONFIGURED: scenario}
    if scenario.launch.nnodes:
        return scenarios, {kind: NO_LINKS for kind in kinds if "links" in kind_of(kind).needs}
    refused: dict[str, str] = {}
    has_pid_1 = is_drawn and can_be_pid_1()
    for shape in shapes or ("",):
        shaped = _shaped(scenario, shape)
        scenarios[testbed_name(AS_CONFIGURED, shape)] = shaped
        if has_pid_1:
            scenarios[testbed_name(PID_1, shape)] = shaped
        for place in sorted(needed_testbeds(kinds)) if not scenario.cluster.is_emulated else ():
            try:
                scenarios[testbed_name(place, shape)] = scale(assign(shaped, (*EMULATED, *PACES[place], *settings)))
            except ConfigError as error:
                refused |= {kind: str(error) for kind in kinds if place in needed_testbeds([kind])}
    return scenarios, refused | _refused_here(scenarios.values(), kinds)


def can_be_pid_1() -> bool:
    """Returns whether this machine lets us make a launcher process 1 of a namespace."""
    try:
        return subprocess.run([*ENTER, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _shaped(scenario: Scenario, shape: str) -> Scenario:
    if not shape:
        return scenario
    nodes, _, ranks = shape.partition("x")
    try:
        return scale(assign(scenario, (f"cluster.nodes={nodes}", f"cluster.ranks_per_node={ranks}")))
    except ConfigError as error:
        raise ConfigError(f"--shapes {shape}: {str(error).removeprefix('--set: ')}") from None


def _refused_here(scenarios: Iterable[Scenario], kinds: Sequence[str]) -> dict[str, str]:
    mounted = [kind for kind in kinds if kind_of(kind).fills]
    refused = dict.fromkeys(mounted, why_no_mount(max(map(needed_bytes, scenarios))) if mounted else "")
    refused |= {kind: reason for kind in kinds if (reason := why_not_of_machine(kind))}
    return {kind: reason for kind, reason in refused.items() if reason}
