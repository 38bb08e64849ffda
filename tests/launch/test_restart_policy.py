"""When an attempt is given up: by times that are told, none of which passes."""

from __future__ import annotations

import pytest

from capricorn.launch.nodes import GaveUpError
from capricorn.launch.restart_policy import (
    CUDA_START_PATIENCE_S,
    FIRST_ITERATION_PATIENCE_S,
    START_PATIENCE_S,
    STARVED_FACTOR,
    ProgressWatchdog,
    RestartBudget,
    SilenceWatchdog,
    patience_s,
    start_patience_s,
)

LEAST_PATIENCE_S = 45.0
FROZEN_S = 5.0


def watchdog(*iterations_s: float, every: int = 0, first_saved: int | None = None) -> ProgressWatchdog:
    """Of an attempt that began at 0 and has finished iterations at these times, some with a checkpoint."""
    progress = ProgressWatchdog(LEAST_PATIENCE_S, every=every)
    progress.attempt_began(0.0)
    for iteration, now_s in enumerate(iterations_s, 1):
        is_saved = first_saved is not None and iteration >= first_saved and iteration % every == 0
        progress.progressed(now_s, iteration=iteration, is_saved=is_saved)
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


def test_ranks_that_come_on_before_the_first_iteration_have_that_time_from_then_on() -> None:
    progress = watchdog()
    progress.progressed(100.0)
    assert stuck_after(progress) == 100 + FIRST_ITERATION_PATIENCE_S + 1


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
    ("done", "first_saved", "has_grace"),
    [
        pytest.param(3, None, False, id="long before it"),
        pytest.param(4, None, True, id="it comes next"),
        pytest.param(5, 5, True, id="it may hold up the next one"),
        pytest.param(6, 5, False, id="it is over"),
        pytest.param(9, 5, False, id="it is not the first"),
        pytest.param(5, None, False, id="the system left out the first that was due"),
        pytest.param(9, None, True, id="and takes the second"),
    ],
)
def test_the_first_checkpoint_may_take_longer_than_ten_iterations(
    done: int, first_saved: int | None, has_grace: bool
) -> None:
    progress = watchdog(*map(float, range(1, done + 1)), every=5, first_saved=first_saved)
    patience = FIRST_ITERATION_PATIENCE_S if has_grace else LEAST_PATIENCE_S
    assert stuck_after(progress) == done + patience + 1


def test_a_run_without_checkpoints_has_no_grace_for_them() -> None:
    assert stuck_after(watchdog(1.0, 2.0, every=0)) == 2 + LEAST_PATIENCE_S + 1


def test_who_has_seen_one_checkpoint_knows_how_long_they_take() -> None:
    progress = watchdog(1.0, 2.0, 102.0, 103.0, every=3, first_saved=3)
    assert stuck_after(progress) == 103 + 10 * 100 + 1


def sleeping(key: int) -> str:
    return "SS"


def test_only_those_that_are_watched_can_be_silent() -> None:
    silence = SilenceWatchdog[int](FROZEN_S)
    for node in (0, 1, 2):
        silence.heard(node, 10.0)
    silence.heard(1, 14.0)
    silence.forget(2)
    assert silence.silent(15.0, sleeping) == {}
    assert silence.silent(15.1, sleeping) == {0: FROZEN_S}
    assert silence.silent(20.0, sleeping) == dict.fromkeys([0, 1], FROZEN_S)


def test_one_that_starts_has_its_own_patience_until_it_says_that_it_is_at_work() -> None:
    silence = SilenceWatchdog[int](FROZEN_S)
    silence.heard(0, 0.0, is_starting=True)
    assert silence.silent(START_PATIENCE_S, sleeping) == {}
    assert silence.silent(START_PATIENCE_S + 0.1, sleeping) == {0: START_PATIENCE_S}
    silence.heard(0, 100.0)
    assert silence.silent(100.1 + FROZEN_S, sleeping) == {0: FROZEN_S}


@pytest.mark.parametrize(
    ("states", "starting_s", "working_s"),
    [
        ("S", START_PATIENCE_S, FROZEN_S),
        ("", START_PATIENCE_S, FROZEN_S),
        ("SR", START_PATIENCE_S, STARVED_FACTOR * FROZEN_S),
        ("SSD", START_PATIENCE_S, STARVED_FACTOR * FROZEN_S),
        ("TTT", FROZEN_S, FROZEN_S),
        ("t", FROZEN_S, FROZEN_S),
    ],
)
def test_patience_is_for_those_that_cannot_help_it(states: str, starting_s: float, working_s: float) -> None:
    assert patience_s(FROZEN_S, states, start_s=START_PATIENCE_S) == starting_s
    assert patience_s(FROZEN_S, states, start_s=None) == working_s


def test_a_longer_patience_that_was_asked_for_is_not_cut_at_the_start() -> None:
    assert patience_s(500.0, "S", start_s=START_PATIENCE_S) == 500.0


def test_a_rank_that_starts_on_cuda_may_be_silent_longer_and_no_longer_than_others_once_it_works() -> None:
    silence = SilenceWatchdog[int](FROZEN_S, start_patience_s("cuda"))
    silence.heard(0, 0.0, is_starting=True)
    assert not silence.silent(CUDA_START_PATIENCE_S - 1, lambda key: "S")
    assert silence.silent(CUDA_START_PATIENCE_S + 1, lambda key: "S") == {0: CUDA_START_PATIENCE_S}
    silence.heard(0, 500.0)
    assert silence.silent(500.0 + FROZEN_S + 1, lambda key: "S") == {0: FROZEN_S}
    assert start_patience_s("cpu") == START_PATIENCE_S < CUDA_START_PATIENCE_S
