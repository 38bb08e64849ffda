"""The options of the commands, made from the fields of a scenario, and the scenario that they stand for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, TypeAlias

import rich_click as click
from click.core import ParameterSource

from capricorn.config.cluster import LOCAL, ClusterConfig
from capricorn.config.fault_spec import FaultSpec
from capricorn.config.fields import Option, validate
from capricorn.config.launch_config import LaunchConfig
from capricorn.config.launcher_environment import launch_options
from capricorn.config.own_code import absolute
from capricorn.config.resolve import assign, canonical_key, load_cluster, load_model, note_older, parse_ckpt
from capricorn.config.scenario import CUDA_BLOCK_BYTES, ROUTER, Scenario, TrainConfig
from capricorn.config.setting_list import Setting, options, sections
from capricorn.errors import ConfigError, note_once
from capricorn.sizing.scale import scale
from capricorn.systems.effect import check_effect
from capricorn.systems.registry import check_system
from capricorn.systems.settings import settle
from capricorn.units import KIB

from .output import HELP, PROGRAM
from .values import KINDS_OF_VALUE, SYSTEM_LIST, WholeNumber

Command: TypeAlias = Callable[..., int]
Options: TypeAlias = Sequence[Callable[[Command], Command]]

AUTO = "auto"
DEFAULT_ITERATIONS, DEFAULT_WARMUP = TrainConfig().iterations, TrainConfig().warmup
SEND_BUFFER_BYTES, CHUNK_BYTES = 16 * KIB, 64 * KIB
"""Of an emulated run: links are slower by orders of magnitude there, and what lies in buffers is in everybody's way."""
DEFAULT_NODES = 2
DEFAULT_REPLICAS = 2

GROUPS = ("What", "Work", "Place", "Checkpoints", "Failures", "Machines", "Output")
"""Headings of the help, in its order; what is in no group, as --help, is about output."""


def command(*examples: str, **settings: Any) -> Callable[[Command], click.Command]:
    """Makes a command whose help is in groups and ends with examples of what may follow the program's name."""
    style = {"rich_help_config": HELP | {"options_panel_title": GROUPS[-1]}}
    settings["context_settings"] = style | settings.get("context_settings", {})
    epilog = "\n\n".join(["Examples:", *(f"$ {PROGRAM} {example}" for example in examples)])
    panels = [click.RichOptionPanel(group) for group in GROUPS]
    made: Callable[[Command], click.Command] = click.command(epilog=epilog, panels=panels, **settings)
    return made


def option_of(setting: Setting) -> Callable[[Command], Command]:
    """Makes the option of a field: its name and group as the field's `Option` says, all else as the field does."""
    option, kind = _option(setting), setting.info.annotation
    default = setting.default if option.written is None else option.written
    is_shown = not option.computed and default not in (None, "", (), False)
    return click.option(
        option.name,
        option.parameter_name,
        type=None if kind is bool else _kind_of_value(setting, option),
        default=None if option.computed else default,
        show_default=is_shown,
        metavar=option.metavar or None,
        multiple=isinstance(default, tuple),
        is_flag=kind is bool,
        panel=option.group,
        help=setting.description,
    )


def _option(setting: Setting) -> Option:
    assert setting.option is not None
    return setting.option


def _kind_of_value(setting: Setting, option: Option) -> click.ParamType[Any]:
    if setting.choices:
        return click.Choice(setting.choices)
    if option.metavar in KINDS_OF_VALUE:
        return KINDS_OF_VALUE[option.metavar]
    return WholeNumber(setting.least) if setting.info.annotation is int and option.written is None else click.STRING


SYSTEM_PARAMETER, SETTINGS = "system", "assignments"
"""Names in Python of --system, and of --set, of which several add up."""
_BY_PARAMETER = {_option(setting).parameter_name: setting for setting in options()}
PARAMETERS = frozenset({*_BY_PARAMETER, SETTINGS})
"""Names in Python of all options that a scenario is made from."""

