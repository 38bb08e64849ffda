"""Systems by name, imported only when asked for."""

from __future__ import annotations

from importlib import import_module

from capricorn.errors import unknown_name
from capricorn.system import CheckpointSystem

SYSTEMS: dict[str, str] = {
    "none": "capricorn.baselines.none:NoCheckpoint",
    "blocking": "capricorn.baselines.blocking:Blocking",
    "capricorn": "capricorn.runtime.replicating:ReplicatingSystem",
}


def check_system(name: str) -> None:
    """Raises ConfigError, naming the known ones, for a system that is not registered."""
    if name not in SYSTEMS:
        raise unknown_name("system", name, SYSTEMS)


def load_system(name: str) -> type[CheckpointSystem]:
    """The class of that system.

    Raises:
        ConfigError: no system has that name.
    """
    check_system(name)
    module, _, attribute = SYSTEMS[name].partition(":")
    loaded: type[CheckpointSystem] = getattr(import_module(module), attribute)
    return loaded
