"""The rules of check-system: a system that breaks one is found out, one that keeps them passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from capricorn.conformance.evidence import Evidence
from capricorn.conformance.rank_functions import restore_only
from capricorn.conformance.rules import RULES, choose
from capricorn.conformance.subject import SystemUnderTest, under_test
from capricorn.errors import CapricornError, ConfigError
from capricorn.systems.registry import SYSTEMS, find
from tests.support.conformance import server

BROKEN = {
    "TornState": ("isolation", "large of iterations [7]"),
    "LostRank": ("every-rank", "rank 1 did not get its own state"),
    "StateChanged": ("no-change", "saving changed odd in iteration 1"),
    "Leftovers": ("leftovers", "(Python's: forgotten), process"),
    "NoDeadline": ("dead-peer", "rank 0 did not come to an end in time: it is in File"),
    "CountsTooEarly": ("counts", "counts a checkpoint as complete before its iteration"),
    "KeepsAll": ("growth", "remove older checkpoints"),
    "CloseFails": ("close", "rank 0: AttributeError"),
}
"""By system: the rule that it breaks, and what is said of it."""
SHORT: dict[str, dict[str, Any]] = {"NoDeadline": {"timeout_s": 1.0}, "Leftovers": {"timeout_s": 1.0}}


@pytest.mark.parametrize(
    "system", [pytest.param(name, marks=pytest.mark.slow) if name == "NoDeadline" else name for name in BROKEN]
)
def test_a_broken_system_is_found_out_by_the_rule_that_it_breaks(system: str, tmp_path: Path) -> None:
    name, complaint = BROKEN[system]
    subject = under_test(f"tests.conformance.broken_systems:{system}", **SHORT.get(system, {}))
    (rule,) = choose([name])
    result = rule.judge(Evidence(subject, server(), tmp_path))
    assert (result.rule, result.verdict) == (name, "FAIL")
    assert complaint in result.detail
    assert "\n" not in result.detail


def test_rules_that_need_more_than_a_system_claims_to_survive_do_not_apply(tmp_path: Path) -> None:
    evidence = Evidence(under_test("none"), server(), tmp_path)
    (rule,) = choose(["kill"])
    assert rule.judge(evidence).verdict == "not applicable"
    assert not list(tmp_path.iterdir())


def test_rules_are_chosen_in_their_order_and_an_unknown_one_is_named() -> None:
    assert [rule.name for rule in choose(["kill", "no-change"])] == ["no-change", "kill"]
    assert choose([]) == list(RULES)
    with pytest.raises(ConfigError, match="did you mean 'isolation'"):
        choose(["isolatoin"])


@pytest.mark.parametrize("name", SYSTEMS)
def test_how_a_system_is_set_up_for_the_toy_job_fits_its_settings(name: str) -> None:
    subject = under_test(name)
    settings = subject.settings()
    assert {key: getattr(settings, key) for key in subject.options} == subject.options


@pytest.mark.parametrize("name", ["no.such.module:System", "no/such/file.py:System", "capricorn.units:System"])
def test_a_system_that_is_not_there_is_the_users_mistake(name: str) -> None:
    with pytest.raises(ConfigError, match=name.rpartition(":")[0]):
        find(name)


def test_a_system_that_the_ranks_cannot_load_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(CapricornError, match=r"system no\.such:System cannot be loaded: ConfigError"):
        server().run(restore_only, tmp_path, SystemUnderTest(system="no.such:System"))
