"""The system under test: its name, what the rules ask of its entry in the registry, and how it is set up for the test.

Knows neither the toy job nor the rules.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from pydantic import Field

from capricorn.config.fields import FrozenModel
from capricorn.errors import ConfigError
from capricorn.systems.interface import CheckpointSystem
from capricorn.systems.registry import FILES, MEMORY, SYSTEMS, check_system, load_system
from capricorn.units import Seconds

LARGE: Final = 400_000
"""Numbers in the largest tensor of the toy job."""


class SystemUnderTest(FrozenModel):
    """A system and how it is set up when it is tested."""

    system: str
    settings: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """By field of its `JobContext`: values that differ from the defaults of that field's model."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables that a library reads."""
    has_links: bool = True
    """Whether it sends over links that are modelled in user space; one with sockets of its own cannot."""
    without: tuple[str, ...] = ()
    """Tensors of the toy job that it cannot keep."""
    large: int = LARGE
    timeout_s: Seconds = 5.0
    """Deadline of every wait on a peer."""

    @property
    def patience_s(self) -> Seconds:
        """How long what is closed or has lost its rank may take to end."""
        return 2 * self.timeout_s

    def __str__(self) -> str:
        return self.system


_GEMINI: Final = {"gemini": {"profile_iterations": 2, "mu": 0.8}}
SETUP: Final[dict[str, dict[str, Any]]] = {
    # Twenty iterations of profiling are longer than the test, and `auto` is found by trial runs before the job.
    "gemini": {"settings": _GEMINI},
    "gemini-staged": {"settings": _GEMINI},
    "lm-resiliency": {"has_links": False},
    # Its own limit is 128 MiB. What is larger is not copied together but written as it is.
    "torchsnapshot": {
        "without": ("odd_bfloat16", "float8"),
        "environment": {"TORCHSNAPSHOT_SLAB_SIZE_THRESHOLD_BYTES_OVERRIDE": "1000000"},
    },
}
"""By built-in system: what differs from the defaults, so that a test of a minute reaches what is to be tested."""


def under_test(system: str, **changes: Any) -> SystemUnderTest:
    """Sets a system up as it is tested, except for what is changed."""
    return SystemUnderTest.model_validate({"system": system} | SETUP.get(system, {}) | changes)


@dataclass(frozen=True, slots=True)
class SystemFacts:
    """What the rules ask of a system's entry in the registry."""

    saves: bool
    tiers: frozenset[str]
    survives: frozenset[str]
    """Kinds of failures after which it still has a checkpoint: `kill` (one rank), `kill-all`, `node-loss`."""


ALL_FAILURES: Final = frozenset({"kill", "kill-all", "node-loss"})


@cache
def facts_of(system: str) -> SystemFacts:
    """Returns what is known of a system, built in or from outside.

    Raises:
        ConfigError: there is no such system, or what it needs is not installed.
    """
    if ":" not in system:
        check_system(system)
        tiers = SYSTEMS[system].tiers
        # The copies of lm-resiliency die with the last worker that is killed.
        failures = ALL_FAILURES - {"kill-all"} if system == "lm-resiliency" else ALL_FAILURES
        return SystemFacts(bool(tiers), frozenset(tiers), failures if tiers else frozenset())
    loaded = system_class(system)
    tiers = getattr(loaded, "tiers", ()) or (*MEMORY, *FILES)
    is_kind = getattr(loaded, "kind", "own") in ("files", "replicates")
    survives = getattr(loaded, "survives", None) or (ALL_FAILURES if is_kind else {"kill"})
    return SystemFacts(getattr(loaded, "kind", "own") != "nothing", frozenset(tiers), frozenset(survives))


@cache
def system_class(system: str) -> type[CheckpointSystem]:
    """Imports a system's class: of a registered name, `PACKAGE.MODULE:CLASS` or `FILE.py:CLASS`.

    Raises:
        ConfigError: there is no such system, or what it needs is not installed.
    """
    place, colon, name = system.rpartition(":")
    if not colon:
        return load_system(system)
    try:
        module = _module_of(Path(place)) if place.endswith(".py") else import_module(place)
        found: type[CheckpointSystem] = getattr(module, name)
    except (ImportError, OSError, AttributeError) as error:
        raise ConfigError(f"system {system}: {error}; write PACKAGE.MODULE:CLASS or FILE.py:CLASS") from None
    return found


def _module_of(path: Path) -> ModuleType:
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
