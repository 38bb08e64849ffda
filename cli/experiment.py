"""Reads what `compare` is asked for: comparisons, from a file of them and from options, which go before the file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import rich_click as click

from capricorn.compare.compare_record import (
    SYSTEM,
    PlannedComparison,
    Variant,
    check_shared_options,
    parse_variants,
    setting_key,
)
from capricorn.config.resolve import assign, read_toml
from capricorn.config.scenario import Scenario
from capricorn.errors import ConfigError, unknown_name
from capricorn.systems.effect import check_effect
from capricorn.systems.registry import check_system
from capricorn.systems.settings import flat_settings

from .options import (
    PARAMETERS,
    SETTINGS,
    SYSTEM_PARAMETER,
    given,
    refuse_shared_tier,
    scenario_from,
    written_keys,
)

COMPARISONS, LABEL, OUT, STDLIB = "comparisons", "label", "out", "stdlib"
ASKED = {"systems", "repeats", *PARAMETERS} - {SYSTEM_PARAMETER}
"""Parameters of the command that say what is compared."""
PATHS: dict[str, Callable[[str], bool]] = {
    "data.path": lambda value: value != STDLIB,
    "loads.source": lambda value: bool(Path(value).suffix),
    "store.root": bool,
}
"""Settings that may be a path, and whether such a value is one."""


class Experiment(NamedTuple):
    """All that one command compares, and where the runs go."""

    out: Path
    comparisons: list[PlannedComparison]


def refuse_given(context: click.Context, allowed: set[str], reason: str) -> None:
    """Raises ConfigError for an option on the command line that is not among the allowed ones."""
    for parameter in context.command.params:
        if parameter.name in given(context) - allowed:
            raise ConfigError(f"{parameter.opts[0]} {reason}")


def experiment_of(context: click.Context, file: Path | None) -> Experiment:
    """Returns what the command line asks for, and the file where there is one.

    Raises:
        ConfigError: an option, a key of the file, a name or a value is wrong.
    """
    asked = {name: value for name, value in context.params.items() if name in ASKED}
    if file is None:
        planned, scenarios = _planned("", asked)
        check_effect(written_keys(given(context), asked[SETTINGS]), scenarios)
        return Experiment(context.params[OUT], [planned])
    explicit = {name: value for name, value in context.params.items() if name in given(context)}
    table = read_toml(file)
    parts = table.pop(COMPARISONS, [{}])
    if not (isinstance(parts, list) and parts and all(isinstance(part, dict) for part in parts)):
        raise ConfigError(f"{file}: {COMPARISONS} is no list of tables; write [[{COMPARISONS}]] above each")
    shared = _values(context, file, table, ASKED | {OUT})
    out: Path = (shared | explicit).get(OUT, context.params[OUT])
    comparisons: list[PlannedComparison] = []
    everywhere: list[Scenario] = []
    for number, part in enumerate(parts, 1):
        label = part.pop(LABEL, "")
        if not isinstance(label, str):
            raise ConfigError(f"{file}: {LABEL} = {label!r} is no text")
        own = _values(context, file, part, ASKED)
        try:
            planned, scenarios = _planned(label, _merged(asked, shared, own, explicit))
            check_effect(_written(own), scenarios)
        except ConfigError as error:
            raise ConfigError(f"{file}, {repr(label) if label else f'comparison {number}'}: {error}") from None
        comparisons.append(planned)
        everywhere += scenarios
    for level in (shared, explicit):
        check_effect(_written(level), everywhere)
    return Experiment(out, comparisons)


def _written(level: Mapping[str, Any]) -> dict[str, str]:
    """Returns the keys of the settings that a level gives, each with how it is written."""
    return written_keys(level, level.get(SETTINGS, ()))


def _merged(*levels: Mapping[str, Any]) -> dict[str, Any]:
    """Merges levels of what says what is compared; each goes before those to its left.

    Settings add up, where a later one of a key goes before; an empty list of them drops those so far.
    """
    merged = {name: value for level in levels for name, value in level.items() if name in ASKED}
    settings: list[str] = []
    for level in levels[1:]:
        if SETTINGS in level:
            settings = [*settings, *level[SETTINGS]] if level[SETTINGS] else []
    return merged | {SETTINGS: settings}


def _values(context: click.Context, file: Path, table: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """Returns the keys of a table as parameters of the command, of the types that these have."""
    parameters = {_key(parameter): parameter for parameter in context.command.params if parameter.name in names}
    for key in table:
        if key not in parameters:
            raise ConfigError(f"{file}: {unknown_name('key', key, parameters)}")
    return {parameters[key].name or "": _cast(context, file, key, parameters[key], table[key]) for key in table}


def _key(parameter: click.Parameter) -> str:
    """Returns what an option is called in a file: `ranks_per_node` of --ranks-per-node."""
    return parameter.opts[0].removeprefix("--").replace("-", "_")


def _cast(context: click.Context, file: Path, key: str, parameter: click.Parameter, value: Any) -> Any:
    is_list = isinstance(value, list)
    if isinstance(value, dict) or (is_list and not parameter.multiple):
        raise ConfigError(f"{file}: {key} takes one value, not {value!r}")
    words = [str(each) for each in value] if is_list else str(value)
    try:
        return parameter.process_value(context, [words] if parameter.multiple and not is_list else words)
    except click.UsageError as error:
        raise ConfigError(f"{file}: {key} = {value!r}: {error.message.rstrip('.')}") from None


def _planned(label: str, asked: Mapping[str, Any]) -> tuple[PlannedComparison, list[Scenario]]:
    """Returns the comparison, and the scenario of each of its variants."""
    options = dict(asked)
    variants, repeats = parse_variants(options.pop("systems")), options.pop("repeats")
    _refuse_system(options[SETTINGS])
    scenario = scenario_from(**options, system=variants[0].system, settles=False)
    check_shared_options(scenario, variants)
    refuse_shared_tier(scenario)
    settings = flat_settings(scenario)
    scenario = assign(scenario, _absolute(f"{key}={settings[key]}" for key in PATHS))
    variants = tuple(each.model_copy(update={"assignments": tuple(_absolute(each.assignments))}) for each in variants)
    for variant in variants:
        check_system(variant.system)
    scenarios = [variant.of(scenario) for variant in variants]
    refuse_idle_variants(variants, scenarios)
    return PlannedComparison.plan(label, scenario, variants, repeats), scenarios


def refuse_idle_variants(variants: Iterable[Variant], scenarios: Iterable[Scenario]) -> None:
    """Raises ConfigError for a setting of a variant's own that changes nothing in its scenario."""
    for variant, scenario in zip(variants, scenarios, strict=True):
        keys = {setting_key(each): f"--systems {variant.label!r}: {each}" for each in variant.assignments}
        check_effect(keys, [scenario])


def _absolute(assignments: Iterable[str]) -> Iterator[str]:
    """Yields the settings with paths that mean the same wherever the comparison is gone on with."""
    for assignment in assignments:
        key, _, value = assignment.partition("=")
        yield f"{key}={Path(value).absolute()}" if key in PATHS and PATHS[key](value) else assignment


def _refuse_system(assignments: Sequence[str]) -> None:
    for assignment in assignments:
        if assignment.partition("=")[0] == SYSTEM:
            raise ConfigError(f"--set {assignment!r}: here {SYSTEM} is a list; use --systems")