system_option = option_of(_BY_PARAMETER[SYSTEM_PARAMETER])
out_option = click.option("--out", type=click.Path(path_type=Path), default="results", show_default=True,
                          panel="Output", help="Put the folders of runs here")  # fmt: skip
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else")
_SCENARIO_OPTIONS: Options = (
    *(option_of(setting) for name, setting in _BY_PARAMETER.items() if name != SYSTEM_PARAMETER),
    click.option("--set", SETTINGS, multiple=True, metavar="KEY=VALUE", type=KINDS_OF_VALUE["KEY=VALUE"], panel="What",
                 help="Change any setting of `list settings`; repeatable"),
)  # fmt: skip
_OUTPUT_OPTIONS: Options = (
    click.option("--repeats", type=WholeNumber(1), default=1, show_default=True, metavar="N", panel="Work",
                 help="Do it all this many times"),
    out_option,
    click.option("--json", "as_json", is_flag=True, panel="Output", help="Print a JSON summary and nothing else"),
    click.option("-q", "--quiet", is_flag=True, panel="Output", help="Print the verdict only"),
    click.option("-v", "--verbose", is_flag=True, panel="Output", help="Print every iteration, one line each"),
)  # fmt: skip


def listed(context: click.Context, parameter: click.Parameter, values: Sequence[str]) -> tuple[str, ...]:
    """Returns the words of all values, each a list with commas."""
    return tuple(word.strip() for value in values for word in value.split(","))


def systems_option(default: str, description: str) -> Callable[[Command], Command]:
    """Makes --systems, of which several are one list."""
    return click.option(
        "--systems", multiple=True, callback=listed, default=[default], show_default=True, type=SYSTEM_LIST,
        metavar="A,B:KEY=VALUE,...", panel="What", help=description,
    )  # fmt: skip


def scenario_options(command: Command) -> Command:
    """Gives a command the options of a scenario; it is called with `scenario` in their place."""

    @wraps(command)
    def with_scenario(**options: Any) -> int:
        scenario = scenario_from(**{name: options.pop(name) for name in PARAMETERS & options.keys()})
        return command(scenario=scenario, **options)

    return _decorate(with_scenario, _SCENARIO_OPTIONS)


def unresolved_options(command: Command) -> Command:
    """Gives a command the options of a scenario as they are written; `scenario_from` resolves them."""
    return _decorate(command, _SCENARIO_OPTIONS)


def output_options(command: Command) -> Command:
    """Gives a command `repeats`, `out`, `as_json`, `quiet` and `verbose`."""
    return _decorate(command, _OUTPUT_OPTIONS)


def given(context: click.Context) -> set[str]:
    """Returns the names of the parameters that are on the command line."""
    names = (parameter.name or "" for parameter in context.command.params)
    return {name for name in names if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}


def refuse_without_effect(*scenarios: Scenario) -> None:
    """Raises ConfigError for an option or a setting on the command line that has no effect in any of the scenarios."""
    context = click.get_current_context()
    assert context is not None
    check_effect(written_keys(given(context), context.params[SETTINGS]), scenarios)


def written_keys(parameters: Iterable[str], assignments: Iterable[str]) -> dict[str, str]:
    """Returns the keys of the settings that options and `key=value` give, each with how it is written."""
    settings = [_BY_PARAMETER[name] for name in sorted(parameters) if name in _BY_PARAMETER]
    keys = {canonical_key(each.partition("=")[0]): f"--set {each}" for each in assignments}
    return {setting.key: _option(setting).name for setting in settings} | keys


def refuse_shared_tier(scenario: Scenario) -> None:
    """Raises ConfigError if several runs would find each other's checkpoints in one --persist-dir."""
    if scenario.persist.dir:
        raise ConfigError(
            f"--persist-dir {scenario.persist.dir}: several runs would go on from each other's checkpoints there; "
            "leave it out, and each has a folder of its own"
        )


def _decorate(command: Command, options: Options) -> Command:
    for option in reversed(options):
        command = option(command)
    return command


