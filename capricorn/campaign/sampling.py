"""Failures drawn from a seed: single ones of every kind, and a schedule of those that come at random times. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import Any, Final

from capricorn.campaign.verdict import DISK
from capricorn.config.fault_spec import KINDS, FaultSpec
from capricorn.config.fields import validate
from capricorn.config.scenario import Scenario, ops_of
from capricorn.errors import ConfigError, unknown_name
from capricorn.hooks import MOMENTS
from capricorn.units import Seconds

LASTS: Final[Mapping[str, tuple[Seconds, ...]]] = MappingProxyType({
    "stop": (0.0, 1.0), "slow-link": (1.0, 2.0), "partition": (1.0, 2.0), "disk-full": (0.0, 1.0),
    "disk-slow": (1.0, 2.0), "clock-jump": (60.0, 3600.0, 1e8),
})  # fmt: skip
"""By kind how long a drawn one may last."""
SLOW_TIER: Final = frozenset({"group-loss", "disk-full", "disk-slow"})
"""Kinds that strike the slow tier, or leave nothing else."""
MAX_CALL = 12
"""Of the store: about as many as an iteration of a small model makes."""
LATE = 8
"""Tenths of the iterations after which the slow tier is struck, so that there is something on it."""
FIRST, MARGIN = 2, 2
"""Iterations that are struck: from the second on, and so many before the last."""


def check_kinds(kinds: Sequence[str]) -> tuple[str, ...]:
    """The kinds, each once; all there are if none is named.

    Raises:
        ConfigError: one is unknown.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise unknown_name("fault", kind, KINDS)
    return tuple(dict.fromkeys(kinds)) or tuple(KINDS)


def draw(kinds: Sequence[str], scenario: Scenario, seed: int, number: int) -> FaultSpec:
    """The failure of that number: the same however many are drawn, and every kind as often as any other.

    Raises:
        ConfigError: the run is too short to be struck.
    """
    last = _last_struck(scenario)
    turn, place = divmod(number, len(kinds))
    order = sorted(kinds)
    Random(f"{seed}-kinds-{turn}").shuffle(order)
    rng = Random(f"{seed}-{number}")
    kind, facts = order[place], KINDS[order[place]]
    fields: dict[str, Any] = {"kind": kind, "op": _draw_moment(scenario, rng)}
    if facts.target:
        fields[facts.target] = _draw_target(facts.target, scenario, rng)
    if facts.places:
        fields["where"] = rng.choice(facts.places)
    if facts.seconds is not None:
        fields["seconds"] = rng.choice(LASTS[kind])
    if facts.takes_call:
        fields["call"] = rng.randint(1, MAX_CALL)
    is_late = kind in SLOW_TIER or fields.get("where") == DISK
    fields["iteration"] = rng.randint(max(FIRST, LATE * last // 10) if is_late else FIRST, last)
    return validate(FaultSpec, fields, "a drawn fault")


def strikes_slow_tier(fault: FaultSpec) -> bool:
    """Whether the failure strikes what lies on disk, or leaves nothing else."""
    return fault.kind in SLOW_TIER or fault.where == DISK


def draws_slow_tier(seed: int, number: int) -> bool:
    """Whether that case has a slow tier though it needs none: one in two."""
    return Random(f"{seed}-slow-tier-{number}").random() < 0.5


def schedule(
    scenario: Scenario, mtbf_s: Seconds, iteration_s: Seconds, node_loss_frac: float, seed: int
) -> tuple[FaultSpec, ...]:
    """Failures of random workers, and some of whole nodes, with exponential times between them.

    Time is that of training without checkpoints and without failures, in which iteration i ends at i x `iteration_s`:
    so all systems are struck at the same places, however long they take to come there.

    Raises:
        ConfigError: the run is too short to be struck.
    """
    rng = Random(f"{seed}-schedule")
    last, faults = _last_struck(scenario), []
    at_s = rng.expovariate(1 / mtbf_s)
    while (iteration := 1 + int(at_s / iteration_s)) <= last:
        kind, target = ("node-loss", "node") if rng.random() < node_loss_frac else ("kill", "rank")
        fields = {"kind": kind, target: _draw_target(target, scenario, rng), "op": _draw_moment(scenario, rng)}
        faults.append(validate(FaultSpec, fields | {"iteration": iteration}, "a drawn fault"))
        at_s += rng.expovariate(1 / mtbf_s)
    return tuple(faults)


def _last_struck(scenario: Scenario) -> int:
    last = scenario.train.iterations - MARGIN
    if last < FIRST:
        raise ConfigError(
            f"--iterations {scenario.train.iterations} is too short for failures to be drawn; use {FIRST + MARGIN} "
            "or more"
        )
    return last


def _draw_target(target: str, scenario: Scenario, rng: Random) -> int:
    topology = scenario.topology
    return rng.randrange(topology.world_size if target == "rank" else topology.num_nodes)


def _draw_moment(scenario: Scenario, rng: Random) -> str:
    """One between ops as often as one of an op."""
    if rng.random() < 0.5:
        return rng.choice(MOMENTS)
    return f"{rng.choice(ops_of(scenario.model))}.{rng.choice(('begin', 'end'))}"
