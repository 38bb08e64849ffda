"""Which cases a campaign has: failures that are given or drawn, under each system to which they can happen. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from capricorn.campaign.campaign_record import GIVEN, Case, GroundName, Mount, NotRun, scenario_of
from capricorn.campaign.sampling import SLOW_TIER, draw, draws_slow_tier, strikes_slow_tier
from capricorn.compare.compare_record import Variant
from capricorn.config.fault_spec import KINDS, LINK_KINDS, FaultSpec
from capricorn.config.fields import validate
from capricorn.config.scenario import Scenario
from capricorn.errors import ConfigError
from capricorn.faults.applicability import why_not
from capricorn.systems.registry import find

PROGRAM: Final = "capricorn-bench"
PERSIST_EVERY = 2
"""Iterations between two checkpoints on the slow tier, in cases that need one and are given none."""
MOUNTS: Final[Mapping[str, Mount]] = MappingProxyType({"tmpfs-full": "store", "disk-full": "disk"})
"""By kind what has to lie on a small file system."""


class Asked(NamedTuple):
    """What a campaign is asked for."""

    options: tuple[str, ...]
    scenarios: Mapping[GroundName, Scenario]
    variants: tuple[Variant, ...]
    faults: tuple[FaultSpec, ...]
    """Explicit cases; none if they are to be drawn."""
    kinds: tuple[str, ...]
    num_drawn: int
    repeats: int
    refused: Mapping[str, str]
    """By kind: why this machine cannot have it."""

    @property
    def seed(self) -> int:
        return self.scenarios[GIVEN].train.seed


def plan_cases(asked: Asked) -> tuple[list[Case], list[NotRun]]:
    """The cases in their order, system after system for each failure, and what cannot happen.

    Raises:
        ConfigError: an explicit failure does not fit the scenario, or nothing can happen to any of the systems.
    """
    explicit = [(number, fault) for number, fault in enumerate(asked.faults)]
    numbered = explicit or list(_drawn(asked))
    cases: list[Case] = []
    refused: dict[tuple[str, str], NotRun] = {}
    for number, fault in numbered:
        for variant in asked.variants:
            case = _case(asked, number, fault, variant)
            reason = _why_not(asked, variant, case)
            if reason:
                refused.setdefault((variant.label, fault.kind), _not_run(variant, fault.kind, reason))
            else:
                cases += [case.model_copy(update={"repeat": repeat}) for repeat in range(1, asked.repeats + 1)]
    for variant in asked.variants if not explicit else ():
        for kind in asked.kinds:
            if reason := _why_never(asked, variant, kind):
                refused.setdefault((variant.label, kind), _not_run(variant, kind, reason))
    if not cases:
        raise ConfigError(f"none of these failures can happen here: {next(iter(refused.values())).reason}")
    return cases, list(refused.values())


def _not_run(variant: Variant, kind: str, reason: str) -> NotRun:
    return NotRun(system=variant.label, kind=kind, reason=reason)


def _drawn(asked: Asked) -> Iterator[tuple[int, FaultSpec]]:
    possible = [kind for kind in asked.kinds if any(not _why_never(asked, each, kind) for each in asked.variants)]
    for number in range(asked.num_drawn if possible else 0):
        yield number, draw(possible, asked.scenarios[GIVEN], asked.seed, number)


def _why_never(asked: Asked, variant: Variant, kind: str) -> str:
    """Why no failure of that kind can happen to the system; empty if one can."""
    reasons = [_why_not(asked, variant, _case(asked, 0, fault, variant)) for fault in _all_places(kind)]
    return reasons[0] if all(reasons) else ""


def _all_places(kind: str) -> Iterable[FaultSpec]:
    facts = KINDS[kind]
    target = {facts.target: 0} if facts.target else {}
    fields = {"kind": kind, "iteration": 1} | target
    return [validate(FaultSpec, fields | ({"where": place} if place else {}), kind) for place in facts.places or ("",)]


def _why_not(asked: Asked, variant: Variant, case: Case) -> str:
    if reason := asked.refused.get(case.fault.kind, ""):
        return reason
    return why_not(case.fault, scenario_of(asked.scenarios, variant, case))


def _case(asked: Asked, number: int, fault: FaultSpec, variant: Variant) -> Case:
    case = Case(
        number=number,
        system=variant.label,
        fault=fault,
        ground=_ground(asked, fault, variant),
        mount=MOUNTS.get(fault.kind, ""),
        persist_every=_persist_every(asked, number, fault, variant),
    )
    return case.model_copy(update={"repro": repro(asked.options, case)})


def _ground(asked: Asked, fault: FaultSpec, variant: Variant) -> GroundName:
    """A cluster that was asked for has links and a pace of its own."""
    if asked.scenarios[GIVEN].cluster.is_emulated:
        return GIVEN
    if fault.kind in LINK_KINDS:
        return "links"
    return "paced" if strikes_slow_tier(fault) and find(variant.system).replicates else GIVEN


def _persist_every(asked: Asked, number: int, fault: FaultSpec, variant: Variant) -> int:
    """As it was given; else some where there has to be a slow tier, and in every second case that was drawn."""
    given = asked.scenarios[GIVEN].persist.every
    if given or not find(variant.system).replicates:
        return given
    drawn = not asked.faults and draws_slow_tier(asked.seed, number)
    return PERSIST_EVERY if drawn or strikes_slow_tier(fault) else 0


def grounds_of(kinds: Iterable[str]) -> set[GroundName]:
    """What these kinds may need beside the ground that is given."""
    needs: dict[GroundName, bool] = {
        "links": any(kind in LINK_KINDS for kind in kinds),
        "paced": any(kind in SLOW_TIER or "disk" in KINDS[kind].places for kind in kinds),
    }
    return {ground for ground, is_needed in needs.items() if is_needed}


def repro(options: Sequence[str], case: Case) -> str:
    """The command that repeats the case and nothing else."""
    words = [PROGRAM, "faults", *options, "--systems", case.system, "--fault", str(case.fault)]
    if case.persist_every and "--persist-every" not in options:
        words += ["--persist-every", str(case.persist_every)]
    return shlex.join(words)
