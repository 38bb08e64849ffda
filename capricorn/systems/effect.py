"""Which settings change anything in a run: by its system, and by what else is set. One table; a field in it has a
condition, and one that is not in it always has an effect.

What somebody gave explicitly and what changes nothing is refused, by `check_effect`: silence would let them believe
that it does. Defaults are no affair of this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from capricorn.config.cluster import HARDWARE, MEASURED
from capricorn.config.scenario import ROUTER, ModelConfig, Scenario
from capricorn.errors import ConfigError
from capricorn.systems.registry import SYSTEMS, SystemEntry, find


@dataclass(frozen=True, slots=True)
class OfSystems:
    """A setting that only some systems have."""

    holds: Callable[[SystemEntry], bool]
    unless: Callable[[Scenario], bool] = lambda _: False
    """Whether it has an effect beside its systems."""


@dataclass(frozen=True, slots=True)
class OfModes:
    """A setting that has an effect only beside others."""

    holds: Callable[[Scenario], bool]
    needs: str
    """What has to be set for it, as it follows `has no effect`."""


MAKES_CHECKPOINTS: Final = OfSystems(lambda system: system.kind != "nothing")
KEEPS_COPIES: Final = OfSystems(lambda system: system.kind in ("replicates", "own"))
COUNTS_COPIES: Final = OfSystems(KEEPS_COPIES.holds, unless=lambda scenario: scenario.cluster.is_emulated)
"""The links of a scale model are as slow as that many copies make them, also under a system that keeps none."""
REPLICATES: Final = OfSystems(lambda system: system.replicates)

IS_ON: Final = OfModes(lambda scenario: scenario.system.every > 0, "with --ckpt off")
SENDS: Final = OfModes(lambda scenario: scenario.system.replicas > 1, "without a remote copy: use --replicas 2 or more")
PLANS: Final = OfModes(
    lambda scenario: scenario.planner.spans != "none" or "planner.spans" in find(scenario.system.name).ignores,
    "with planner.spans=none, where nothing is planned (the default where the CPU that computes moves the bytes); "
    "set planner.spans, too",
)
PERSISTS: Final = OfModes(lambda scenario: scenario.persist.every > 0, "without --persist-every N")
HAS_MACHINES: Final = OfModes(lambda scenario: scenario.launch.nnodes > 0, "without --nnodes N")
IS_ONE_MACHINE: Final = OfModes(
    lambda scenario: not scenario.launch.nnodes, "with --nnodes: each machine forks its ranks"
)
IS_FORKED: Final = OfModes(
    lambda scenario: not scenario.launch.by_torchrun, "where torchrun starts the ranks: it has a patience of its own"
)
HAS_LOADS: Final = OfModes(lambda scenario: scenario.loads.source != ROUTER, "without --loads PHASE or FILE")
IS_EMULATED: Final = OfModes(lambda scenario: scenario.cluster.is_emulated, "on --cluster local: name a cluster")
IS_DESCRIBED: Final = OfModes(
    lambda scenario: not scenario.cluster.is_measured, "on a cluster whose durations are given"
)
IS_MEASURED: Final = OfModes(
    lambda scenario: scenario.cluster.is_measured, "without both cluster.attention_s and cluster.expert_s"
)
WRITES: Final = OfModes(
    lambda scenario: find(scenario.system.name).writes_files or scenario.persist.every > 0,
    "as nothing is written to storage: use a system that writes files, or --persist-every N",
)
HAS_NODE_RATE: Final = OfModes(
    lambda scenario: bool(scenario.cluster.storage or scenario.cluster.storage_node_bytes_per_s),
    "without cluster.storage or cluster.storage_node_bytes_per_s",
)
HAS_NO_FLOPS: Final = OfModes(lambda scenario: scenario.cluster.flops_per_s is None, "with cluster.flops_per_s")
HAS_DENSE_LAYERS: Final = OfModes(
    lambda scenario: _target(scenario).family == "mixtral" and not _all_moe(_target(scenario)),
    "on a model without dense layers of family mixtral: set model.num_dense_layers or model.moe_every",
)
HAS_OWN_TOKENS: Final = OfModes(
    lambda scenario: scenario.cluster.rho is None, "with cluster.rho, which sets the tokens of an iteration"
)

Condition = OfSystems | OfModes

_PLANNED: Final = (KEEPS_COPIES, IS_ON, SENDS, PLANS)
_CONDITIONS: Final[Mapping[str, tuple[Condition, ...]]] = MappingProxyType({
    "model.dense_ffn": (HAS_DENSE_LAYERS,),
    "model.batch_size": (HAS_OWN_TOKENS,),
    "loads.first": (HAS_LOADS,),
    **{f"cluster.{key}": (IS_EMULATED,) for key in (
        "link_efficiency", "rate_bytes_per_s", "qos", "links", "storage", "storage_node_bytes_per_s",
        "storage_total_bytes_per_s",
    )},
    **{f"cluster.{key}": (IS_EMULATED, IS_DESCRIBED) for key in HARDWARE},
    **{f"cluster.{key}": (IS_EMULATED, IS_MEASURED) for key in MEASURED},
    "cluster.accelerator": (IS_EMULATED, IS_DESCRIBED, HAS_NO_FLOPS),
    "cluster.storage": (IS_EMULATED, WRITES),
    "cluster.storage_node_bytes_per_s": (IS_EMULATED, WRITES),
    "cluster.storage_total_bytes_per_s": (IS_EMULATED, WRITES, HAS_NODE_RATE),
    "system.every": (MAKES_CHECKPOINTS,),
    "system.options": (MAKES_CHECKPOINTS, IS_ON),
    "system.replicas": (COUNTS_COPIES,),
    "system.block_bytes": (KEEPS_COPIES, IS_ON),
    "system.low_class": (KEEPS_COPIES, IS_ON, SENDS),
    "system.send_buffer_bytes": (KEEPS_COPIES, IS_ON, SENDS),
    "system.idle_priority": (KEEPS_COPIES, IS_ON),
    "system.staging_threads": (KEEPS_COPIES, IS_ON),
    "system.max_lost": (KEEPS_COPIES, IS_ON),
    "planner.spans": (KEEPS_COPIES, IS_ON, SENDS),
    **{f"planner.{key}": _PLANNED for key in ("replan", "gate", "risk", "max_chunk_bytes", "profile_iterations")},
    "persist.every": (REPLICATES, IS_ON),
    "persist.dir": (REPLICATES,),
    "persist.keep": (REPLICATES, IS_ON, PERSISTS),
    "persist.timeout_s": (REPLICATES, IS_ON, PERSISTS),
    "store.keep": (MAKES_CHECKPOINTS,),
    "launch.node_rank": (HAS_MACHINES,),
    **{f"launch.{key}": (HAS_MACHINES,) for key in ("rdzv_endpoint", "spares", "interface", "shared_dir", "job")},
    "launch.restart": (IS_ONE_MACHINE,),
    "launch.frozen_s": (IS_FORKED,),
})  # fmt: skip


def why_no_effect(key: str, scenario: Scenario) -> str:
    """Returns why a setting, as `system.every`, changes nothing in the scenario; nothing if it does."""
    entry = find(scenario.system.name)
    conditions = _CONDITIONS.get("system.options" if key.startswith("system.options.") else key, ())
    missing = (each for each in conditions if isinstance(each, OfSystems) and not each.holds(entry))
    if key in entry.ignores or any(not each.unless(scenario) for each in missing):
        return f"under {entry.label}; systems that have it: {', '.join(_systems_with(key, conditions))}"
    return next((each.needs for each in conditions if isinstance(each, OfModes) and not each.holds(scenario)), "")


def check_effect(keys: Mapping[str, str], scenarios: Iterable[Scenario]) -> None:
    """Checks that each setting changes something in one of the scenarios at least.

    Args:
        keys: the settings that somebody gave, each with how it was written, as `--ckpt`.
        scenarios: what they were given for.

    Raises:
        ConfigError: in one line: one that changes nothing, and what has it.
    """
    several: Sequence[Scenario] = list(scenarios)
    for key, written in keys.items():
        reasons = [why_no_effect(key, scenario) for scenario in several]
        if reasons and all(reasons):
            raise ConfigError(f"{written} has no effect {reasons[0]}")


def _systems_with(key: str, conditions: Sequence[Condition]) -> list[str]:
    wanted = [each for each in conditions if isinstance(each, OfSystems)]
    entries = (entry for entry in SYSTEMS.values() if key not in entry.ignores)
    return [entry.name for entry in entries if all(each.holds(entry) for each in wanted)]


def _target(scenario: Scenario) -> ModelConfig:
    """Returns the model that was asked for, of which a scale model may be trained."""
    target = None if scenario.emulation is None else scenario.emulation.target
    return target or scenario.model


def _all_moe(model: ModelConfig) -> bool:
    return all(map(model.is_moe, range(model.num_layers)))
