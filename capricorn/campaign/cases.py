"""Which cases a campaign has: faults that are named or drawn, under each system to which they can happen. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from capricorn.campaign.campaign_record import (
    AS_CONFIGURED,
    LINKS,
    PACED,
    PID_1,
    Case,
    NotRun,
    TestbedName,
    place_of,
    scenario_of,
    shape_of,
    testbed_name,
)
from capricorn.campaign.sampling import draw, draws_persistent_tier, draws_pid_1
from capricorn.campaign.testbeds import ENTER
from capricorn.compare.compare_record import Variant
from capricorn.config.fault_kinds import kind_of
from capricorn.config.fault_spec import FaultSpec
from capricorn.config.resolve import canonical_key
from capricorn.config.scenario import Scenario
from capricorn.config.setting_list import options as setting_options
from capricorn.errors import ConfigError
from capricorn.faults.applicability import why_not
from capricorn.systems.effect import why_no_effect
from capricorn.systems.registry import find

PROGRAM: Final = "capricorn-bench"
PERSIST_EVERY = 2
"""Iterations between two checkpoints on the persistent tier, in cases that need one and have none configured."""


class Asked(NamedTuple):
    """What a campaign is asked for."""

    options: tuple[str, ...]
    scenarios: Mapping[TestbedName, Scenario]
    variants: tuple[Variant, ...]
    faults: tuple[FaultSpec, ...]
    """Explicit cases; none if they are to be drawn."""
    kinds: tuple[str, ...]
    num_drawn: int
    repeats: int
    refused: Mapping[str, str]
    """Why this machine cannot have a kind, for those it cannot."""
    shapes: tuple[str, ...] = ()
    """Shapes that drawn faults come to in turn, `3x1`; none leaves what is configured."""

    @property
    def seed(self) -> int:
        return self.scenarios[AS_CONFIGURED].train.seed

    def shape(self, number: int) -> str:
        """Returns the shape of the run that the fault of that number comes to."""
        return self.shapes[number % len(self.shapes)] if self.shapes else ""

    def configured(self, number: int) -> Scenario:
        """Returns what is configured, in that shape."""
        return self.scenarios[testbed_name(AS_CONFIGURED, self.shape(number))]


def plan_cases(asked: Asked) -> tuple[list[Case], list[NotRun]]:
    """Returns the cases in their order, system after system for each fault, and what cannot happen.

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
        yield number, draw(possible, asked.configured(number), asked.seed, number)


def _why_never(asked: Asked, variant: Variant, kind: str) -> str:
    """Returns why no fault of that kind can happen to the system; nothing if one can."""
    if reason := asked.refused.get(kind, ""):
        return reason
    reasons = [_why_not(asked, variant, _case(asked, 0, fault, variant)) for fault in _all_places(kind)]
    return reasons[0] if all(reasons) else ""


def _all_places(kind: str) -> Iterable[FaultSpec]:
    facts = kind_of(kind)
    target = {facts.target: 0} if facts.target else {}
    fields = {"kind": kind, "iteration": 1} | target
    return [FaultSpec.make(fields | ({"where": place} if place else {}), kind) for place in facts.places or ("",)]


def _why_not(asked: Asked, variant: Variant, case: Case) -> str:
    if reason := asked.refused.get(case.fault.kind, ""):
        return reason
    return why_not(case.fault, scenario_of(asked.scenarios, variant, case))


def _case(asked: Asked, number: int, fault: FaultSpec, variant: Variant) -> Case:
    case = Case(
        number=number,
        system=variant.label,
        fault=fault,
        testbed=testbed_name(_place(asked, number, fault, variant), asked.shape(number)),
        mount=kind_of(fault.kind).fills,
        persist_every=_persist_every(asked, number, fault, variant),
    )
    scenario = scenario_of(asked.scenarios, variant, case)
    return case.model_copy(update={"repro": repro(asked.options, variant.spelling, case, scenario)})


def _place(asked: Asked, number: int, fault: FaultSpec, variant: Variant) -> str:
    """Returns where the case runs; a cluster that was asked for has links and a pace of its own."""
    facts, configured = kind_of(fault.kind), asked.scenarios[AS_CONFIGURED]
    if configured.launch.nnodes:
        return AS_CONFIGURED
    if not configured.cluster.is_emulated:
        if "links" in facts.needs:
            return LINKS
        if facts.takes_time and find(variant.system).replicates:
            return PACED
    can_be_pid_1 = testbed_name(PID_1, asked.shape(number)) in asked.scenarios and not asked.faults
    return PID_1 if can_be_pid_1 and draws_pid_1(asked.seed, number) else AS_CONFIGURED


def _persist_every(asked: Asked, number: int, fault: FaultSpec, variant: Variant) -> int:
    """Returns what is configured; else some if there has to be a persistent tier, and in half of the drawn cases."""
    configured = asked.scenarios[AS_CONFIGURED].persist.every
    if configured or not find(variant.system).replicates:
        return configured
    launch = asked.scenarios[AS_CONFIGURED].launch
    has_folder = bool(launch.shared_dir) or not launch.nnodes
    drawn = has_folder and not asked.faults and draws_persistent_tier(asked.seed, number)
    return PERSIST_EVERY if drawn or fault.hits_persistent_tier else 0


def repro(options: Sequence[str], system: str, case: Case, scenario: Scenario) -> str:
    """Returns the command that repeats the case and nothing else.

    Args:
        options: of all cases, as words of a command line; those that other systems have are left out.
        system: the word for --systems.
        case: what is repeated.
        scenario: what the case runs.
    """
    words = [PROGRAM, "faults", *_effective(options, scenario), "--systems", system, "--fault", str(case.fault)]
    if place_of(case.testbed) == PID_1:
        words = [*ENTER, *words]
    if shape := shape_of(case.testbed):
        nodes, _, ranks = shape.partition("x")
        words += ["--nodes", nodes, "--ranks-per-node", ranks]
    if case.persist_every and "--persist-every" not in words and not why_no_effect("persist.every", scenario):
        words += ["--persist-every", str(case.persist_every)]
    return shlex.join(words)


def _effective(options: Sequence[str], scenario: Scenario) -> Iterator[str]:
    """Yields the options, and their values, that change something in the scenario."""
    settings = {setting.option.name: setting for setting in setting_options() if setting.option}
    words = iter(options)
    for word in words:
        setting = settings.get(word)
        value = [] if setting and setting.info.annotation is bool else [next(words)]
        key = setting.key if setting else canonical_key(value[0].partition("=")[0])
        if not why_no_effect(key, scenario):
            yield from (word, *value)
