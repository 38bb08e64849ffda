"""What checkpoints are worth where failures come at random: the formulas, and what is measured beside them."""

from __future__ import annotations

from math import inf, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capricorn.campaign.economics import (
    Economics,
    MeasuredEconomics,
    expected_ettr,
    iterations_between,
    wasted_s,
    young_interval,
)
from capricorn.campaign.outcomes import RunOutcome, mean_complete_s, mean_iteration_s, mean_stall_s, measured
from capricorn.campaign.sampling import schedule
from capricorn.errors import CapricornError, ConfigError
from capricorn.report.terminal.economics_table import economics_markdown
from capricorn.systems.settings import override
from tests.support.judged import digests, event, recovery, sample
from tests.support.recorded import scenario

seconds = st.floats(1e-3, 1e5)
LONG = override(scenario(), ["train.iterations=500"])


# --- formulas


def test_the_interval_of_young_has_the_known_value() -> None:
    assert young_interval(2.0, 100.0) == 20.0


@given(checkpoint_s=seconds, mtbf_s=seconds, factor=st.floats(0.1, 10))
def test_young_wastes_the_least_to_first_order(checkpoint_s: float, mtbf_s: float, factor: float) -> None:
    def wasted_frac(interval_s: float) -> float:
        return checkpoint_s / interval_s + interval_s / (2 * mtbf_s)

    best_s = young_interval(checkpoint_s, mtbf_s)
    assert wasted_frac(best_s) == pytest.approx(sqrt(2 * checkpoint_s / mtbf_s))
    assert wasted_frac(best_s) <= wasted_frac(factor * best_s) * (1 + 1e-9)


def test_ettr_has_the_known_value_and_limits() -> None:
    assert expected_ettr(10.0, 1.0, 5.0, 100.0) == pytest.approx((1 - (5 + 5) / 100) / 1.1)
    assert expected_ettr(10.0, 0.0, 5.0, inf) == 1.0
    assert expected_ettr(10.0, 1.0, 500.0, 100.0) == 0.0
    with pytest.raises(ConfigError, match="every 0 s make no sense"):
        expected_ettr(0.0, 1.0, 1.0, 1.0)


@given(checkpoint_s=seconds, interval_s=seconds, recovery_s=seconds, mtbf_s=seconds)
def test_ettr_is_a_part_of_the_whole(
    checkpoint_s: float, interval_s: float, recovery_s: float, mtbf_s: float
) -> None:  # fmt: skip
    assert 0 <= expected_ettr(interval_s, checkpoint_s, recovery_s, mtbf_s) < 1


def test_a_failure_wastes_a_checkpoint_half_an_interval_and_the_retrieval() -> None:
    assert wasted_s(2.0, 10.0, 3.0) == 2 + 5 + 3
    with pytest.raises(ConfigError, match="cannot come every 1 s"):
        wasted_s(2.0, 1.0, 3.0)


def test_an_interval_is_a_whole_number_of_iterations_that_there_are() -> None:
    assert [iterations_between(each, 0.5, 30) for each in (0.0, 0.6, 2.6, 100.0)] == [1, 1, 5, 30]


# --- the schedule


@given(seed=st.integers(0, 1000), mtbf_s=st.floats(1.0, 30.0), frac=st.floats(0, 1))
def test_a_schedule_is_repeatable_ordered_and_within_the_run(seed: int, mtbf_s: float, frac: float) -> None:
    faults = schedule(LONG, mtbf_s, 0.1, frac, seed)
    assert faults == schedule(LONG, mtbf_s, 0.1, frac, seed)
    iterations = [fault.iteration for fault in faults]
    assert iterations == sorted(iterations)
    assert all(1 <= iteration <= 498 for iteration in iterations)
    assert {fault.kind for fault in faults} <= {"kill", "node-loss"}


def test_failures_come_as_often_as_they_should_and_a_part_of_them_takes_a_node() -> None:
    faults = [fault for seed in range(200) for fault in schedule(LONG, 10.0, 0.1, 0.25, seed)]
    assert len(faults) == pytest.approx(200 * 49.8 / 10, rel=0.1)
    assert sum(fault.kind == "node-loss" for fault in faults) / len(faults) == pytest.approx(0.25, abs=0.05)


