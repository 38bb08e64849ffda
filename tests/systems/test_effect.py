"""Options without effect: each setting that somebody gives is used by the run, or refused with what has it."""

from __future__ import annotations

from typing import Any

import pytest
from capricorn.cli.options import scenario_from
from capricorn.cli.values import system_settings

from capricorn.config.scenario import Scenario
from capricorn.config.setting_list import all_settings, options
from capricorn.errors import ConfigError
from capricorn.systems import effect
from capricorn.systems.effect import check_effect, why_no_effect
from capricorn.systems.registry import SYSTEMS, find
from capricorn.systems.settings import settings_of
from tests.cli.test_cli import cli

KEYS = tuple(setting.key for setting in all_settings())
ALWAYS = {
    key for key in KEYS if key.startswith(("train.", "data."))
} | {
    "store.root", "system.name", "system.timeout_s", "launch.nnodes", "launch.max_restarts", "loads.source",
    "cluster.name", "cluster.nodes", "cluster.ranks_per_node", "cluster.device",
}  # fmt: skip
"""What every system has in every mode."""


def tiny(system: str = "capricorn", *assignments: str, **given: Any) -> Scenario:
    return scenario_from(model="mixtral-tiny", device="cpu", system=system, assignments=assignments, **given)


def emulated(system: str = "capricorn", *assignments: str) -> Scenario:
    return scenario_from(model="mixtral-8x7b", cluster="p4d", system=system, nodes=4, assignments=assignments)


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("make", [tiny, emulated])
def test_every_setting_of_every_system_is_used_or_refused_with_what_has_it(system: str, make: Any) -> None:
    scenario = make(system)
    for key in KEYS:
        reason = why_no_effect(key, scenario)
        if not reason:
            check_effect({key: "--it"}, [scenario])
            continue
        assert key not in ALWAYS, f"{key} {reason}"
        with pytest.raises(ConfigError, match="--it has no effect") as raised:
            check_effect({key: "--it"}, [scenario])
        assert "\n" not in str(raised.value)


def test_the_table_names_settings_that_there_are_and_a_system_that_has_each() -> None:
    keys = {*KEYS, "system.options"}
    assert effect._CONDITIONS.keys() <= keys
    assert {key for entry in SYSTEMS.values() for key in entry.ignores} <= keys
    for key in effect._CONDITIONS:
        assert effect._systems_with(key, effect._CONDITIONS[key]), f"no system has {key}"


def test_a_system_has_what_its_kind_reads() -> None:
    used = {name: {key for key in KEYS if not why_no_effect(key, tiny(name, "planner.spans=load"))} for name in SYSTEMS}
    persist = {"persist.every", "persist.dir"}
    planner = {key for key in KEYS if key.startswith("planner.")}
    for name, entry in SYSTEMS.items():
        assert (persist <= used[name]) == entry.replicates
        assert ("system.every" in used[name]) == (entry.kind != "nothing")
    assert planner <= used["capricorn"]
    assert used["lm-resiliency"] & planner == {"planner.max_chunk_bytes"}
    assert not used["gemini"] & planner
    assert not used["blocking"] & planner
    assert not used["torch-save"] & planner


