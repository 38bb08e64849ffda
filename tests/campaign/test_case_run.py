"""The run of a case: how long it may take."""

from __future__ import annotations

import pytest

from capricorn.campaign.case_run import MAX_GAP_S, Watched
from capricorn.errors import CapricornError
from capricorn.launch.launcher import RunListener

LIMIT_S = 100.0


def test_a_run_may_take_its_time_and_a_pause_of_the_whole_job_is_not_in_it() -> None:
    now_s = 0.0
    watched = Watched(RunListener(), LIMIT_S, lambda: now_s)
    watched.on_tick()
    now_s += 100 * LIMIT_S
    watched.on_tick()
    for _ in range(int((LIMIT_S - MAX_GAP_S) / MAX_GAP_S)):
        now_s += MAX_GAP_S
        watched.on_tick()
    now_s += MAX_GAP_S
    with pytest.raises(CapricornError, match="not done after 100 s"):
        watched.on_tick()
    watched.on_tick()  # the launcher ends the run meanwhile
