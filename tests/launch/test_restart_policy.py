"""When an attempt is given up: by times that are told, none of which passes."""

from __future__ import annotations

import pytest

from capricorn.launch.nodes import GaveUpError
from capricorn.launch.restart_policy import (
    FIRST_ITERATION_PATIENCE_S,
    PAUSE_S,
    ProgressWatchdog,
    RestartBudget,
    SilenceWatchdog,
)

LEAST_PATIENCE_S = 45.0


def watchdog(*iterations_s: float) -> ProgressWatchdog:
    """Of an attempt that began at 0 and has finished iterations at these times."""
    progress = ProgressWatchdog(LEAST_PATIENCE_S)
    progress.attempt_began(0.0)
    for now_s in iterations_s:
        progress.progressed(now_s)
    return progress


def stuck_after(progress: ProgressWatchdog) -> float:
    """The first of all whole seconds at which the run counts as stuck."""
    return next(second for second in range(10_000) if progress.is_stuck(second))


@pytest.mark.parametrize("num_restarts", [0, 1, 5])
def test_a_budget_is_spent_once_for_each_restart_and_names_the_node_that_wanted_one_more(num_restarts: int) -> None:
    budget = RestartBudget(num_restarts)
    for _ in range(num_restarts):
        budget.spend(0)
    with pytest.raises(GaveUpError) as raised:
        budget.spend(3)
    assert raised.value.node == 3


def test_the_first_iteration_has_the_most_time() -> None:
    assert stuck_after(watchdog()) == FIRST_ITERATION_PATIENCE_S + 1


def test_fast_iterations_have_as_long_as_waits_are_bounded() -> None:
    assert stuck_after(watchdog(1.0, 2.0, 3.0)) == 3 + LEAST_PATIENCE_S + 1


def test_slow_iterations_have_ten_times_the_longest() -> None:
    assert stuck_after(watchdog(10.0, 40.0, 45.0)) == 45 + 10 * 30 + 1


def test_a_new_attempt_has_its_own_time_and_the_pace_of_those_before() -> None:
    progress = watchdog(10.0)
    progress.attempt_began(500.0)
    assert not progress.is_stuck(599.0)
    assert progress.is_stuck(601.0)


@pytest.mark.parametrize(
    ("pause_s", "forgiven_s"), [(0.0, 0.0), (PAUSE_S, 0.0), (PAUSE_S + 1, PAUSE_S + 1), (3600.0, 3600.0)]
)
def test_a_launcher_that_was_stopped_itself_blames_nobody(pause_s: float, forgiven_s: float) -> None:
    progress = watchdog(1.0)
    progress.wait_begins(1.0, timeout_s=0.5)
    progress.wait_begins(1.5 + pause_s, timeout_s=0.5)
    assert stuck_after(progress) == 1 + forgiven_s + LEAST_PATIENCE_S + 1


def test_only_nodes_that_are_watched_can_be_silent() -> None:
    silence = SilenceWatchdog(patience_s=5.0)
    for node in (0, 1, 2):
        silence.heard(node, 10.0)
    silence.heard(1, 14.0)
    silence.forget(2)
    assert silence.silent(15.0) == []
    assert silence.silent(15.1) == [0]
    assert silence.silent(20.0) == [0, 1]