def test_a_section_that_the_system_does_not_read_is_named_with_those_that_do() -> None:
    reason = why_no_effect("persist.every", tiny("torchsnapshot"))
    assert reason == "under torchsnapshot; systems that have it: blocking, gemini, gemini-staged, capricorn"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--system", "torchsnapshot", "--persist-every", "1"], "--persist-every has no effect under torchsnapshot"),
        (["--system", "none", "--persist-dir", "tier"], "--persist-dir has no effect under none"),
        (["--rdzv-endpoint", "host:1"], "--rdzv-endpoint has no effect without --nnodes"),
        (["--node-rank", "0"], "--node-rank has no effect without --nnodes"),
        (["--set", "launch.frozen_s=3", "--set", "launch.restart=torchrun"], "--set launch.frozen_s=3 has no effect"),
        (["--system", "dcp", "--replicas", "2"], "--replicas has no effect under dcp"),
        (["--system", "none", "--ckpt", "every-2"], "--ckpt has no effect under none"),
        (["--system", "none", "--keep-store"], "--keep-store has no effect under none"),
        (["--ckpt", "off", "--persist-every", "2"], "--persist-every has no effect with --ckpt off"),
        (["--set", "persist.keep=3"], "--set persist.keep=3 has no effect without --persist-every"),
        (
            ["--system", "gemini", "--set", "planner.risk=0.4"],
            "effect under gemini; systems that have it: capricorn",
        ),
        (["--set", "planner.risk=0.4"], "no effect with planner.spans=none"),
        (["--set", "loads.first=3"], "no effect without --loads"),
        (["--set", "cluster.qos=false"], "no effect on --cluster local"),
        (["--nodes", "1", "--set", "system.low_class=false"], "no effect without a remote copy"),
        (["--set", "model.dense_ffn=64"], "no effect on a model without dense layers"),
        (["--system", "dcp", "--set", "system.options.mode=thread"], "system dcp has no such option"),
    ],
)
def test_the_command_refuses_what_changes_nothing(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("run", "doctor"):
        assert cli(command, "--model", "mixtral-tiny", "--device", "cpu", *arguments) == 2
        printed = capsys.readouterr().err
        assert said in printed
        assert len(printed.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--persist-every", "2", "--persist-dir", "tier", "--set", "persist.keep=3"],
        ["--system", "lm-resiliency", "--replicas", "2", "--ckpt", "every-2"],
        ["--system", "torch-save", "--ckpt", "every-2", "--keep-store", "--set", "system.options.keep=3"],
        ["--set", "planner.spans=layer", "--set", "planner.risk=0.4", "--set", "planner.gate=false"],
        ["--loads", "stable", "--set", "loads.first=3"],
        ["--system", "dcp-async", "--set", "system.options.mode=process"],
    ],
)
def test_what_has_an_effect_is_taken(arguments: list[str]) -> None:
    assert cli("run", "--model", "mixtral-tiny", "--device", "cpu", *arguments, "--dry-run") == 0


def test_of_several_systems_one_that_has_it_suffices() -> None:
    systems = [tiny(name) for name in ("none", "torchsnapshot", "capricorn")]
    check_effect({"persist.every": "--persist-every"}, systems)
    with pytest.raises(ConfigError, match="under none"):
        check_effect({"persist.every": "--persist-every"}, systems[:2])


def test_a_comparison_refuses_what_none_of_its_systems_has_and_what_a_variant_has_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    compare = ("compare", "--model", "mixtral-tiny", "--device", "cpu", "--iterations", "4", "--dry-run")
    assert cli(*compare, "--systems", "none,torchsnapshot", "--persist-every", "2") == 2
    assert "--persist-every has no effect under none" in capsys.readouterr().err
    assert cli(*compare, "--systems", "none,capricorn,dcp:persist.every=2") == 2
    assert "persist.every=2 has no effect under dcp" in capsys.readouterr().err
    assert cli(*compare, "--systems", "none,capricorn,dcp", "--persist-every", "2") == 0


def test_a_campaign_refuses_what_none_of_its_systems_has_and_repeats_a_case_without_what_its_system_has_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    faults = ("faults", "--device", "cpu", "--fault", "kill@rank=1,iteration=5", "--repro")
    assert cli(*faults, "--systems", "torchsnapshot", "--persist-every", "2") == 2
    assert "--persist-every has no effect under torchsnapshot" in capsys.readouterr().err
    assert cli(*faults, "--systems", "capricorn,torchsnapshot", "--persist-every", "2") == 0
    ours, theirs = capsys.readouterr().out.splitlines()
    assert "--persist-every 2" in ours
    assert "--persist-every" not in theirs
    for option in (["--count", "3"], ["--kinds", "kill"], ["--node-loss-frac", "0.5"]):
        assert cli(*faults, *option) == 2
        assert option[0] in capsys.readouterr().err


def test_every_option_of_a_scenario_is_a_setting_or_a_section_that_the_table_can_judge() -> None:
    assert {setting.key for setting in options()} <= {*KEYS, "model", "faults"}


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_option_that_a_system_lists_is_in_the_settings_that_it_is_given(system: str) -> None:
    listed = {setting.field.removeprefix("options.") for setting, names in system_settings() if system in names}
    settings = settings_of(tiny(system))
    model = find(system).settings_model()
    assert listed == (set() if model is None else set(type(settings).model_fields))
