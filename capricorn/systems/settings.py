"""Settings that belong to one system: `system.options.KEY=VALUE`, checked by the model that its registry entry names.

What several systems share in a comparison may stand in one scenario: each takes the options that its model has.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal

from pydantic import BaseModel, Field

from capricorn.config.fields import SettingsModel, validate
from capricorn.config.resolve import assign
from capricorn.config.scenario import Scenario
from capricorn.errors import ConfigError
from capricorn.systems.registry import SystemEntry, find
from capricorn.units import Bytes

OPTIONS: Final = "system.options"


class SystemSettings(SettingsModel):
    """The base of the settings of a system; any pydantic model may take its place."""

    EMULATED: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Defaults on an emulated cluster, where links are slower by orders of magnitude."""

    def buffer_bytes_of(self, shard_bytes: Bytes) -> Bytes:
        """Returns the host memory that a rank needs beside the store, for a shard of that size."""
        return 0


class FileSettings(SystemSettings):
    """Where a system that writes files puts them, and how durably."""

    EMULATED: ClassVar[Mapping[str, Any]] = MappingProxyType({"medium": "tmpfs"})

    medium: Literal["disk", "tmpfs"] = Field(
        default="disk", description="Put files into the run folder (disk) or into memory (tmpfs)"
    )
    fsync: bool = Field(default=False, description="Count a checkpoint only once it is on the medium")
    keep: int = Field(default=2, ge=1, description="Complete checkpoints that are kept")

    @property
    def in_memory(self) -> bool:
        return self.medium == "tmpfs"


def settings_of(scenario: Scenario) -> Any:
    """Returns the settings of the scenario's system, an instance of its own model; None if it has none.

    Options that the model does not have are those of other systems of a comparison, or of an older record.
    """
    entry = find(scenario.system.name)
    model = entry.settings_model()
    if model is None:
        return None
    own = {key: value for key, value in scenario.system.options.items() if key in model.model_fields}
    return validate(model, _defaults(model, scenario) | own, f"options of {entry.label}", lax=True)


def file_settings_of(scenario: Scenario) -> FileSettings:
    """Returns the settings of a system that writes files; those by default of any other, which leaves files unused."""
    settings = settings_of(scenario)
    return settings if isinstance(settings, FileSettings) else FileSettings()


def with_options(scenario: Scenario, **options: Any) -> Scenario:
    """Returns the scenario with these options of its system, checked."""
    system = scenario.system.model_copy(update={"options": scenario.system.options | options})
    return settle(scenario.model_copy(update={"system": system}))


def settle(scenario: Scenario) -> Scenario:
    """Returns the scenario with every option of its system written out, defaults too.

    Raises:
        ConfigError: the system is unknown, has no such option, or a value does not fit.
    """
    entry = find(scenario.system.name)
    model, options = entry.settings_model(), scenario.system.options
    for key in options:
        _check_key(key, entry, model)
    if model is None:
        return scenario
    settings = settings_of(scenario)
    system = scenario.system.model_copy(update={"options": settings.model_dump(mode="json")})
    return scenario.model_copy(update={"system": system})


def override(scenario: Scenario, assignments: Iterable[str]) -> Scenario:
    """Returns the scenario with `section.key=value` settings applied, all of it checked again, and options settled.

    Another system takes of the options so far those that it has.

    Raises:
        ConfigError: a key is unknown, or a value does not fit it.
    """
    assigned = tuple(assignments)
    changed = assign(scenario, assigned)
    given = {key.removeprefix(f"{OPTIONS}.") for key, _, _ in (each.partition("=") for each in assigned)}
    entry = find(changed.system.name)
    model = entry.settings_model()
    fields = set() if model is None else model.model_fields.keys()
    kept = {key: value for key, value in changed.system.options.items() if key in fields or key in given}
    return settle(changed.model_copy(update={"system": changed.system.model_copy(update={"options": kept})}))


def _defaults(model: type[BaseModel], scenario: Scenario) -> dict[str, Any]:
    return dict(getattr(model, "EMULATED", {})) if scenario.cluster.is_emulated else {}


def _check_key(key: str, entry: SystemEntry, model: type[BaseModel] | None) -> None:
    fields = [] if model is None else list(model.model_fields)
    if key in fields:
        return
    nearest = difflib.get_close_matches(key, fields, n=1)
    has = f"did you mean {nearest[0]!r}?" if nearest else f"it has {', '.join(fields) or 'none'}"
    raise ConfigError(f"{OPTIONS}.{key}: system {entry.label} has no such option; {has}")


def flat_settings(scenario: Scenario) -> dict[str, Any]:
    """Returns every `section.field` of a scenario with its value, `system.options.KEY` too, and nothing computed."""
    tree = scenario.model_dump(mode="json", exclude={"emulation", "faults"})
    settings = {f"{section}.{field}": value for section, table in tree.items() for field, value in table.items()}
    return settings | {f"{OPTIONS}.{key}": value for key, value in settings.pop(OPTIONS).items()}
