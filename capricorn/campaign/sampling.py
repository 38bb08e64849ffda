"""Faults drawn from a seed: single ones of every kind, and a schedule of those that come at random times. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from capricorn.config.fault_kinds import DISK, FaultKind, kind_of
from capricorn.config.fault_spec import FaultSpec
from capricorn.config.scenario import Scenario, ops_of
from capricorn.errors import ConfigError
from capricorn.hooks import MOMENTS
from capricorn.units import Seconds

MAX_CALL = 12
"""Changes of the store: about as many as an iteration of a small model makes."""
LATE = 9
"""Tenths of the iterations after which the persistent tier is hit, so that there is something on it."""
FIRST, MARGIN = 2, 2
"""Iterations in which faults are injected: from the second on, and so many before the last."""


def draw(kinds: Sequence[str], scenario: Scenario, seed: int, number: int) -> FaultSpec:
    """Returns the fault of that number: the same however many are drawn, and every kind as often as any other.

    Args:
        kinds: names of the kinds that are drawn from.
        scenario: the run that the fault comes to.
        seed: of the campaign.
        number: of the fault, from 0.

    Raises:
        ConfigError: the run is too short for a fault.
    """
    last = _last_iteration(scenario)
    turn, place = divmod(number, len(kinds))
    order = sorted(kinds)
    Random(f"{seed}-kinds-{turn}").shuffle(order)
    rng = Random(f"{seed}-{number}")
    kind, facts = order[place], kind_of(order[place])
    fields: dict[str, Any] = {"kind": kind, "op": _draw_moment(scenario, rng)}
    if facts.target:
        fields[facts.target] = _draw_target(facts.target, scenario, rng)
    if facts.places:
        fields["where"] = rng.choice(_places(facts, scenario))
    if facts.seconds is not None:
        fields["seconds"] = rng.choice(facts.lasts or (facts.seconds,))
    if facts.takes_call:
        fields["call"] = rng.randint(1, MAX_CALL)
    is_late = facts.hits_persistent_tier or fields.get("where") == DISK
    fields["iteration"] = rng.randint(max(FIRST, LATE * last // 10) if is_late else FIRST, last)
    return FaultSpec.make(fields, "a drawn fault")


def _places(facts: FaultKind, scenario: Scenario) -> list[str]:
    """Returns the places of a kind that a run of that scenario has; all if it has none."""
    is_here = ["one machine" not in needs or not scenario.launch.nnodes for needs in facts.places.values()]
    return [place for place, here in zip(facts.places, is_here, strict=True) if here] or list(facts.places)


def draws_persistent_tier(seed: int, number: int) -> bool:
    """Returns whether that case has a persistent tier though it needs none: one in two."""
    return Random(f"{seed}-slow-tier-{number}").random() < 0.5


def draws_pid_1(seed: int, number: int) -> bool:
    """Returns whether that case has a launcher that is process 1, where that can be: one in twelve."""
    return Random(f"{seed}-pid-1-{number}").random() < 1 / 12


def schedule(
    scenario: Scenario, mtbf_s: Seconds, iteration_s: Seconds, node_loss_frac: float, seed: int
) -> tuple[FaultSpec, ...]:
    """Returns failures of random workers, and some of whole nodes, with exponential times between them.

    Time is that of training without checkpoints and without failures, in which iteration i ends at i x `iteration_s`:
    so faults come to all systems at the same places, however long they take to come there.

    Args:
        scenario: the run that they come to.
        mtbf_s: the mean time between two of them.
        iteration_s: what an iteration takes without checkpoints and failures.
        node_loss_frac: part of them that takes a whole node along.
        seed: of the campaign.

    Raises:
        ConfigError: the run is too short for a fault.
    """
    rng = Random(f"{seed}-schedule")
    last, faults = _last_iteration(scenario), []
    at_s = rng.expovariate(1 / mtbf_s)
    while (iteration := 1 + int(at_s / iteration_s)) <= last:
        kind, target = ("node-loss", "node") if rng.random() < node_loss_frac else ("kill", "rank")
        fields = {"kind": kind, target: _draw_target(target, scenario, rng), "op": _draw_moment(scenario, rng)}
        faults.append(FaultSpec.make(fields | {"iteration": iteration}, "a drawn fault"))
        at_s += rng.expovariate(1 / mtbf_s)
    return tuple(faults)


def _last_iteration(scenario: Scenario) -> int:
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
    """Returns a moment: one between ops as often as one of an op."""
    if rng.random() < 0.5:
        return rng.choice(MOMENTS)
    return f"{rng.choice(ops_of(scenario.model))}.{rng.choice(('begin', 'end'))}"
