"""From the hooks of a trainer to the gate, the planner and the books; with stand-ins for all it drives."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from capricorn.hooks import NO_LAYER, OpKey
from capricorn.planner.link_model import LinkModel
from capricorn.planner.plan import Chunk, Limit, Plan
from capricorn.planner.profile import COMMUNICATION, IterationProfile, spans_of
from capricorn.runtime.schedule.gate import Gate
from capricorn.runtime.schedule.op_clock import Reached
from capricorn.runtime.schedule.scheduler import Scheduler
from capricorn.systems.interface import ChunkEvent
from capricorn.topology import Topology

FORWARD = tuple(OpKey(0, "forward", kind) for kind in ("attention", "gate", "dispatch", "expert", "combine"))
BACKWARD = tuple(OpKey(0, "backward", op.kind) for op in reversed(FORWARD))
HEAD = (OpKey(NO_LAYER, "forward", "head"), OpKey(NO_LAYER, "backward", "head"))
REDUCE, UPDATE = OpKey(NO_LAYER, "backward", "reduce"), OpKey(NO_LAYER, "forward", "update")
OPS = (*FORWARD, *HEAD, *BACKWARD, REDUCE, UPDATE)
SPANS = spans_of(OPS)
LIMITS = tuple(Limit(0.5 + index, 1000 * index) for index in range(len(SPANS)))
LINK = LinkModel(0.001, 1e4)


def stand_in(**attributes: Any) -> Any:
    return SimpleNamespace(**attributes)


class StandIns:
    """A planner, a gate, a clock, a profiler and signals; what is asked of them goes into `log`."""

    def __init__(self, world_size: int = 2, ends: Sequence[int] = (0, 1), profiled: Sequence[int] = (1,)) -> None:
        self.log: list[Any] = []
        self.now_s = 0.0
        self.profiled, self.plan = profiled, Plan((Chunk(0, 700), Chunk(700, 300, len(LIMITS))), LIMITS, risk=0.25)
        self.profile: IterationProfile | None = None
        self.links: list[LinkModel | None] = []
        self.observed: list[IterationProfile] = []
        self.noted: list[tuple[int, float, float]] = []
        self.routed: list[tuple[int, tuple[int, ...]]] = []
        self._ops: list[OpKey] = []
        self.planner = stand_in(
            wants_profile=lambda iteration: iteration in self.profiled,
            on_routed=lambda layer, tokens: self.routed.append((layer, tokens)),
            observe=self.observed.append,
            note=lambda *what: self.noted.append(what),
            plan=self._plan,
            limit=lambda span: LIMITS[span],
            drift=0.125,
            replanned=True,
        )
        self.gate = stand_in(
            open=lambda number, begin_s, limit: self.log.append(("open", number, begin_s, limit)),
            close=lambda *, is_last=False: self.log.append("close last" if is_last else "close"),
            release=lambda: self.log.append("release"),
            begin_save=lambda *, is_late: self.log.append("begin late save" if is_late else "begin save"),
            note_deadline_missed=lambda: self.log.append("deadline missed"),
            link=None,
        )
        self.clock = stand_in(at=lambda reached: reached(self.now_s), settle=list, close=self._note("clock"))
        self.profiler = stand_in(
            is_on=False, start=self._profile, begin=self._ops.append, end=lambda op: None, share=self._share,
            take=self._take,
        )  # fmt: skip
        self.signals = stand_in(
            tell=lambda number: self.log.append(("tell", number)),
            ask_time=self._note("ask time"),
            close=self._note("signals"),
        )
        self.scheduler = Scheduler(
            self.planner, self.gate, self.clock, self.profiler, self.signals, list(ends), Topology(world_size, 1)
        )
        self.scheduler.plan(0, LINK)
        self.scheduler.take()
        self.scheduler.take_losses()
        self.links.clear()
        self.log.clear()

    def _note(self, what: str) -> Any:
        return lambda: self.log.append(what)

    def _plan(self, iteration: int, link: LinkModel | None) -> Plan:
        self.links.append(link)
        return self.plan

    def _profile(self, iteration: int) -> None:
        self.profiler.is_on = True
        self._ops.clear()

    def _share(self) -> tuple[OpKey, ...]:
        self.profiler.is_on = False
        return tuple(self._ops)

    def _take(self, tokens: Mapping[int, tuple[int, ...]]) -> IterationProfile | None:
        taken, self.profile = self.profile, None
        return None if taken is None else replace(taken, tokens=tokens)

    def train(self, iteration: int, ops: Sequence[OpKey] = OPS, *, loads: Sequence[int] = ()) -> list[Any]:
        """One iteration of a trainer, each op a second long; the log with the ops in between."""
        self.log.clear()
        scheduler = self.scheduler
        scheduler.on_iteration_begin(iteration)
        for op in ops:
            if op == UPDATE:
                scheduler.take_profile()
            self.log.append(f"begin {op}")
            scheduler.on_op_begin(op)
            self.now_s += 1.0
            if op.kind == "gate" and op.direction == "forward" and loads:
                scheduler.on_routed(op.layer, loads)
            scheduler.on_op_end(op)
            self.log.append(f"end {op}")
        scheduler.after_update(iteration)
        scheduler.on_iteration_end(iteration)
        return list(self.log)


NUM_COMMUNICATIONS = sum(op.kind in COMMUNICATION for op in OPS)


def between_ops(log: Sequence[Any]) -> dict[str, Any]:
    """What happened, each by the begin or end of an op that came last before it, or `start`."""
    found: dict[str, list[Any]] = {}
    last = "start"
    for entry in log:
        if isinstance(entry, str) and entry.startswith(("begin ", "end ")) and not entry.endswith("save"):
            last = entry
        else:
            found.setdefault(last, []).append(entry[:2] if isinstance(entry, tuple) else entry)
    return found


def opens(log: Sequence[Any]) -> list[Any]:
    return [entry for entry in log if entry[0] == "open"]


def test_spans_open_and_close_where_the_ops_say_in_both_directions() -> None:
    """What happens at the end of an op is logged before that end, so it follows the begin."""
    job = StandIns()
    job.train(1)
    assert between_ops(job.train(2)) == {
        "start": [("tell", 1), ("open", 1)],
        "begin gate.0.forward": ["close"],  # at its end: the counts are exchanged before the dispatch
        "begin dispatch.0.forward": [("tell", 2), ("open", 2)],
        "begin combine.0.forward": ["close", ("tell", 3), ("open", 3)],
        "begin combine.0.backward": ["close", ("tell", 4), ("open", 4)],
        "begin dispatch.0.backward": ["close", ("tell", 5), ("open", 5)],
        "begin reduce.backward": ["close last"],
        "end update.forward": ["release"],
    }


def test_the_gate_is_left_alone_until_the_first_iteration_was_measured() -> None:
    job = StandIns(profiled=[2])
    assert between_ops(job.train(1)) == {"end update.forward": ["release"]}
    assert opens(job.train(2)) == []
    assert len(opens(job.train(3))) == len(SPANS)


def test_spans_are_numbered_through_all_iterations() -> None:
    job = StandIns()
    job.train(1)
    numbers = [number for iteration in (2, 3, 4) for _, number, *_ in opens(job.train(iteration))]
    assert numbers == list(range(1, 3 * len(SPANS) + 1))


def test_ranks_of_other_speed_and_load_number_alike() -> None:
    fast, slow = StandIns(ends=(0, 1)), StandIns(ends=(1, 0))
    for iteration in (1, 2, 3):
        slow.now_s += 0.5
        logs = [between_ops(job.train(iteration, loads=loads)) for job, loads in ((fast, (1, 2)), (slow, (9, 1)))]
        assert logs[0] == logs[1]


def test_a_span_begins_when_it_is_reached_and_has_the_limit_of_the_plan() -> None:
    job = StandIns()
    job.train(1)
    job.scheduler.plan(1, LINK)
    begin_s = job.now_s
    found = opens(job.train(2))
    assert [limit for *_, limit in found] == list(LIMITS)
    assert [opened_s - begin_s for _, _, opened_s, _ in found] == [0.0, 3.0, 5.0, 8.0, 10.0]


def test_the_gate_is_left_alone_by_a_plan_without_limits() -> None:
    job = StandIns()
    job.plan = Plan((Chunk(0, 1000),))
    job.train(1)
    job.scheduler.plan(1, LINK)
    assert opens(job.train(2)) == []


def test_spans_follow_the_ops_of_the_last_iteration_that_was_measured() -> None:
    job = StandIns(profiled=[1, 2])
    job.train(1)
    fewer = (*FORWARD, REDUCE, UPDATE)
    job.train(2, fewer)
    assert len(opens(job.train(3, fewer))) == len(spans_of(fewer)) == 2


def test_an_iteration_that_begins_with_a_communication_has_no_span_before_it() -> None:
    job = StandIns()
    ops = (REDUCE, *FORWARD, UPDATE)
    job.train(1, ops)
    found = between_ops(job.train(2, ops))
    assert "start" not in found
    assert found["begin reduce.backward"] == [("tell", 1), ("open", 1)]


def test_in_a_measured_iteration_alone_the_clock_is_compared() -> None:
    job = StandIns(profiled=[1, 3])
    asked = [job.train(iteration).count("ask time") for iteration in (1, 2, 3, 4)]
    assert asked == [NUM_COMMUNICATIONS, 0, NUM_COMMUNICATIONS, 0]


def test_without_routers_and_ops_nothing_but_the_release_happens() -> None:
    job = StandIns()
    assert [job.train(iteration, ()) for iteration in (1, 2)] == [["release"]] * 2


class Deferred:
    """A clock whose moments are reached when it is closed, as on a GPU that is behind."""

    def __init__(self) -> None:
        self._marks: list[Reached] = []

    def at(self, reached: Reached) -> None:
        self._marks.append(reached)

    def settle(self) -> None:
        marks, self._marks = self._marks, []
        for reached in marks:
            reached(0.0)

    close = settle


def test_after_the_end_everything_passes_also_if_the_device_was_behind() -> None:
    job, gate, clock = StandIns(), Gate(is_reactive=True), Deferred()
    scheduler = Scheduler(job.planner, gate, clock, job.profiler, job.signals, [0, 1], Topology(2, 1))
    scheduler.on_iteration_begin(1)
    for op in OPS:
        scheduler.on_op_begin(op)
        scheduler.on_op_end(op)
    scheduler.on_iteration_end(1)
    clock.settle()
    scheduler.on_iteration_begin(2)
    scheduler.on_op_begin(FORWARD[0])
    scheduler.on_op_end(FORWARD[1])
    scheduler.close()
    sender = threading.Thread(target=lambda: gate.wait(1, 1000, 0, is_overflow=False), daemon=True)
    sender.start()
    sender.join(1.0)
    has_passed = not sender.is_alive()
    gate.release()
    assert has_passed


def test_the_end_lets_everything_pass_and_ends_clock_and_signals() -> None:
    job = StandIns()
    job.scheduler.close()
    assert sorted(job.log) == ["clock", "release", "signals"]


def test_a_plan_is_made_for_the_link_and_begins_a_checkpoint() -> None:
    job = StandIns()
    assert job.scheduler.plan(3, LINK) is job.plan
    assert (job.links, job.gate.link, job.log) == ([LINK], LINK, ["begin save"])
    planning = job.scheduler.take()
    assert (planning.planned_bytes, planning.replanned, planning.link_bytes_per_s) == (700, True, 1e4)
    assert (planning.risk, planning.drift) == (0.25, 0.125)
    assert planning.plan_s > 0


def test_before_the_link_is_known_the_planner_is_told_so() -> None:
    job = StandIns()
    job.scheduler.plan(3, None)
    assert job.links == [None]
    assert job.gate.link is None
    assert job.scheduler.take().link_bytes_per_s == 0.0


def test_what_planning_did_is_taken_once_and_the_link_stays_known() -> None:
    job = StandIns()
    job.train(1)
    job.scheduler.plan(1, LINK)
    first, second = job.scheduler.take(), job.scheduler.take()
    assert (first.profiled, second.profiled) == (True, False)
    assert (first.planned_bytes, second.planned_bytes, second.plan_s, second.replanned) == (700, 0, 0.0, False)
    assert second.link_bytes_per_s == 1e4


def test_late_checkpoints_are_told_to_the_gate() -> None:
    job = StandIns()
    job.scheduler.note_deadline_missed()
    job.scheduler.plan(1, LINK, is_late=True)
    job.scheduler.plan(2, LINK)
    assert job.log == ["deadline missed", "begin late save", "begin save"]


def sent(begin_s: float, end_s: float, num_bytes: int, *, is_pressed: bool = False) -> ChunkEvent:
    return ChunkEvent("send", 1, begin_s, end_s, num_bytes, is_pressed)


def books(job: StandIns) -> tuple[int, int, int]:
    planning = job.scheduler.take()
    return planning.hidden_bytes, planning.colliding_bytes, planning.overflow_bytes


def test_bytes_sent_in_communications_collide_and_all_others_are_hidden() -> None:
    job = StandIns()
    job.scheduler.plan(1, LINK)
    job.train(1)  # the dispatch lasts from 2 to 3, the combine from 4 to 5
    job.scheduler.book([sent(0.0, 2.0, 100), sent(2.5, 3.5, 100), sent(4.0, 5.0, 30)])
    planning = job.scheduler.take()
    assert (planning.hidden_bytes, planning.colliding_bytes, planning.overflow_bytes) == (150, 80, 0)
    assert planning.collision_s == pytest.approx(80 / 1e4)
    assert books(job) == (0, 0, 0)


def test_bytes_that_somebody_waited_for_are_overflow_also_where_they_collide() -> None:
    job = StandIns()
    job.train(1)  # the dispatch lasts from 2 to 3
    job.scheduler.book([sent(0.0, 1.0, 70, is_pressed=True), sent(1.0, 2.0, 30)])
    assert books(job) == (30, 0, 70)
    job.scheduler.book([sent(2.0, 3.0, 100, is_pressed=True)])
    assert books(job) == (0, 0, 100)


def test_after_a_profile_waiting_for_a_straggler_does_not_collide() -> None:
    job = StandIns(profiled=[1])
    times = tuple(float(index) for index in range(len(OPS)))
    late = tuple(time_s + (0.75 if op.kind == "dispatch" else 0.0) for op, time_s in zip(OPS, times, strict=True))
    ends = tuple(time_s + 1.0 for time_s in times)
    job.profile = IterationProfile(1, OPS, (times, late), (ends, ends), {})
    job.train(1)
    begin_s = job.now_s
    job.scheduler.book([])
    job.train(2)
    dispatch = begin_s + OPS.index(OpKey(0, "backward", "dispatch"))
    job.scheduler.book([sent(dispatch, dispatch + 0.75, 100), sent(dispatch + 0.75, dispatch + 1.0, 10)])
    assert books(job) == (100, 10, 0)


def test_idle_time_is_what_this_rank_and_its_hosts_have_in_common() -> None:
    """Rank 1 leaves the dispatches half a second later; rank 2 is no holder, and slower still."""
    job = StandIns(world_size=3, ends=(0, 1))
    times = tuple(float(index) for index in range(len(OPS)))
    rows = tuple(
        tuple(t + 1.0 + (late_s if op.kind == "dispatch" else 0.0) for op, t in zip(OPS, times, strict=True))
        for late_s in (0.0, 0.5, 0.9)
    )
    job.profile = profile = IterationProfile(1, OPS, (times,) * 3, rows, {})
    job.scheduler.take_profile()
    assert job.observed == [profile]
    assert job.scheduler.take().idle_s == pytest.approx(sum(profile.span_s()[0]) - 2 * 0.5)


def test_a_profile_has_the_loads_of_its_own_iteration_by_rank() -> None:
    job = StandIns(profiled=[1])
    job.train(1, loads=[3, 4, 5])  # three experts on two ranks: the first has two
    job.profile = IterationProfile(1, OPS, ((0.0,) * len(OPS),) * 2, ((0.0,) * len(OPS),) * 2, {})
    job.train(2, loads=[1, 1, 1])
    assert job.routed == [(0, (7, 5)), (0, (2, 1))]
    assert [profile.tokens for profile in job.observed] == [{0: (7, 5)}]


def test_loads_of_several_expert_parallel_groups_are_those_of_all_ranks() -> None:
    job = StandIns()
    topology = Topology(4, 1, 2)
    scheduler = Scheduler(job.planner, job.gate, job.clock, job.profiler, job.signals, [0, 1], topology)
    scheduler.on_routed(0, [3, 4, 5, 10, 20, 30])  # three experts on two ranks, twice
    scheduler.on_routed(1, [3, 4, 5])  # of one group alone
    assert job.routed == [(0, (7, 5, 30, 30))]


@pytest.mark.parametrize("counts", [[], [5], [5, 6]])
def test_loads_of_fewer_experts_than_ranks_are_ignored(counts: list[int]) -> None:
    job = StandIns(world_size=3)
    job.scheduler.on_routed(0, counts)
    assert job.routed == []


def test_losses_are_what_overflow_and_collisions_cost_and_are_taken_once() -> None:
    job = StandIns(profiled=[])
    job.scheduler.plan(1, LINK)
    job.scheduler.take_losses()
    job.train(1)
    job.scheduler.book([sent(2.0, 3.0, 500)])
    job.scheduler.overflow(0.25)
    lost_s, cost_s = job.scheduler.take_losses()
    planning = job.scheduler.take()
    assert lost_s == pytest.approx(0.25 + 500 / 1e4)
    assert planning.overflow_s == 0.25
    assert cost_s >= 0.0
    assert job.scheduler.take_losses() == (0.0, 0.0)


def test_profiling_and_planning_cost_what_is_reported_of_them() -> None:
    job = StandIns()
    job.train(1)
    job.scheduler.plan(1, LINK)
    _, cost_s = job.scheduler.take_losses()
    planning = job.scheduler.take()
    assert cost_s > 0
    assert cost_s == pytest.approx(planning.plan_s + planning.profile_s)


def test_the_planner_hears_the_losses_of_an_iteration_with_its_end_and_once() -> None:
    job = StandIns()
    job.scheduler.note_losses(0.5, 0.125)
    job.scheduler.note_losses(0.25, 0.0)
    job.scheduler.on_iteration_end(4)
    job.scheduler.on_iteration_end(5)
    assert job.noted == [(4, 0.75, 0.125), (5, 0.0, 0.0)]