def scenario_from(*, assignments: Sequence[str] = (), settles: bool = True, **given: Any) -> Scenario:
    """Returns the scenario that the options stand for, checked as far as it can be without this machine.

    Args:
        assignments: What --set was given.
        settles: Whether the options of the system are its own; otherwise several systems share them, and each takes
            what it has.
        given: Values of other options by their names in Python; without one, or with None, it has its default.

    Raises:
        ConfigError: an option, a name, a path or a key is wrong.
    """
    written = {name: _option(setting).written for name, setting in _BY_PARAMETER.items()}
    values = {name: value for name, value in (written | given).items() if value is not None}
    model, every, faults = load_model(values.pop("model")), parse_ckpt(values.pop("ckpt")), values.pop("faults")
    if SYSTEM_PARAMETER in values:
        values[SYSTEM_PARAMETER] = absolute(values[SYSTEM_PARAMETER])
    asked = _by_section(values)
    launch = _launch(asked.pop("launch"))
    domains = _cluster(asked.pop("cluster", {}), launch.nnodes)
    buffers = {"send_buffer_bytes": SEND_BUFFER_BYTES} if domains.is_emulated else _blocks(domains)
    planner = {"max_chunk_bytes": CHUNK_BYTES} if domains.is_emulated else _planner(domains, launch)
    copies = min(DEFAULT_REPLICAS, domains.nodes)
    length = min(DEFAULT_WARMUP, asked["train"].get("iterations", DEFAULT_ITERATIONS) - 1)
    parts = asked | {
        "model": model,
        "train": {"warmup": length} | asked["train"],
        "cluster": domains,
        "launch": launch,
        "system": {"every": every, "replicas": copies} | buffers | asked["system"],
        "planner": planner | asked["planner"],
        "faults": tuple(map(FaultSpec.parse, faults)),
    }
    note_older(assignments)
    scenario = scale(assign(validate(Scenario, parts, "options"), assignments))
    check_system(scenario.system.name)
    return _checked(settle(scenario) if settles else scenario)


def _by_section(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the values of options as those of fields, by section."""
    asked: dict[str, dict[str, Any]] = {section: {} for section, _ in sections()}
    for name, value in values.items():
        setting = _BY_PARAMETER[name]
        asked[setting.section][setting.field] = value
    return asked


def _launch(asked: Mapping[str, Any]) -> LaunchConfig:
    """Returns how ranks are started and where machines meet, also by what has started this command on each of them."""
    options, line = launch_options(asked, os.environ)
    if line:
        note_once(line)
    return validate(LaunchConfig, options, "options", lax=True)


def _cluster(asked: Mapping[str, Any], nnodes: int) -> ClusterConfig:
    """Returns the failure domains: what was asked for goes before the cluster's file, and that before the defaults.

    These are two nodes of one rank on the CPU; on CUDA one rank per GPU, split over two nodes if there are two.
    """
    from capricorn.launch.preflight import num_cuda_devices

    nodes, device, name = asked.get("nodes"), asked.get("device", AUTO), asked.get("name", LOCAL)
    if nnodes and nodes not in (None, nnodes):
        raise ConfigError(f"--nodes {nodes} contradicts --nnodes {nnodes}: real machines are counted by --nnodes alone")
    fields = load_cluster(name)
    if name != LOCAL and device == AUTO:
        device = "cpu"
    num_devices = 0 if device == "cpu" else num_cuda_devices()
    count = nnodes or nodes or (1 if num_devices == 1 else DEFAULT_NODES)
    ranks = asked.get("ranks_per_node") or max(1, num_devices // (1 if nnodes else count))
    chosen = {"nodes": count, "ranks_per_node": ranks, "device": device}
    first = {key: value for key, value in asked.items() if key not in ("name", "device")}
    return validate(ClusterConfig, chosen | fields | first, f"--cluster {name}")


def _planner(cluster: ClusterConfig, launch: LaunchConfig) -> dict[str, str]:
    """Returns the default of `planner.spans` where the CPU that computes also moves the bytes over its own loopback.

    They move best while it waits, in the all-to-alls: the opposite of what is idle where a network moves them.
    """
    return {"spans": "none"} if _is_on_cpu(cluster) and not launch.nnodes else {}


def _blocks(cluster: ClusterConfig) -> dict[str, int]:
    """Returns the default of `system.block_bytes` where it is another: a device copies large blocks at once."""
    return {} if _is_on_cpu(cluster) else {"block_bytes": CUDA_BLOCK_BYTES}


def _is_on_cpu(cluster: ClusterConfig) -> bool:
    from capricorn.launch.preflight import num_cuda_devices

    return cluster.device == "cpu" or (cluster.device == AUTO and not num_cuda_devices())


def _checked(scenario: Scenario) -> Scenario:
    """Returns the scenario with its device resolved, once the names that no model checks are found to be known."""
    from capricorn.launch.preflight import resolve_device

    if scenario.loads.source != ROUTER:
        # Also reads a trace, so that its faults are told before anything starts; numpy takes a while to import.
        from capricorn.loads.load_source import source_shares

        train = scenario.train
        source_shares(scenario.loads, scenario.model, num_iterations=train.iterations, seed=train.seed)
    if scenario.data.path != "stdlib" and not Path(scenario.data.path).exists():
        raise ConfigError(f"--data {scenario.data.path}: no such file or folder; name one, or stdlib")
    return resolve_device(scenario)
