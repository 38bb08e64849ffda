"""Verdicts on made-up records: what passes, what only seems to, and whose fault it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capricorn.campaign.outcomes import RunOutcome
from capricorn.campaign.verdict import Judgement, Reference, difference, judge, reference_of, survives
from capricorn.config.fault_spec import FaultSpec
from capricorn.errors import CapricornError
from capricorn.records.samples import IterationSample
from capricorn.systems.settings import override
from tests.support.judged import KILL, digests, event, judged, outcome, recovery, sample, undisturbed
from tests.support.recorded import NUM_ITERATIONS, NUM_RANKS, scenario

LAST = NUM_ITERATIONS


def test_what_goes_on_exactly_and_does_one_iteration_again_passes() -> None:
    judgement = judged(outcome())
    assert (judgement.verdict, judgement.lost_iterations, judgement.allowed_iterations) == ("PASS", 1, 1)
    assert judgement.survives
    assert judgement.recovery_s == pytest.approx(0.5)
    assert judgement.phases_s["restart_s"] == 0.2
    assert judgement.tier == "local"
    assert judgement.detail == "back to 6 from local (ranks 0 1)"


def test_a_failure_that_nobody_had_to_recover_from_passes_without_a_time() -> None:
    judgement = judged(outcome(resumed=LAST, reached=LAST, recoveries=()))
    assert (judgement.verdict, judgement.recovery_s, judgement.tier) == ("PASS", None, "")


def test_it_is_told_which_copies_came_from_where_and_what_was_skipped() -> None:
    events = [event("fault", 1), event("resumed", 0, 1, detail="skipped owner 1's local copy: damaged"), *digests()]
    judgement = judged(outcome(events=events, recoveries=[recovery(6, 1, ("local", "peer"))]))
    assert judgement.tier == "local+peer"
    assert judgement.detail == (
        "back to 6 from local (rank 0), peer (rank 1), skipped owner 1's local copy: damaged"
    )  # fmt: skip


@pytest.mark.parametrize(("iteration", "attempt"), [(3, 0), (7, 1), (LAST, 1)])
def test_one_loss_that_differs_in_its_last_bit_is_a_silent_divergence(iteration: int, attempt: int) -> None:
    disturbed = outcome()
    wrong = [
        s.model_copy(update={"loss": s.loss * (1 + 2**-52)})
        if (s.iteration, s.attempt, s.rank) == (iteration, attempt, 1)
        else s
        for s in disturbed.samples
    ]
    judgement = judged(replace(disturbed, samples=wrong))
    assert judgement.verdict == "SILENT_DIVERGENCE"
    assert judgement.detail.startswith(f"loss of rank 1 in iteration {iteration} is ")


def test_equal_losses_with_another_last_state_are_a_silent_divergence() -> None:
    judgement = judged(outcome(events=[event("fault"), *digests({1: "other"})]))
    assert judgement.verdict == "SILENT_DIVERGENCE"
    assert "last state of rank 1" in judgement.detail


def test_losses_that_are_no_numbers_are_compared_like_all_others() -> None:
    disturbed = outcome()
    samples = [s.model_copy(update={"loss": float("nan")}) for s in disturbed.samples]
    assert judged(replace(disturbed, samples=samples)).verdict == "SILENT_DIVERGENCE"


@pytest.mark.parametrize("loss", ["NaN", "Infinity", "-Infinity"])
def test_a_run_whose_losses_are_not_finite_where_the_undisturbed_ones_are_so_passes(loss: str) -> None:
    disturbed, reference = outcome(), undisturbed()
    told = [IterationSample.model_validate(s.model_dump() | {"loss": loss}) for s in disturbed.samples]
    alike = reference.model_copy(update={"losses": ((float(loss).hex(),) * NUM_ITERATIONS,) * NUM_RANKS})
    read = Reference.model_validate_json(alike.model_dump_json())
    assert judge(KILL, scenario(), replace(disturbed, samples=told), read).verdict == "PASS"


def test_an_iteration_without_a_record_is_excused_only_if_it_was_restored() -> None:
    disturbed = outcome(resumed=7, reached=7)
    without = [s for s in disturbed.samples if (s.iteration, s.rank) != (7, 1)]
    assert judged(replace(disturbed, samples=without)).verdict == "PASS"
    without = [s for s in disturbed.samples if (s.iteration, s.rank) != (4, 1)]
    judgement = judged(replace(disturbed, samples=without))
    assert (judgement.verdict, judgement.detail[:40]) == (
        "SILENT_DIVERGENCE", "rank 1 left no record of iteration 4; ba",
    )  # fmt: skip


def test_more_work_done_again_than_the_tier_explains_is_lost() -> None:
    judgement = judged(outcome(resumed=3))
    assert (judgement.verdict, judgement.lost_iterations) == ("LOST_WORK", 4)
    assert "4 finished iterations done again, 1 allowed" in judgement.detail


def test_starting_over_is_lost_work_however_well_it_ends() -> None:
    judgement = judged(outcome(resumed=0, recoveries=[recovery(0, 7, ())]))
    assert (judgement.verdict, judgement.tier) == ("LOST_WORK", "start")
    assert "started anew from the initial state" in judgement.detail


def test_a_failure_that_never_came_is_no_pass() -> None:
    assert judged(outcome(recoveries=(), resumed=LAST, reached=LAST, events=digests())).verdict == "NOT_TRIGGERED"


def test_a_run_that_did_not_end_well_is_a_hard_fail_and_starts_that_never_trained_are_not_told() -> None:
    disturbed = outcome(failure="hang: not done after 90 s", samples=[sample(1, 0), sample(1, 1)],
                     recoveries=[recovery(0, 7, ())])  # fmt: skip
    judgement = judged(disturbed)
    assert (judgement.verdict, judgement.recovery_s, judgement.lost_iterations) == ("HARD_FAIL", None, 0)
    assert judgement.detail == "hang: not done after 90 s"


NOTHING = "no complete checkpoint survives"


@pytest.mark.parametrize(
    ("system", "failure", "fault", "persisted", "verdict"),
    [
        ("capricorn", NOTHING, "group-loss@node=0,iteration=9", (), "NOTHING_LEFT"),
        ("capricorn", NOTHING, "group-loss@node=0,iteration=9", (4,), "HARD_FAIL"),
        ("capricorn", NOTHING, "truncate@rank=0,iteration=9,where=disk", (4,), "NOTHING_LEFT"),
        ("capricorn", NOTHING, "truncate@rank=0,iteration=9,where=disk", (4, 6), "HARD_FAIL"),
        ("capricorn", NOTHING, "kill@rank=0,iteration=9", (), "HARD_FAIL"),
        ("capricorn", "hang: not done after 90 s", "group-loss@node=0,iteration=9", (), "HARD_FAIL"),
        ("torchsnapshot", NOTHING, "corrupt@rank=0,iteration=9,where=disk", (8,), "NOTHING_LEFT"),
        ("torchsnapshot", NOTHING, "corrupt@rank=0,iteration=9,where=disk", (7, 8), "HARD_FAIL"),
        ("torchsnapshot", NOTHING, "group-loss@node=0,iteration=9", (7, 8), "HARD_FAIL"),
    ],
)
def test_what_ended_since_nothing_was_left_when_the_fault_came_is_told_from_a_failure(
    system: str, failure: str, fault: str, persisted: tuple[int, ...], verdict: str
) -> None:
    settings = ["persist.every=2"] if system == "capricorn" else []
    config = override(scenario(), [f"system.name={system}", *settings])
    disturbed = outcome(failure=failure, persisted=persisted)
    assert judged(disturbed, FaultSpec.parse(fault), config).verdict == verdict


def test_what_went_on_otherwise_though_nothing_was_left_is_a_divergence() -> None:
    fault = FaultSpec.parse("group-loss@node=0,iteration=7")
    events = [event("fault", on_disk=()), *digests({1: "other"})]
    assert judged(outcome(events=events), fault).verdict == "SILENT_DIVERGENCE"


def test_an_older_record_in_which_no_copy_survived_is_read_with_the_verdict_of_today() -> None:
    older = {"verdict": "HARD_FAIL", "survives": False, "detail": "no complete checkpoint survives"}
    assert Judgement.model_validate(older).verdict == "NOTHING_LEFT"
    assert Judgement.model_validate(older | {"survives": True}).verdict == "HARD_FAIL"
    assert Judgement.model_validate(older | {"detail": "hang: not done after 90 s"}).verdict == "HARD_FAIL"


# --- how much may be lost


@pytest.mark.parametrize(
    ("settings", "reached", "resumed", "sources", "persisted", "verdict"),
    [
        (["system.every=3"], 10, 5, ("local", "local"), None, "PASS"),
        (["system.every=3"], 10, 4, ("local", "local"), None, "LOST_WORK"),
        (["persist.every=3"], 9, 3, ("persistent",) * 2, None, "PASS"),
        (["persist.every=3"], 10, 3, ("persistent",) * 2, None, "LOST_WORK"),
        (["persist.every=3"], 10, 3, ("persistent",) * 2, (3,), "PASS"),
        (["persist.every=3"], 10, 3, ("persistent",) * 2, (3, 6), "LOST_WORK"),
        (["system.name=gemini", "gemini.profile_iterations=4"], 5, 0, (), None, "PASS"),
        (["system.name=gemini", "gemini.profile_iterations=4"], 6, 0, (), None, "LOST_WORK"),
    ],
)
def test_what_may_be_lost_is_what_the_intervals_explain(
    settings: list[str], reached: int, resumed: int, sources: tuple[str, ...], persisted: Any, verdict: str
) -> None:
    disturbed = outcome(
        resumed, reached, recoveries=[recovery(resumed, reached - resumed, sources)], persisted=persisted
    )  # fmt: skip
    assert judged(disturbed, config=override(scenario(), settings)).verdict == verdict


def test_a_damaged_checkpoint_persisted_explains_the_one_before() -> None:
    config = override(scenario(), ["persist.every=3"])
    fault = FaultSpec.parse("corrupt@rank=0,iteration=11,where=disk")
    disturbed = outcome(3, 10, recoveries=[recovery(3, 7, ("persistent",) * 2)], persisted=(3, 6))
    assert judged(disturbed, fault, config).verdict == "PASS"


# --- what a failure leaves


@pytest.mark.parametrize(
    ("fault", "settings", "left"),
    [
        ("kill@rank=0,iteration=5", [], True),
        ("kill@rank=0,iteration=5", ["system.every=0"], False),
        ("kill@rank=0,iteration=5", ["system.name=none"], False),
        ("kill-all@iteration=5", ["system.replicas=1"], True),
        ("node-loss@node=0,iteration=5", [], True),
        ("node-loss@node=0,iteration=5", ["system.replicas=1"], False),
        ("node-loss@node=0,iteration=9", ["system.replicas=1", "persist.every=2"], True),
        ("group-loss@node=0,iteration=9", [], False),
        ("group-loss@node=0,iteration=3", ["persist.every=3"], False),
        ("group-loss@node=0,iteration=9", ["persist.every=3"], True),
        ("group-loss@node=0,iteration=5", ["system.name=torchsnapshot"], True),
        ("corrupt@rank=0,iteration=5,where=slot", [], True),
        ("corrupt@rank=0,iteration=5,where=slot", ["system.replicas=1"], False),
        ("corrupt@rank=0,iteration=5,where=replica", ["system.replicas=1"], True),
        ("corrupt@rank=0,iteration=9,where=disk", ["persist.every=3"], False),
        ("corrupt@rank=0,iteration=9,where=disk", ["persist.every=2"], True),
        ("truncate@rank=0,iteration=5,where=disk", ["system.name=torchsnapshot"], True),
        ("truncate@rank=0,iteration=2,where=disk", ["system.name=torchsnapshot"], False),
    ],
)
def test_whether_a_copy_survives_depends_on_what_is_hit_and_what_else_there_is(
    fault: str, settings: list[str], left: bool
) -> None:
    assert survives(FaultSpec.parse(fault), override(scenario(), settings)) is left


@pytest.mark.parametrize(("persisted", "left"), [((), False), ((2,), True)])
def test_what_was_seen_persisted_goes_before_what_should_be_there(persisted: tuple[int, ...], left: bool) -> None:
    config = override(scenario(), ["persist.every=2"])
    assert survives(FaultSpec.parse("group-loss@node=0,iteration=9"), config, persisted) is left


# --- without a failure


def test_a_reference_needs_the_whole_run() -> None:
    with pytest.raises(CapricornError, match="did not come to its end: no room"):
        reference_of(replace(outcome(), failure="no room"), scenario())
    short = replace(outcome(), samples=[sample(1, 0), sample(1, 1)])
    with pytest.raises(CapricornError, match="rank 0 of the run without failures left no whole record"):
        reference_of(short, scenario())


@given(rank=st.integers(0, NUM_RANKS - 1), iteration=st.integers(1, LAST), bits=st.integers(1, 1 << 40))
def test_two_undisturbed_runs_differ_by_the_first_loss_that_does(rank: int, iteration: int, bits: int) -> None:
    samples = [sample(i, r) for i in range(1, LAST + 1) for r in range(NUM_RANKS)]
    other = [
        s.model_copy(update={"loss": s.loss + bits / 2**50}) if (s.rank, s.iteration) == (rank, iteration) else s
        for s in samples
    ]
    reference = undisturbed()
    theirs = reference_of(RunOutcome("other", other, digests(), (), 1.0), scenario())
    assert difference(reference, reference) == ""
    assert f"rank {rank} in iteration {iteration}" in difference(theirs, reference)


def test_undisturbed_runs_may_differ_in_their_last_state_alone() -> None:
    samples = [sample(i, r) for i in range(1, LAST + 1) for r in range(NUM_RANKS)]
    theirs = reference_of(RunOutcome("other", samples, digests({0: "x"}), (), 1.0), scenario())
    assert difference(theirs, undisturbed()) == "the last state of rank 0 differs"
