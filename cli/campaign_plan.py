"""What `faults` is asked for: options become the record of a campaign of which nothing has been run yet."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from datetime import UTC, datetime

import rich_click as click

from capricorn.campaign.campaign_record import AS_CONFIGURED, CampaignRecord
from capricorn.campaign.cases import Asked, plan_cases
from capricorn.campaign.economics import Economics
from capricorn.campaign.testbeds import make_testbeds
from capricorn.compare.compare_record import check_shared_options, own_options, parse_variants
from capricorn.config.fault_kinds import check_kinds
from capricorn.config.fault_spec import FaultSpec
from capricorn.errors import ConfigError
from capricorn.systems.effect import check_effect
from capricorn.systems.registry import check_system
from capricorn.systems.settings import override

from .experiment import refuse_idle_variants
from .options import (
    PARAMETERS,
    SETTINGS,
    SYSTEM_PARAMETER,
    given,
    refuse_shared_tier,
    scenario_from,
    written_keys,
)

SHARED = ("profile_iterations=2", "mu=0.9")
"""Options of the systems that have them, so that Gemini checkpoints in runs as short as these; --set goes before."""
ALWAYS = ("model", "iterations", "seed")
"""Options that a command which repeats a case always names."""
OF_CASES = {"kinds": "--kinds", "count": "--count", "shapes": "--shapes", "faults": "--fault", "repeats": "--repeats",
            "repro": "--repro", "number": "--case"}  # fmt: skip
"""Options of a campaign of single cases, which failures at random times have none of."""
OF_DRAWN = {"kinds": "--kinds", "count": "--count"}
"""Options of failures that are drawn, which has no say where each is named."""
OF_TIMES = {"node_loss_frac": "--node-loss-frac"}
"""Options of failures at random times."""

NOT_WITH_SHAPES = {"nodes": "--nodes", "ranks_per_node": "--ranks-per-node", "nnodes": "--nnodes", "faults": "--fault"}

SCENARIO = PARAMETERS - {SYSTEM_PARAMETER, "faults"}
"""Parameters that say what is trained, where and how."""


def planned(context: click.Context) -> CampaignRecord:
    """Returns the record of what the command line asks for.

    Raises:
        ConfigError: an option, a name or a value is wrong, or nothing of it can happen here.
    """
    options = dict(context.params)
    variants = parse_variants(options["systems"])
    for variant in variants:
        check_system(variant.system)
    settings = options["assignments"]
    asked = {name: options[name] for name in SCENARIO - {SETTINGS}}
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
        scenarios={AS_CONFIGURED: scenario},
        variants=variants,
        keep_runs=options["keep_runs"],
    )
    record = _with_cases(record, context) if options["mtbf"] is None else _with_economics(record, context)
    _refuse_without_effect(record, context)
    return record


def scenario_words(context: click.Context) -> tuple[str, ...]:
    """Returns the options of the scenario as words of a command line: those on it, and the ones that matter most."""
    words: list[str] = []
    for parameter in context.command.params:
        name = parameter.name or ""
        if name in SCENARIO and (name in given(context) or name in ALWAYS):
            value = context.params[name]
            values = value if parameter.multiple else [value]
            is_flag = isinstance(parameter, click.Option) and parameter.is_flag
            words += [parameter.opts[0]] if is_flag else [w for each in values for w in (parameter.opts[0], str(each))]
    return tuple(words)


def _with_economics(record: CampaignRecord, context: click.Context) -> CampaignRecord:
    _refuse_given(context, OF_CASES, "is for single cases: with --mtbf failures come at random times")
    options = context.params
    economics = Economics(mtbf_s=options["mtbf"], node_loss_frac=options["node_loss_frac"])
    return record.model_copy(update={"economics": economics})


def _refuse_without_effect(record: CampaignRecord, context: click.Context) -> None:
    """Raises ConfigError for an option or a setting that changes nothing in any run of the campaign."""
    settings = [f"persist.every={case.persist_every}" for case in record.cases if case.persist_every][:1]
    scenarios = [
        override(variant.of(scenario), settings)
        for variant in record.variants
        for scenario in record.scenarios.values()
    ]
    check_effect(written_keys(given(context) & SCENARIO, context.params[SETTINGS]), scenarios)
    of_first = [override(variant.of(record.scenarios[AS_CONFIGURED]), settings) for variant in record.variants]
    refuse_idle_variants(record.variants, of_first)


def _refuse_given(context: click.Context, names: Mapping[str, str], reason: str) -> None:
    for name in sorted(names.keys() & given(context)):
        raise ConfigError(f"{names[name]} {reason}")


def _with_cases(record: CampaignRecord, context: click.Context) -> CampaignRecord:
    options = context.params
    _refuse_given(context, OF_TIMES, "is for failures at random times: use --mtbf TIME")
    if options["faults"]:
        _refuse_given(context, OF_DRAWN, "is for failures that are drawn: leave it out, or --fault")
    if options["shapes"]:
        _refuse_given(context, NOT_WITH_SHAPES, "does not go with --shapes, which says on which nodes failures come")
    explicit = tuple(map(FaultSpec.parse, options["faults"]))
    kinds = check_kinds(tuple(fault.kind for fault in explicit) or options["kinds"])
    shapes = tuple(options["shapes"])
    scenarios, refused = make_testbeds(
        record.scenarios[AS_CONFIGURED], kinds, options["assignments"], shapes, is_drawn=not explicit
    )
    asked = Asked(
        options=record.options,
        scenarios=scenarios,
        variants=record.variants,
        faults=explicit,
        kinds=kinds,
        num_drawn=options["count"],
        repeats=options["repeats"],
        refused=refused,
        shapes=shapes,
    )
    cases, not_run = plan_cases(asked)
    return record.model_copy(
        update={"scenarios": scenarios, "cases": tuple(cases), "not_run": tuple(not_run)}
    )  # fmt: skip
