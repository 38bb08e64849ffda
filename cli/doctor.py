"""`capricorn-bench doctor`: what this machine can do, and whether a scenario fits it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import rich_click as click

from capricorn.config.scenario import Scenario

from .options import command, given, json_option, out_option, refuse_without_effect, scenario_options, system_option
from .output import console, print_json


@command("doctor", "doctor --system gemini --model mixtral-8x7b --cluster p4d --nodes 4")
@system_option
@scenario_options
@out_option
@json_option
def doctor(scenario: Scenario, out: Path, as_json: bool) -> int:
    """Check whether this machine can do what is asked for: its system, cluster, nodes, device, folders and failures.

    Without any option it also says which systems are installed, and what privileges there are.
    """
    from capricorn.launch.preflight import checks, other_checks
    from capricorn.report.terminal.plan_table import checks_table, plan_table
    from capricorn.sizing.memory import needs_of

    refuse_without_effect(scenario)
    found = checks(scenario, out)
    context = click.get_current_context()
    assert context is not None
    if not given(context) - {"as_json"}:
        found += other_checks(scenario)
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
