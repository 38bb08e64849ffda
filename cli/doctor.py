"""`capricorn-bench doctor`: what this machine can do, and whether a scenario fits it."""

from __future__ import annotations

import dataclasses

import rich_click as click

from capricorn.config import Scenario

from .options import json_option, scenario_options, system_option
from .output import console, print_json


@click.command()
@system_option
@scenario_options
@json_option
def doctor(scenario: Scenario, as_json: bool) -> int:
    """Check devices, memory, tmpfs, limits and systems against what a scenario needs."""
    from capricorn.harness.machine import checks
    from capricorn.report.tables import checks_table, plan_table
    from capricorn.sizing import needs_of

    found = checks(scenario)
    if scenario.emulation is not None:
        from capricorn.harness.rehearsal import rehearse

        found += rehearse(scenario)
    ok = all(check.ok for check in found)
    needs = needs_of(scenario, cuda=scenario.cluster.device == "cuda")
    if as_json:
        facts = [dataclasses.asdict(check) for check in found]
        print_json({"ok": ok, "checks": facts, "needs": dataclasses.asdict(needs)})
    else:
        console().print(plan_table(scenario, needs))
        console().print(checks_table(found))
    return 0 if ok else 1