# --- measuring


def test_an_iteration_lasts_from_end_to_end_on_the_slowest_rank() -> None:
    samples = [sample(i, rank, at_s=100 + 0.3 * i + 0.01 * rank) for i in range(1, 11) for rank in (0, 1)]
    assert mean_iteration_s(samples, warmup=2) == pytest.approx(0.3)
    with pytest.raises(CapricornError, match="too few iterations"):
        mean_iteration_s(samples, warmup=9)


def test_a_checkpoint_costs_the_stall_of_its_iteration_and_is_complete_when_it_is_seen_to_be() -> None:
    samples = [sample(i, rank, at_s=float(i), stall_s=0.1 * (1 + rank), requested=i % 2 == 0,
                      completed=(i - 2,) if i > 2 else ()) for i in range(1, 9) for rank in (0, 1)]  # fmt: skip
    assert mean_stall_s(samples) == pytest.approx(0.2)
    assert mean_complete_s(samples) == pytest.approx(2.0)
    assert mean_stall_s([]) == mean_complete_s([]) == 0.0


PLANNED = MeasuredEconomics(system="capricorn", every=1, checkpoint_s=0.01, complete_s=0.1)


def struck_run() -> RunOutcome:
    """Ten useful iterations of 1 s; struck at 4.5 s in iteration 5, back from iteration 3 after 2 s."""
    before = [sample(i, rank, at_s=1000.0 + i, duration_s=1.0) for i in range(1, 5) for rank in (0, 1)]
    after = [sample(i, rank, 1, at_s=1006.5 + i - 3, duration_s=1.0) for i in range(4, 11) for rank in (0, 1)]
    ready = [event("ready", rank, 0, at_s=1000.0) for rank in (0, 1)]
    phases = {"detected_at_s": 1005.0, "detect_s": 0.5, "restart_s": 1.0, "agree_s": 0.1, "fetch_s": 0.2, "load_s": 0.2}
    events = [*ready, event("fault", at_s=1004.5), *digests()]
    return RunOutcome("run", [*before, *after], events, [recovery(3, 1, **phases)], 20.0)


def test_wasted_time_is_split_into_what_it_went_for() -> None:
    row = measured(PLANNED, struck_run(), iteration_s=1.0, num_iterations=10, mtbf_s=50.0)
    assert row.wall_s == pytest.approx(13.5)
    assert row.ettr == pytest.approx(10 / 13.5)
    assert (row.num_failures, row.redone_iterations) == (1, 1)
    assert row.redone_s == pytest.approx(1.0 + 0.5), "iteration 4, and half of iteration 5"
    assert row.recovery_s == pytest.approx(2.0)
    assert row.checkpointing_s == pytest.approx(0.0)
    assert row.predicted_ettr == pytest.approx(expected_ettr(1.0, 0.01, 2.0, 50.0))
    assert row.predicted_wasted_s == pytest.approx(0.1 + 0.5 + 2.0)


def test_a_run_that_failed_is_told_and_not_measured() -> None:
    failed = RunOutcome("run", (), (), (), 3.0, "no copy left")
    row = measured(PLANNED, failed, iteration_s=1.0, num_iterations=10, mtbf_s=50.0)
    assert (row.ettr, row.failure) == (None, "no copy left")
    text = economics_markdown(Economics(mtbf_s=50.0, node_loss_frac=0.1, iteration_s=1.0, rows=(row,)))
    assert "- capricorn: no copy left" in text
    assert "| capricorn | 1 | - |" in text


def test_a_table_has_measured_beside_predicted_and_its_mode() -> None:
    row = measured(PLANNED, struck_run(), iteration_s=1.0, num_iterations=10, mtbf_s=50.0)
    text = economics_markdown(Economics(mtbf_s=50.0, node_loss_frac=0.1, iteration_s=1.0, rows=(row,)))
    assert "## live: 0 failures, MTBF 50 s, iterations of 1 s; all in seconds" in text
    assert "| capricorn | 1 | 1 | 13.5 | 0.741 | 0.941 | 0.00 | 1.50 | 2.00 | 3.50 | 2.60 |" in text
