"""Follows the iterations of one rank for its planner: opens and closes the gate, and has ops measured when that is
wanted.

Books what the checkpoint traffic of each iteration did. On the training thread. Knows no store and no slot.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

from capricorn.hooks import OpKey, TrainerHook
from capricorn.planner.link_model import LinkModel
from capricorn.planner.plan import Limit, Plan, Planner
from capricorn.planner.profile import COMMUNICATION, IdleSpan, spans_of
from capricorn.runtime.comm.collectives import gather_addresses
from capricorn.runtime.comm.idle_signals import IdleSignals
from capricorn.runtime.schedule.collisions import Collisions
from capricorn.runtime.schedule.gate import Gate
from capricorn.runtime.schedule.op_clock import Clock, make_clock
from capricorn.runtime.schedule.profiler import Profiler
from capricorn.systems.interface import ChunkEvent, JobContext, Planning
from capricorn.topology import Topology
from capricorn.units import Seconds

FIRST_QUESTIONS = 8
"""How often rank 0 is asked for the time before there is an iteration to be measured."""


@dataclass(frozen=True, slots=True)
class _Edges:
    """The ops that open and close the idle spans."""

    opens: dict[OpKey | None, int]
    closes: dict[OpKey, int]
    closes_after: dict[OpKey, int]
    last: int

    @classmethod
    def of(cls, spans: Sequence[IdleSpan]) -> _Edges:
        return cls(
            opens={span.opens: index for index, span in enumerate(spans)},
            closes={span.closes: index for index, span in enumerate(spans) if span.closes_after is None},
            closes_after={span.closes_after: index for index, span in enumerate(spans) if span.closes_after},
            last=len(spans) - 1,
        )


class Scheduler(TrainerHook):
    """Everything between the hooks of the trainer and the chunks that the executor sends."""

    def __init__(
        self,
        planner: Planner,
        gate: Gate,
        clock: Clock,
        profiler: Profiler,
        signals: IdleSignals,
        ends: Sequence[int],
        topology: Topology,
    ) -> None:
        """Connects the parts.

        Args:
            planner: decides what is sent when.
            gate: is opened and closed as training goes along.
            clock: tells when an op that was launched is reached.
            profiler: measures the ops of an iteration.
            signals: tell the owners of idle spans.
            ends: the ranks whose links the traffic of this one uses: its own and its holders'.
            topology: the ranks, and which of them share the experts.
        """
        self._planner, self._gate, self._clock, self._profiler = planner, gate, clock, profiler
        self._signals, self._ends, self._topology = signals, ends, topology
        self._idle_s: Seconds = 0.0
        self._collisions = Collisions()
        self._plan = Plan(())
        self._edges = _Edges.of(())
        self._number = 0
        self._tokens: dict[int, tuple[int, ...]] = {}
        self._profiled_tokens: dict[int, tuple[int, ...]] = {}
        self._planning = Planning()
        self._lost_s = self._cost_s = 0.0
        self._greatest_losses_s = (0.0, 0.0)

    # --- plans, between iterations -------------------------------------------------------------------------------

    def plan(self, iteration: int, link: LinkModel | None, *, is_late: bool = False) -> Plan:
        """Returns how to send the checkpoint of an iteration over such a link; without a link, all of it is overflow.

        `is_late` if it had to wait for the one before.
        """
        with self._timed("plan_s"):
            self._plan = self._planner.plan(iteration, link)
        self._gate.link = link
        self._gate.begin_save(is_late=is_late)
        now = self._planning
        now.replanned = now.replanned or self._planner.replanned
        now.planned_bytes += self._plan.planned_bytes
        now.link_bytes_per_s = link.bytes_per_s if link is not None else 0.0
        return self._plan

    def take_profile(self) -> None:
        """Takes in what was measured of the last iteration; collective."""
        with self._timed("profile_s"):
            profile = self._profiler.take(self._profiled_tokens)
            if profile is not None:
                self._collisions.moving_s = profile.moving_s()[self._ends[0]]
                self._planner.observe(profile)
                durations_s = profile.span_s()
                self._idle_s = sum(map(min, zip(*(durations_s[rank] for rank in self._ends), strict=True)))

    def note_deadline_missed(self) -> None:
        """Notes that the checkpoint on its way holds up the next one."""
        self._gate.note_deadline_missed()

    def overflow(self, waited_s: Seconds) -> None:
        """Notes that an update has waited so long for chunks to leave."""
        self._planning.overflow_s += waited_s
        self._lost_s += waited_s

    def book(self, sent: Sequence[ChunkEvent]) -> None:
        """Sets what was sent since the last call against what the link did meanwhile."""
        now = self._planning
        urgent_bytes = sum(event.num_bytes for event in sent if event.is_pressed)
        # What had to leave whatever happened is overflow, also where it collided.
        not_urgent = [event for event in sent if not event.is_pressed]
        colliding_bytes = self._collisions.take(not_urgent)
        now.overflow_bytes += urgent_bytes
        now.colliding_bytes += colliding_bytes
        now.hidden_bytes += sum(event.num_bytes for event in not_urgent) - colliding_bytes
        if now.link_bytes_per_s:
            collision_s = colliding_bytes / now.link_bytes_per_s
            now.collision_s += collision_s
            self._lost_s += collision_s

    def take_losses(self) -> tuple[Seconds, Seconds]:
        """Returns what collisions and overflow, and profiling and planning, cost this rank since the last call."""
        taken = self._lost_s, self._cost_s
        self._lost_s = self._cost_s = 0.0
        return taken

    def note_losses(self, lost_s: Seconds, cost_s: Seconds) -> None:
        """Notes the losses of the rank that lost most."""
        self._greatest_losses_s = (self._greatest_losses_s[0] + lost_s, self._greatest_losses_s[1] + cost_s)

    def take(self) -> Planning:
        """Returns what planning did since the last call."""
        taken, self._planning = self._planning, Planning()
        self._planning.link_bytes_per_s = taken.link_bytes_per_s
        taken.risk, taken.drift, taken.idle_s = self._plan.risk, self._planner.drift, self._idle_s
        return taken

    def check(self) -> None:
        """Tells whether its threads still run.

        Raises:
            CapricornError: one has ended, and why.
        """
        self._clock.check()
        self._signals.check()

    def close(self) -> None:
        """Ends threads, and lets everything pass."""
        self._clock.close()
        self._gate.release()
        self._signals.close()

    # --- hooks ---------------------------------------------------------------------------------------------------

    def on_iteration_begin(self, iteration: int) -> None:
        if self._planner.wants_profile(iteration):
            self._profiler.start(iteration)
            self._planning.profiled = True
        self._begin_span(None)

    def on_op_begin(self, op: OpKey) -> None:
        if self._profiler.is_on:
            with self._timed("profile_s"):
                self._profiler.begin(op)
        self._end_span(self._edges.closes.get(op))
        if op.kind in COMMUNICATION:
            self._clock.at(self._collisions.begin)

    def on_op_end(self, op: OpKey) -> None:
        if self._profiler.is_on:
            with self._timed("profile_s"):
                self._profiler.end(op)
        self._end_span(self._edges.closes_after.get(op))
        if op.kind in COMMUNICATION:
            self._clock.at(lambda now_s: self._collisions.end(op, now_s))
            if self._profiler.is_on:
                self._signals.ask_time()
            self._begin_span(op)

    def on_routed(self, layer: int, tokens_per_expert: Sequence[int]) -> None:
        num_experts, is_other = divmod(len(tokens_per_expert), self._topology.num_expert_replicas)
        if is_other or num_experts < self._topology.expert_parallel:
            return  # not spread over the ranks as ours are, so the loads say nothing of a rank
        split = self._topology.experts_of(num_experts)
        until = [0, *accumulate(tokens_per_expert)]
        self._tokens[layer] = tokens = tuple(until[ids.stop] - until[ids.start] for ids in split)
        self._planner.on_routed(layer, tokens)

    def after_update(self, iteration: int) -> None:
        # An iteration may be long in coming, for an evaluation or a save to disk.
        self._clock.at(lambda now_s: self._gate.release())

    def on_iteration_end(self, iteration: int) -> None:
        if self._profiler.is_on:
            with self._timed("profile_s"):
                self._edges = _Edges.of(spans_of(self._profiler.share()))
                self._profiled_tokens = dict(self._tokens)
        self._planner.note(iteration, *self._greatest_losses_s)
        self._greatest_losses_s = (0.0, 0.0)

    # --- spans ---------------------------------------------------------------------------------------------------

    def _begin_span(self, opens: OpKey | None) -> None:
        span = self._edges.opens.get(opens)
        if span is None:
            return
        self._number += 1
        if span < len(self._plan.limits):
            number, limit = self._number, self._planner.limit(span)
            self._clock.at(lambda now_s: self._open(number, now_s, limit))

    def _open(self, number: int, begin_s: Seconds, limit: Limit) -> None:
        """Tells the begin of a span to the owners whose replicas are kept here, and to this rank's own gate."""
        self._signals.tell(number)
        self._gate.open(number, begin_s, limit)

    def _end_span(self, span: int | None) -> None:
        if span is not None and self._plan.limits:
            is_last = span == self._edges.last
            self._clock.at(lambda now_s: self._gate.close(is_last=is_last))

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        begin_s = time.perf_counter()
        yield
        took_s = time.perf_counter() - begin_s
        setattr(self._planning, part, getattr(self._planning, part) + took_s)
        self._cost_s += took_s


def make_scheduler(
    job: JobContext, planner: Planner, gate: Gate, secret: bytes, holders: Sequence[int], owners: Sequence[int]
) -> Scheduler:
    """Returns the scheduler of a rank; collective.

    Args:
        job: who and where this rank is.
        planner: decides what is sent when.
        gate: lets chunks pass.
        secret: known to the ranks of this attempt alone.
        holders: the ranks that keep replicas of this one's state.
        owners: the ranks whose replicas this one keeps.
    """
    clock = make_clock(job.device)
    signals = IdleSignals(job.rank, job.address, secret, job.topology.world_size)
    try:
        signals.start(gather_addresses(job.control_group, signals.address), owners, holders, gate.hear)
        for _ in range(FIRST_QUESTIONS):
            signals.ask_time()
        profiler = Profiler(clock, job.control_group, signals.offset_s)
    except BaseException:
        signals.close()
        clock.close()
        raise
    return Scheduler(planner, gate, clock, profiler, signals, [job.rank, *holders], job.topology)
