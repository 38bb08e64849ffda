"""What `faults` is asked for: options become the record of a campaign of which nothing has been run yet."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import rich_click as click

from capricorn.campaign.campaign_record import GIVEN, CampaignRecord, GroundName
from capricorn.campaign.cases import MOUNTS, Asked, grounds_of, plan_cases
from capricorn.campaign.economics import Economics
from capricorn.campaign.sampling import check_kinds
from capricorn.compare.compare_record import check_shared_options, own_options, parse_variants
from capricorn.config.fault_spec import FaultSpec
from capricorn.config.resolve import assign
from capricorn.config.scenario import Scenario
from capricorn.errors import ConfigError
from capricorn.sizing.scale import scale
from capricorn.systems.registry import check_system

from .experiment import given
from .options import refuse_shared_tier, scenario_from, unresolved_options

SHARED = ("profile_iterations=2", "mu=0.9")
"""Options of the systems that have them, so that Gemini checkpoints in runs as short as these; --set goes before."""
EMULATED = (
    "cluster.name=faults", "cluster.device=cpu", "cluster.rate_bytes_per_s=400Mbit", "system.send_buffer_bytes=16KiB",
    "planner.max_chunk_bytes=64KiB", "planner.spans=layer",
)  # fmt: skip
PACES: Mapping[GroundName, tuple[str, ...]] = {
    "links": ("cluster.attention_s=0.002", "cluster.expert_s=0.002"),
    "paced": ("cluster.attention_s=0.05", "cluster.expert_s=0.1"),
}
"""Small emulated clusters: for failures that need links, and for those that need something to be on disk in time."""
ALWAYS = ("model", "iterations", "seed")
"""Options that a command which repeats a case always names."""
OF_CASES = {"kinds": "--kinds", "count": "--count", "faults": "--fault", "repeats": "--repeats", "repro": "--repro",
            "number": "--case"}  # fmt: skip
"""Options of a campaign of single cases, which failures at random times have none of."""


def planned(context: click.Context) -> CampaignRecord:
    """The record of what the command line asks for.

    Raises:
        ConfigError: an option, a name or a value is wrong, or nothing of it can happen here.
    """
    options = dict(context.params)
    variants = parse_variants(options["systems"])
    for variant in variants:
        check_system(variant.system)
    settings = options["assignments"]
    asked = {name: options[name] for name in _scenario_names() - {"faults", "assignments"}}
    scenario = scenario_from(
        **asked, system=variants[0].system, assignments=(*own_options(SHARED, variants), *settings), settles=False
    )
    check_shared_options(scenario, variants)
    refuse_shared_tier(scenario)
    started = datetime.now(UTC)
    record = CampaignRecord(
        campaign_id=f"{started:%Y%m%d-%H%M%S}-faults-{scenario.model.name}-{secrets.token_hex(2)}",
        started_at=started.isoformat(timespec="seconds"),
        options=scenario_words(context),
        scenarios={GIVEN: scenario},
        variants=variants,
        keep_runs=options["keep_runs"],
    )
    if options["mtbf"] is not None:
        return _with_economics(record, context)
    return _with_cases(record, options)


def scenario_words(context: click.Context) -> tuple[str, ...]:
    """The options of the scenario as words of a command line: those that were given, and the ones that matter most."""
    words: list[str] = []
    for parameter in context.command.params:
        name = parameter.name or ""
        if name in _scenario_names() - {"faults"} and (name in given(context) or name in ALWAYS):
            value = context.params[name]
            values = value if parameter.multiple else [value]
            is_flag = isinstance(parameter, click.Option) and parameter.is_flag
            words += [parameter.opts[0]] if is_flag else [w for each in values for w in (parameter.opts[0], str(each))]
    return tuple(words)


def _scenario_names() -> set[str]:
    """Parameters that say what is trained, where and how."""
    command = click.Command("scenario", callback=unresolved_options(_nothing), params=[])
    return {parameter.name or "" for parameter in getattr(command.callback, "__click_params__", [])}


def _nothing() -> int:
    return 0


def _with_economics(record: CampaignRecord, context: click.Context) -> CampaignRecord:
    for name in sorted(OF_CASES.keys() & given(context)):
        raise ConfigError(f"{OF_CASES[name]} is for single cases: with --mtbf failures come at random times")
    options = context.params
    economics = Economics(mtbf_s=options["mtbf"], node_loss_frac=options["node_loss_frac"])
    return record.model_copy(update={"economics": economics})


def _with_cases(record: CampaignRecord, options: Mapping[str, Any]) -> CampaignRecord:
    explicit = tuple(map(FaultSpec.parse, options["faults"]))
    kinds = check_kinds(tuple(fault.kind for fault in explicit) or options["kinds"])
    scenarios, refused = _grounds(record.scenarios[GIVEN], kinds, options["assignments"])
    asked = Asked(
        options=record.options,
        scenarios=scenarios,
        variants=record.variants,
        faults=explicit,
        kinds=kinds,
        num_drawn=options["count"],
        repeats=options["repeats"],
        refused=refused,
    )
    cases, not_run = plan_cases(asked)
    return record.model_copy(
        update={"scenarios": dict(scenarios), "cases": tuple(cases), "not_run": tuple(not_run)}
    )  # fmt: skip


def _grounds(
    scenario: Scenario, kinds: Sequence[str], settings: Sequence[str]
) -> tuple[Mapping[GroundName, Scenario], Mapping[str, str]]:
    """The scenario on each ground that the kinds need, and by kind why this machine has not what it needs."""
    scenarios: dict[GroundName, Scenario] = {GIVEN: scenario}
    refused = _refused_here(scenario, kinds)
    for ground in sorted(grounds_of(kinds)) if not scenario.cluster.is_emulated else ():
        try:
            scenarios[ground] = scale(assign(scenario, (*EMULATED, *PACES[ground], *settings)))
        except ConfigError as error:
            refused |= {kind: str(error) for kind in kinds if ground in grounds_of([kind])}
    return scenarios, refused


def _refused_here(scenario: Scenario, kinds: Sequence[str]) -> dict[str, str]:
    """By kind why this machine cannot have it."""
    from capricorn.faults.memory_cgroup import why_not

    from .campaign_ground import needed_bytes, why_no_mount

    mounted = MOUNTS.keys() & set(kinds)
    refused = dict.fromkeys(mounted, why_no_mount(needed_bytes(scenario)) if mounted else "")
    refused |= {"oom": why_not()} if "oom" in kinds else {}
    return {kind: reason for kind, reason in refused.items() if reason}
