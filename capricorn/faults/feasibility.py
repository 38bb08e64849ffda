"""Whether the failures of a scenario can be made to happen on this machine, asked before anything starts."""

from __future__ import annotations

from pathlib import Path

from capricorn.config.fault_spec import FaultSpec
from capricorn.config.scenario import Scenario
from capricorn.errors import ConfigError
from capricorn.faults import filler_file as ballast
from capricorn.faults import memory_cgroup as cgroup
from capricorn.faults.applicability import why_not
from capricorn.systems.settings import file_settings_of


def check_faults(scenario: Scenario, out: Path) -> None:
    """Passes when each can strike a run that is recorded below `out`.

    Raises:
        ConfigError: which one cannot, and why.
    """
    for fault in scenario.faults:
        if reason := why_not(fault, scenario) or why_not_here(fault, scenario, out):
            raise ConfigError(f"fault {fault}: {reason}")


def why_not_here(fault: FaultSpec, scenario: Scenario, out: Path) -> str:
    """Why this machine cannot have the failure; empty if it can."""
    if fault.kind == "oom":
        return cgroup.why_not()
    if fault.kind == "tmpfs-full":
        return ballast.why_not_fill(Path(scenario.store.root))
    if fault.kind == "disk-full":
        return ballast.why_not_fill(_slow_tier(scenario, out))
    return ""


def _slow_tier(scenario: Scenario, out: Path) -> Path:
    """Near enough to tell its file system."""
    if scenario.persist.dir:
        return Path(scenario.persist.dir)
    return Path(scenario.store.root) if file_settings_of(scenario).in_memory else out
