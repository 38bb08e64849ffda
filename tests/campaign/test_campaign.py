"""Campaigns: which failures are drawn, which cases they make, what is written down and how it is shown."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capricorn.campaign.campaign_record import (
    AS_CONFIGURED,
    CampaignRecord,
    Case,
    Undisturbed,
    counts,
    outcome_line,
    read_campaign,
    scenario_of,
    shape_of,
    succeeded,
    write_campaign,
)
from capricorn.campaign.cases import PERSIST_EVERY, Asked, plan_cases
from capricorn.campaign.sampling import draw
from capricorn.campaign.verdict import Judgement
from capricorn.compare.compare_record import parse_variants
from capricorn.config.fault_kinds import KINDS, check_kinds
from capricorn.config.fault_spec import FaultSpec
from capricorn.config.fields import validate
from capricorn.config.scenario import Scenario
from capricorn.errors import ConfigError
from capricorn.faults.applicability import why_not
from capricorn.records.samples import RECOVERY_PHASES
from capricorn.report.terminal.campaign_table import campaign_markdown, case_lines, grid_of
from capricorn.sizing.scale import scale
from capricorn.systems.settings import override, settings_of
from tests.support.judged import undisturbed
from tests.support.recorded import scenario

PUBLISHED = Path(__file__).parents[2] / "results" / "published"
EMULATED = ("cluster.name=faults", "cluster.rate_bytes_per_s=400Mbit", "cluster.attention_s=0.01",
            "cluster.expert_s=0.01")  # fmt: skip
PACED = scale(override(scenario(), EMULATED))
ALL = tuple(KINDS)
LOCAL = [name for name, kind in KINDS.items() if "links" not in kind.needs]


def asked(
    systems: str = "capricorn", faults: Sequence[str] = (), kinds: Sequence[str] = (), num: int = 8, **fields: Any
) -> Asked:
    usual: dict[str, Any] = {
        "options": ("--model", "mixtral-tiny"), "repeats": 1, "refused": {},
        "scenarios": {AS_CONFIGURED: scenario(), "links": PACED, "paced": PACED},
    }  # fmt: skip
    specs = tuple(map(FaultSpec.parse, faults))
    return Asked(
        variants=parse_variants(systems.split(",")), faults=specs, kinds=check_kinds(kinds), num_drawn=num,
        **usual | fields,
    )  # fmt: skip


def judgement(verdict: str = "PASS", **fields: Any) -> Judgement:
    phases = dict.fromkeys(RECOVERY_PHASES, 0.1)
    usual = {
        "verdict": verdict, "survives": True, "detail": "in words", "recovery_s": 0.5, "lost_iterations": 1,
        "phases_s": phases,
    }  # fmt: skip
    return Judgement.model_validate(usual | fields)


def record_of(judgements: Sequence[Judgement | None], system: str = "capricorn", kind: str = "kill") -> CampaignRecord:
    target = {"kill": "rank=1,", "group-loss": "node=0,"}[kind]
    fault = FaultSpec.parse(f"{kind}@{target}iteration=5")
    cases = tuple(
        Case(number=number, system=system, fault=fault, repro=f"repeat {number}", judgement=each)
        for number, each in enumerate(judgements)
    )
    run = Undisturbed(testbed=AS_CONFIGURED, system=system, reference=undisturbed())
    return CampaignRecord(
        campaign_id="campaign", started_at="2026-11-30T00:00:00+00:00", options=(),
        scenarios={AS_CONFIGURED: scenario()}, variants=parse_variants([system]), cases=cases, undisturbed=(run,),
    )  # fmt: skip


# --- drawing


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**6), number=st.integers(0, 1000))
def test_whatever_is_drawn_can_be_spelled_read_back_and_injected(seed: int, number: int) -> None:
    fault = draw(ALL, scenario(), seed, number)
    assert FaultSpec.parse(str(fault)) == fault
    assert 2 <= fault.iteration <= scenario().train.iterations - 2
    config = override(PACED if fault.kind not in LOCAL else scenario(), ["persist.every=2"])
    disturbed = validate(Scenario, config.model_dump() | {"faults": (fault,)}, "test")
    assert why_not(fault, disturbed) == ""


@settings(deadline=None)
@given(seed=st.integers(0, 1000), number=st.integers(0, 100))
def test_a_case_is_the_same_alone_and_among_others(seed: int, number: int) -> None:
    assert draw(LOCAL, scenario(), seed, number) == draw(list(reversed(LOCAL)), scenario(), seed, number)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000))
def test_all_kinds_are_drawn_equally_often(seed: int) -> None:
    drawn = Counter(draw(LOCAL, scenario(), seed, number).kind for number in range(3 * len(LOCAL)))
    assert drawn == dict.fromkeys(LOCAL, 3)


def test_in_time_every_place_length_target_and_moment_is_drawn() -> None:
    faults = [draw(ALL, scenario(), 0, number) for number in range(3000)]
    assert {fault.where for fault in faults if fault.kind == "corrupt"} == set(KINDS["corrupt"].places)
    assert {fault.seconds for fault in faults if fault.kind == "stop"} == {0.0, 1.0}
    assert {fault.rank for fault in faults if fault.rank is not None} == {0, 1}
    assert {"iteration_begin", "routed", "expert.1.backward.end"} <= {fault.op for fault in faults}
    assert len({fault.call for fault in faults if fault.kind == "torn-commit"}) == 12


@pytest.mark.parametrize("shape", ["", "3x1"])
def test_drawn_faults_come_to_all_shapes_and_name_ranks_and_nodes_that_these_have(shape: str) -> None:
    scenarios = {AS_CONFIGURED: scenario()}
    for each in ("2x1", "2x2", "3x1"):
        nodes, _, ranks = each.partition("x")
        shaped = override(scenario(), [f"cluster.nodes={nodes}", f"cluster.ranks_per_node={ranks}"])
        scenarios |= {f"{AS_CONFIGURED}@{each}": shaped, f"pid-1@{each}": shaped}
    shapes = (shape,) if shape else ("2x1", "2x2", "3x1")
    kinds = ["kill", "node-loss", "kill-all"]
    cases, _ = plan_cases(asked(kinds=kinds, num=90, scenarios=scenarios, shapes=shapes))
    assert {shape_of(case.testbed) for case in cases} == set(shapes)
    for case in cases:
        topology = scenarios[case.testbed].topology
        assert (case.fault.rank or 0) < topology.world_size
        assert (case.fault.node or 0) < topology.num_nodes
        words = shlex.split(case.repro)
        assert words[words.index("--nodes") + 1] == str(topology.num_nodes)
        assert words[words.index("--ranks-per-node") + 1] == str(topology.ranks_per_node)
    most = max(case.fault.rank or 0 for case in cases)
    assert most == (2 if shape else 3)


def test_some_drawn_cases_have_a_launcher_that_is_process_1_where_that_can_be() -> None:
    scenarios = {AS_CONFIGURED: scenario(), "pid-1": scenario()}
    cases, _ = plan_cases(asked(kinds=["kill"], num=120, scenarios=scenarios))
    first = [case for case in cases if case.testbed == "pid-1"]
    assert 2 < len(first) < 30
    assert shlex.split(first[0].repro)[:5] == ["unshare", "--pid", "--fork", "--mount-proc", "capricorn-bench"]
    assert "as process 1" in outcome_line(first[0].model_copy(update={"judgement": judgement()}))
    without, _ = plan_cases(asked(kinds=["kill"], num=120))
    assert [case.fault for case in without] == [case.fault for case in cases]
    assert {case.testbed for case in without} == {AS_CONFIGURED}


def test_the_persistent_tier_is_hit_late_when_something_is_on_it() -> None:
    faults = [draw(["group-loss", "corrupt", "kill"], scenario(), 0, number) for number in range(300)]
    assert {fault.iteration for fault in faults if fault.hits_persistent_tier} == {9, 10}
    assert {fault.iteration for fault in faults if fault.kind == "kill"} == set(range(2, 11))


def test_a_run_too_short_for_a_fault_is_refused() -> None:
    short = override(scenario(), ["train.iterations=3", "train.warmup=0"])
    with pytest.raises(ConfigError, match="--iterations 3 is too short for failures to be drawn; use 4 or more"):
        draw(LOCAL, short, 0, 0)


def test_an_unknown_kind_is_told_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown fault 'kil'; did you mean 'kill'"):
        check_kinds(["kil"])


# --- cases


def test_every_failure_comes_to_all_systems_it_can_and_the_others_are_told() -> None:
    cases, not_run = plan_cases(asked("capricorn,torchsnapshot,none", kinds=["kill", "corrupt"], num=20))
    assert [case.number for case in cases if case.system == "capricorn"] == list(range(20))
    kinds = {
        system: {case.fault.kind for case in cases if case.system == system} for system in ("torchsnapshot", "none")
    }
    assert kinds["none"] == {"kill"}
    assert {case.fault.where for case in cases if case.system == "torchsnapshot"} == {"", "disk"}
    assert ("none", "corrupt") in {(each.system, each.kind) for each in not_run}


def test_what_this_machine_refuses_is_not_drawn() -> None:
    cases, not_run = plan_cases(asked(kinds=["kill", "oom"], refused={"oom": "no cgroup"}))
    assert {case.fault.kind for case in cases} == {"kill"}
    assert [(each.kind, each.reason) for each in not_run] == [("oom", "no cgroup")]
    with pytest.raises(ConfigError, match="none of these failures can happen here: no cgroup"):
        plan_cases(asked(kinds=["oom"], refused={"oom": "no cgroup"}))


def test_half_of_what_is_drawn_has_a_persistent_tier_and_what_hits_one_always() -> None:
    cases, _ = plan_cases(asked(kinds=["kill", "group-loss"], num=200))
    kills = [case.persist_every for case in cases if case.fault.kind == "kill"]
    assert 30 < kills.count(PERSIST_EVERY) < 70
    assert set(kills) == {0, PERSIST_EVERY}
    losses = [case for case in cases if case.fault.kind == "group-loss"]
    assert {(case.persist_every, case.testbed) for case in losses} == {(PERSIST_EVERY, AS_CONFIGURED)}


def test_a_fault_has_the_testbed_that_it_needs() -> None:
    faults = ("kill@rank=0,iteration=4", "partition@node=0,iteration=4", "tmpfs-full@rank=0,iteration=4",
              "disk-full@iteration=4")  # fmt: skip
    cases, _ = plan_cases(asked("capricorn,torchsnapshot", faults=faults))
    grounds = {(case.system, case.fault.kind): (case.testbed, case.mount) for case in cases}
    assert grounds == {
        ("capricorn", "kill"): (AS_CONFIGURED, ""), ("torchsnapshot", "kill"): (AS_CONFIGURED, ""),
        ("capricorn", "partition"): ("links", ""), ("torchsnapshot", "partition"): ("links", ""),
        ("capricorn", "tmpfs-full"): (AS_CONFIGURED, "store"),
        ("torchsnapshot", "tmpfs-full"): (AS_CONFIGURED, "store"),
        ("capricorn", "disk-full"): ("paced", "disk"), ("torchsnapshot", "disk-full"): (AS_CONFIGURED, "disk"),
    }  # fmt: skip


def test_a_cluster_that_was_asked_for_is_the_only_testbed() -> None:
    faults = ("partition@node=0,iteration=4", "group-loss@node=0,iteration=9")
    cases, _ = plan_cases(asked(faults=faults, scenarios={AS_CONFIGURED: PACED}))
    assert {case.testbed for case in cases} == {AS_CONFIGURED}


def test_a_case_runs_with_its_failure_alone_under_its_system() -> None:
    cases, _ = plan_cases(asked("gemini:gemini.mu=0.5", faults=["kill@rank=1,iteration=4", "kill-all@iteration=5"]))
    config = scenario_of({AS_CONFIGURED: scenario()}, parse_variants(["gemini:gemini.mu=0.5"])[0], cases[1])
    assert config.faults == (FaultSpec.parse("kill-all@iteration=5"),)
    assert (config.system.name, settings_of(config).mu) == ("gemini", 0.5)


def test_the_command_that_repeats_a_case_says_all_and_can_be_pasted() -> None:
    cases, _ = plan_cases(asked("gemini:gemini.mu=0.5", faults=["group-loss@node=0,iteration=9"]))
    words = shlex.split(cases[0].repro)
    assert words == [
        "capricorn-bench", "faults", "--model", "mixtral-tiny", "--systems", "gemini:gemini.mu=0.5", "--fault",
        str(cases[0].fault), "--persist-every", "2",
    ]  # fmt: skip
    given_one = asked(faults=["kill@rank=0,iteration=3"], options=("--persist-every", "5"),
                      scenarios={AS_CONFIGURED: override(scenario(), ["persist.every=5"])})  # fmt: skip
    case = plan_cases(given_one)[0][0]
    assert (case.persist_every, case.repro.count("--persist-every")) == (5, 1)


def test_repeats_are_cases_of_their_own() -> None:
    cases, _ = plan_cases(asked(faults=["kill@rank=0,iteration=3"], repeats=3))
    assert [(case.number, case.repeat) for case in cases] == [(0, 1), (0, 2), (0, 3)]


# --- the record


def test_a_record_is_read_back_as_it_was_written_and_damage_is_refused(tmp_path: Path) -> None:
    record = record_of([judgement(), None])
    write_campaign(tmp_path, record)
    assert read_campaign(tmp_path) == record
    (tmp_path / "campaign.json").write_text('{"schema_version": 99}')
    with pytest.raises(ConfigError, match="schema version is 99"):
        read_campaign(tmp_path)


def test_a_record_with_the_names_of_older_ones_is_read_as_if_it_had_those_of_today(tmp_path: Path) -> None:
    record = record_of([judgement("NOT_TRIGGERED"), None])
    written = record.model_dump_json().replace('"testbed"', '"ground"').replace("NOT_TRIGGERED", "NOT_STRUCK")
    (tmp_path / "campaign.json").write_text(written.replace(AS_CONFIGURED, "given"))
    assert read_campaign(tmp_path) == record


@pytest.mark.parametrize("folder", sorted(PUBLISHED.glob("*-faults-*")), ids=lambda folder: folder.name)
def test_published_campaigns_have_the_verdicts_that_were_published(folder: Path) -> None:
    judgements = [case["judgement"] for case in json.loads((folder / "campaign.json").read_text())["cases"]]
    published = Counter(each["verdict"] for each in judgements)
    left_nothing = sum(each["verdict"] == "HARD_FAIL" and not each["survives"] for each in judgements)
    published += Counter({"HARD_FAIL": -left_nothing, "NOTHING_LEFT": left_nothing})
    assert counts(read_campaign(folder).cases) == +published


def test_a_record_of_a_thousand_cases_stays_small(tmp_path: Path) -> None:
    cases, _ = plan_cases(asked(num=100))
    record = record_of([]).model_copy(
        update={"cases": tuple(case.model_copy(update={"judgement": judgement()}) for case in cases)}
    )
    write_campaign(tmp_path, record)
    others = len(record.model_copy(update={"cases": ()}).model_dump_json())
    assert ((tmp_path / "campaign.json").stat().st_size - others) / len(cases) < 900


def test_a_judged_case_takes_its_place() -> None:
    record = record_of([None, None])
    judged = record.cases[1].model_copy(update={"judgement": judgement("HARD_FAIL")})
    after = record.with_case(judged)
    assert [case.judgement is None for case in after.cases] == [True, False]
    assert counts(after.cases) == {"HARD_FAIL": 1}


@pytest.mark.parametrize(
    ("system", "verdict", "survives", "fine"),
    [
        ("capricorn", "PASS", True, True),
        ("capricorn", "LOST_WORK", True, False),
        ("capricorn", "HARD_FAIL", True, False),
        ("capricorn", "NOTHING_LEFT", False, True),
        ("capricorn", "HARD_FAIL", False, False),
        ("capricorn", "SILENT_DIVERGENCE", False, False),
        ("capricorn:system.every=2", "NOT_TRIGGERED", True, False),
        ("torchsnapshot", "SILENT_DIVERGENCE", True, True),
    ],
)
def test_only_capricorn_decides_and_where_nothing_was_left_it_may_give_up(
    system: str, verdict: str, survives: bool, fine: bool
) -> None:
    judged = judgement().model_copy(update={"verdict": verdict, "survives": survives})
    assert succeeded(record_of([judgement(), judged], system)) is fine


# --- what is shown


def test_a_cell_counts_verdicts_with_the_worst_loss_and_what_is_left() -> None:
    passed = [judgement(), judgement()]
    record = record_of([*passed, judgement("LOST_WORK", lost_iterations=4), judgement("HARD_FAIL"),
                        judgement("NOTHING_LEFT", survives=False), None])  # fmt: skip
    (cell,) = grid_of(record).rows["kill"]
    assert [part.text for part in cell] == [
        "2 PASS", "1 LOST_WORK(4)", "1 HARD_FAIL", "1 NOTHING_LEFT", "1 left",
    ]  # fmt: skip


def test_what_was_not_run_is_a_dash_with_a_note() -> None:
    _, not_run = plan_cases(asked("none,torchsnapshot", kinds=["kill", "corrupt"]))
    record = record_of([judgement()]).model_copy(
        update={"variants": parse_variants(["capricorn", "none"]), "not_run": tuple(not_run)}
    )
    grid = grid_of(record)
    assert [part.text for part in grid.rows["corrupt"][1]] == ["- a"]
    assert grid.notes[0].startswith("a: none keeps no copies")


def test_the_report_has_times_by_mode_and_what_repeats_each_case_that_did_not_pass() -> None:
    emulated = judgement(mode="emulated", recovery_s=2.0)
    report = campaign_markdown(record_of([judgement(), judgement(recovery_s=1.5), emulated, judgement("HARD_FAIL")]))
    assert "| kill | 3 PASS 1 HARD_FAIL |" in report.replace("\\", "")
    assert report.index("## Recovery, emulated") < report.index("## Recovery, live")
    assert "| kill | capricorn | 1 | 2.000 | 2.000 |" in report
    assert "| kill | capricorn | 3 | 0.500 | 1.500 |" in report
    assert "repeat 3" in report
    assert "repeat 1" not in report


def test_a_line_tells_the_case_and_its_command_only_if_it_did_not_pass() -> None:
    record = record_of([judgement(), judgement("NOTHING_LEFT", survives=False, recovery_s=None, detail="gone")])
    assert outcome_line(record.cases[0]) == (
        "capricorn kill@rank=1,iteration=5,op=before_update: PASS, lost 1, recovery 0.5 s: in words"
    )
    assert [line.plain for line in case_lines(record)] == [
        "capricorn kill@rank=1,iteration=5,op=before_update: NOTHING_LEFT: gone", "  repeat 1",
    ]  # fmt: skip
