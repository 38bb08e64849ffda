"""Whether the faults of a scenario can be made to happen on this machine, asked before anything starts."""

from __future__ import annotations

from pathlib import Path

from capricorn.config.fault_kinds import kind_of
from capricorn.config.fault_spec import FaultSpec
from capricorn.config.scenario import Scenario
from capricorn.errors import ConfigError
from capricorn.faults import memory_cgroup as cgroup
from capricorn.faults.applicability import why_not
from capricorn.faults.filler_file import why_not_fill
from capricorn.systems.settings import file_settings_of


def check_faults(scenario: Scenario, out: Path) -> None:
    """Returns if each fault can be injected into a run that is recorded below `out`.

    Raises:
        ConfigError: one of them cannot, with the reason, or its kind cannot be loaded.
    """
    for fault in scenario.faults:
        if reason := why_not(fault, scenario) or why_not_here(fault, scenario, out):
            raise ConfigError(f"fault {fault}: {reason}")


def why_not_of_machine(name: str) -> str:
    """Returns why this machine cannot have a fault of that kind, whatever is run; nothing if it can."""
    needs = kind_of(name).needs
    if "swap" in needs and (reason := cgroup.why_no_swap()):
        return reason
    return cgroup.why_not() if "memory cgroup" in needs else ""


def why_not_here(fault: FaultSpec, scenario: Scenario, out: Path) -> str:
    fills = kind_of(fault.kind).fills
    if fills == "store":
        return why_not_fill(Path(scenario.store.root))
    if fills == "disk":
        return why_not_fill(_persistent_folder(scenario, out))
    if fills == "records":
        return why_not_fill(out)
    return why_not_of_machine(fault.kind)


def _persistent_folder(scenario: Scenario, out: Path) -> Path:
    """Returns a folder near enough to the persistent tier to tell its file system."""
    if scenario.persist.dir:
        return Path(scenario.persist.dir)
    return Path(scenario.store.root) if file_settings_of(scenario).in_memory else out
