"""Are all machines told to run the same? Machine 0 compares it when another one joins, before anything is started.

A run of several machines is started by a command on each of them, and nobody sees them all. What differs would train
something that nobody has asked for, and go unnoticed. Knows no torch.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any, Final

from capricorn import __version__
from capricorn.config.scenario import Scenario
from capricorn.errors import shortened
from capricorn.systems.settings import flat_settings

OF_A_MACHINE: Final = frozenset({
    "launch.node_rank", "launch.rdzv_endpoint", "launch.launcher", "launch.interface", "store.root", "store.keep",
    "data.path",
})  # fmt: skip
"""Settings that each machine may have of its own; of the data, the content is compared by the ranks."""


def facts_of(command: str, scenarios: Iterable[Scenario], **asked: object) -> dict[str, Any]:
    """Returns what must be the same on all machines, by the name under which a user knows it.

    Args:
        command: that was given: `run`, `compare`.
        scenarios: all that it is to run; settings in which they differ are told in a row.
        asked: what else it was asked for, by the name of the option without its hyphens.
    """
    by_key: dict[str, list[Any]] = {}
    for scenario in scenarios:
        found = flat_settings(scenario) | {"--fault": [str(fault) for fault in scenario.faults]}
        for key, value in found.items():
            if key not in OF_A_MACHINE:
                by_key.setdefault(key, []).append(value)
    settings = {key: _folded(values) for key, values in by_key.items()}
    options = {f"--{name.replace('_', '-')}": value for name, value in asked.items()}
    return {"the command": command} | settings | options | versions()


def versions() -> dict[str, str]:
    """Returns the versions of what computes: they may not differ where results are to be equal bit for bit."""
    return {
        "python": platform.python_version(), "torch": metadata.version("torch"), "capricorn-bench": __version__,
    }  # fmt: skip


def difference(mine: Mapping[str, Any], machine: int, theirs: Mapping[str, Any]) -> str:
    """Returns in one line what another machine was told otherwise than machine 0; nothing if nothing was."""
    keys = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
    shown = [f"{key} is {_word(mine, key)} on machine 0 and {_word(theirs, key)} on machine {machine}" for key in keys]
    return f"{shortened(shown)}; give the same command on all machines" if shown else ""


def _folded(values: list[Any]) -> Any:
    return values[0] if all(value == values[0] for value in values) else values


def _word(known: Mapping[str, Any], key: str) -> str:
    value = known.get(key)
    return "not set" if value in (None, [], "") else str(value)
