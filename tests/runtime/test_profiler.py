"""What one iteration's ops took on every rank, by one clock."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from capricorn.hooks import NO_LAYER, OpKey
from capricorn.planner.profile import IterationProfile
from capricorn.runtime.schedule.op_clock import CpuClock, Reached
from capricorn.runtime.schedule.profiler import Profiler
from tests.support.spawn import run_ranks

OPS = tuple(OpKey(0, "forward", kind) for kind in ("attention", "gate", "dispatch", "expert", "combine"))
REDUCE = OpKey(NO_LAYER, "backward", "reduce")
TOKENS = {0: (5, 7, 0), 3: (1, 2, 9)}
SLOW_S, EARLY_S = 0.25, 3.0


class Steps:
    """A clock whose moments are reached one after the other, but only once somebody waits for them, as on a GPU."""

    def __init__(self, begin_s: float, step_s: float) -> None:
        self._now_s, self._step_s = begin_s, step_s
        self._marks: list[Reached] = []

    def at(self, reached: Reached) -> None:
        self._marks.append(reached)

    def settle(self) -> None:
        for reached in self._marks:
            reached(self._now_s)
            self._now_s += self._step_s
        self._marks.clear()

    def close(self) -> None:
        """Nothing runs."""


def measure(profiler: Profiler, iteration: int, ops: tuple[OpKey, ...] = OPS) -> tuple[OpKey, ...]:
    profiler.start(iteration)
    for op in ops:
        profiler.begin(op)
        profiler.end(op)
    return profiler.share()


def measured_in_steps(rank: int, num_ranks: int) -> list[Any]:
    """Clocks are hours apart; rank 1 begins first, and rank r needs r + 1 times as long."""
    ahead_s = 3600.0 * rank
    begin_s = 1000.0 + ahead_s - (EARLY_S if rank == 1 else 0.0)
    group = dist.group.WORLD
    assert group is not None
    profiler = Profiler(Steps(begin_s, SLOW_S * (rank + 1)), group, lambda: -ahead_s)
    before = profiler.take(TOKENS)
    ops = measure(profiler, 5)
    return [before, ops, profiler.take(TOKENS), profiler.take(TOKENS)]


def test_a_profile_has_the_times_of_all_ranks_by_one_clock_and_is_taken_once() -> None:
    num_ranks = 3
    starts_s = [EARLY_S, 0.0, EARLY_S]  # since the iteration began on rank 1
    steps_s = [SLOW_S * (rank + 1) for rank in range(num_ranks)]
    expected = IterationProfile(
        5,
        OPS,
        tuple(tuple(starts_s[r] + steps_s[r] * (1 + 2 * i) for i in range(len(OPS))) for r in range(num_ranks)),
        tuple(tuple(starts_s[r] + steps_s[r] * (2 + 2 * i) for i in range(len(OPS))) for r in range(num_ranks)),
        TOKENS,
        tuple(starts_s),
    )
    for before, ops, profile, again in run_ranks(measured_in_steps, num_ranks):
        assert (before, again) == (None, None)
        assert ops == OPS
        assert profile == expected


def measured_for_real(rank: int, num_ranks: int) -> list[Any]:
    group = dist.group.WORLD
    assert group is not None
    profiler = Profiler(CpuClock(), group, lambda: 0.0)
    profiles = []
    for iteration, ops in enumerate((OPS, (*OPS[:3], REDUCE), ()), 1):
        measure(profiler, iteration, ops)
        profiles.append(profiler.take({}))
    return profiles


def test_by_real_clocks_the_order_of_ops_is_preserved_and_no_iteration_leaks_into_the_next() -> None:
    results = run_ranks(measured_for_real, 2)
    assert results[0] == results[1]
    for profile, ops in zip(results[0], (OPS, (*OPS[:3], REDUCE), ()), strict=True):
        assert profile.ops == ops
        assert min(profile.starts_s) == 0.0
        for start_s, begins_s, ends_s in zip(profile.starts_s, profile.begins_s, profile.ends_s, strict=True):
            assert len(begins_s) == len(ends_s) == len(ops)
            times = [start_s, *(time_s for pair in zip(begins_s, ends_s, strict=True) for time_s in pair)]
            assert times == sorted(times)


def nested_and_untaken(rank: int, num_ranks: int) -> list[Any]:
    """Ops of two branches overlap, and an iteration that nobody took is replaced by the next."""
    group = dist.group.WORLD
    assert group is not None
    profiler = Profiler(Steps(0.0, 1.0), group, lambda: 0.0)
    measure(profiler, 1)
    is_on = [profiler.is_on]
    profiler.start(2)
    is_on.append(profiler.is_on)
    for step, op in (
        (profiler.begin, OPS[0]),
        (profiler.begin, OPS[1]),
        (profiler.end, OPS[0]),
        (profiler.end, OPS[1]),
    ):
        step(op)
    profiler.share()
    is_on.append(profiler.is_on)
    return [is_on, profiler.take({}), profiler.take({})]


def test_ops_may_overlap_and_the_newest_iteration_is_the_one_that_is_taken() -> None:
    for is_on, profile, again in run_ranks(nested_and_untaken, 2):
        assert is_on == [False, True, False]
        assert (profile.iteration, profile.ops, again) == (2, OPS[:2], None)
        assert profile.begins_s == ((1.0, 2.0),) * 2
        assert profile.ends_s == ((3.0, 4.0),) * 2


def measured_without_a_clock(rank: int, num_ranks: int) -> IterationProfile | None:
    """Clocks are hours apart, and one rank has had no answer to how far."""
    group = dist.group.WORLD
    assert group is not None
    profiler = Profiler(Steps(3600.0 * rank, SLOW_S), group, lambda: None if rank else 0.0)
    measure(profiler, 1)
    return profiler.take({})


def test_ranks_whose_clocks_are_unknown_are_taken_to_begin_together() -> None:
    for profile in run_ranks(measured_without_a_clock, 2):
        assert profile.starts_s == (0.0, 0.0)
        assert profile.begins_s[0] == profile.begins_s[1]
        assert profile.begins_s[0][0] == SLOW_S
