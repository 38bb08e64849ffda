"""`capricorn-bench list`: the names that the other commands know."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any, TypeAlias

import rich_click as click

from capricorn.config.cluster import DEVICES, LOCAL, STORAGES, ClusterConfig
from capricorn.config.fault_kinds import kind_of, known_kinds
from capricorn.config.fault_spec import spelling
from capricorn.config.presets import CLUSTERS, MODELS
from capricorn.config.resolve import load_cluster, load_model
from capricorn.config.setting_list import all_settings
from capricorn.errors import ConfigError
from capricorn.sizing.memory import STATE_BYTES_PER_PARAM, active_params, total_params
from capricorn.systems.registry import known
from capricorn.units import format_bytes, format_rate

from .options import json_option
from .output import console, print_json
from .values import system_settings

NONE = "-"
SETTINGS = "settings"
KINDS_OF_NAMES = ("models", "systems", "clusters", "faults")

Details: TypeAlias = dict[str, dict[str, Any]]


@click.command(name="list")
@click.argument("what", type=click.Choice([*KINDS_OF_NAMES, SETTINGS]), required=False, metavar="[WHAT]")
@json_option
def list_names(what: str | None, as_json: bool) -> int:
    """List WHAT: models, systems, clusters or faults, by default all of these; or settings, which --set changes."""
    found = {kind: _DETAILS[kind]() for kind in ([what] if what else KINDS_OF_NAMES)}
    if as_json:
        names = {kind: list(details) for kind, details in found.items()}
        print_json(names | {"details": {name: facts for details in found.values() for name, facts in details.items()}})
        return 0
    from capricorn.report.terminal.listing import names_table

    if what == SETTINGS:
        found = dict(_by_section(found[SETTINGS]))
    for kind, details in found.items():
        console().print(names_table(kind, details))
    return 0


def _models() -> Details:
    return {name: _model(name) for name in MODELS}


def _model(name: str) -> dict[str, Any]:
    model = load_model(name)
    total = total_params(model)
    return {
        "params": total,
        "active": active_params(model),
        "state_bytes": STATE_BYTES_PER_PARAM * total,
        "layers": model.num_layers,
        "experts": f"{model.num_experts} top-{model.top_k}",
    }


def _systems() -> Details:
    return {
        name: {
            "what": info.what,
            "restores from": ", ".join(info.tiers) or NONE,
            "here": "yes" if info.is_installed else f"no: {info.install}",
        }
        for name, info in known().items()
    }


def _clusters() -> Details:
    return {name: _cluster(name) for name in (LOCAL, *CLUSTERS)}


def _cluster(name: str) -> dict[str, Any]:
    if name == LOCAL:
        return {"devices": "this machine's", "flops": NONE, "link": NONE, "storage": NONE}
    cluster = ClusterConfig.model_validate(load_cluster(name))
    node, total = STORAGES[cluster.storage]
    in_all = f", {format_bytes(total)}/s in all" if total else ""
    return {
        "devices": f"{cluster.devices_per_node} x {cluster.accelerator}",
        "flops": f"{DEVICES[cluster.accelerator] / 1e12:.0f} Tflop/s",
        "link": format_rate(cluster.link_bytes_per_s or 0),
        "storage": f"{cluster.storage}: {format_bytes(node)}/s a node{in_all}",
    }


def _faults() -> Details:
    return {name: _fault(name) for name in known_kinds()}


def _fault(name: str) -> dict[str, Any]:
    try:
        return {"spelling": spelling(name), "what": kind_of(name).what}
    except ConfigError as error:  # an installed one that is broken must not hide the others
        return {"spelling": NONE, "what": str(error)}


def _settings() -> Details:
    found = [(setting, "") for setting in all_settings()]
    found += [(setting, f" ({', '.join(systems)})") for setting, systems in system_settings()]
    return {
        setting.key: {
            "type": setting.describe_type(),
            "default": setting.describe_default(),
            "what": f"{setting.description}{whose}",
        }
        for setting, whose in found
    }


def _by_section(settings: Details) -> Iterator[tuple[str, Details]]:
    """Splits the settings at each new section; within one, the names of fields say enough."""
    for section, keys in groupby(settings, key=lambda key: key.rpartition(".")[0]):
        yield f"{section}.", {key.rpartition(".")[2]: settings[key] for key in keys}


_DETAILS: dict[str, Callable[[], Details]] = {
    "models": _models, "systems": _systems, "clusters": _clusters, "faults": _faults, SETTINGS: _settings,
}  # fmt: skip
