"""`capricorn-bench doctor`: what this machine can do, and whether a scenario fits it."""

from __future__ import annotations

import dataclasses

from capricorn.config.scenario import Scenario

from .options import command, json_option, scenario_options, system_option
from .output import console, print_json


@command("doctor", "doctor --system gemini --model mixtral-8x7b --cluster p4d --nodes 4")
@system_option
@scenario_options
@json_option
def doctor(scenario: Scenario, as_json: bool) -> int:
    """Check devices, memory, tmpfs, limits and systems against what a scenario needs."""
    from capricorn.launch.preflight import checks
    from capricorn.report.terminal.tables import checks_table, plan_table
    from capricorn.sizing.memory import needs_of

    found = checks(scenario)
    if scenario.emulation is not None:
        from capricorn.launch.emulation_preflight import rehearse

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
