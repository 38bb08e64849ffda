"""Drives a planner through a training in virtual time: what its plans collide with, leave over and cost."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from capricorn.hooks import NO_LAYER
from capricorn.planner.link_model import LinkModel
from capricorn.planner.plan import Limit, Plan, Planner
from capricorn.planner.profile import spans_of
from capricorn.simulate.training_model import SimulatedTraining
from capricorn.units import Bytes, Seconds


class Iteration(NamedTuple):
    """The fate of the checkpoint that was sent in one iteration."""

    collision_s: Seconds
    """Delay of the all-to-all."""
    overflow_s: Seconds
    """How long the update waited for what had not been sent."""
    profile_s: Seconds
    """Time for profiling and planning; 0 if there was no profile."""
    planned_bytes: Bytes
    hidden_bytes: Bytes
    """Planned bytes that were sent while the link was idle."""
    profiled: bool


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """The result of a policy, over all iterations."""

    base_s: Seconds
    """Time of the training without checkpoints."""
    iterations: tuple[Iteration, ...]

    @property
    def collision_s(self) -> Seconds:
        return sum(each.collision_s for each in self.iterations)

    @property
    def overflow_s(self) -> Seconds:
        return sum(each.overflow_s for each in self.iterations)

    @property
    def slowdown(self) -> float:
        """The training's time as a multiple of the same without checkpoints."""
        profile_s = sum(each.profile_s for each in self.iterations)
        return 1 + (self.collision_s + self.overflow_s + profile_s) / self.base_s

    @property
    def profiled_frac(self) -> float:
        return self.num_profiles(1, len(self.iterations)) / len(self.iterations)

    @property
    def accuracy_frac(self) -> float | None:
        """The share of the bytes planned into spans that did fit; None if none were planned."""
        planned_bytes = sum(each.planned_bytes for each in self.iterations)
        return sum(each.hidden_bytes for each in self.iterations) / planned_bytes if planned_bytes else None

    def num_profiles(self, first: int, last: int) -> int:
        """Returns how many of the iterations `first` to `last`, from 1, were measured."""
        return sum(each.profiled for each in self.iterations[first - 1 : last])


class Checkpoint:
    """The chunks of one plan, as they go out span by span in one iteration after the other."""

    def __init__(self, plan: Plan, link: LinkModel) -> None:
        self.plan = plan
        self._planned_bytes = plan.planned_bytes
        self._link = link
        self._ends = list(accumulate(chunk.num_bytes for chunk in plan.chunks))
        self._num_planned = bisect_right(self._ends, self._planned_bytes)
        self.begin()

    def begin(self) -> None:
        """Begins an iteration, in which nothing has been sent yet."""
        self._sent = self._budget = self._hidden_bytes = 0
        self._collision_s: Seconds = 0.0

    def outcome(self, profile_s: Seconds, profiled: bool) -> Iteration:
        """Sends the rest while the update waits, and returns what became of the checkpoint."""
        rest = self._ends[-1] - self._sent
        overflow_s = self._link.transfer_s(rest) if rest else 0.0
        hidden_bytes = min(self._hidden_bytes, self._planned_bytes)
        return Iteration(self._collision_s, overflow_s, profile_s, self._planned_bytes, hidden_bytes, profiled)

    def send_freely(self, true_s: Seconds) -> None:
        """Sends in a span all that fits, while nothing is planned yet."""
        self._send(min(self._sent + self._link.capacity_bytes(true_s), self._ends[-1]), true_s)

    def send_blindly(self, limit: Limit, true_s: Seconds) -> None:
        """Sends in a span all that is planned up to its end, without a gate and no overflow."""
        self._budget += limit.num_bytes
        started = min(bisect_left(self._ends, self._budget) + 1 if self._budget else 0, self._num_planned)
        self._send(self._ends[started - 1] if started else 0, true_s)

    def send_gated(self, limit: Limit, true_s: Seconds) -> None:
        """Sends in a span with a gate: nothing starts after its end, nor what would leave after the limit.

        Whatever the plan, bytes that could go earlier do, and the overflow follows on the rest.
        """
        if limit.num_bytes:
            room = self._link.capacity_bytes(limit.end_s)
            started = bisect_left(self._ends, self._sent + true_s * self._link.bytes_per_s)
            self._send(min(self._sent + room, self._ends[min(started, len(self._ends) - 1)]), true_s)

    def _send(self, until: Bytes, true_s: Seconds) -> None:
        """Sends the bytes up to there, back to back from the begin of a span that lasts that long."""
        num_bytes = until - self._sent
        if num_bytes <= 0:
            return
        self._sent += num_bytes
        self._collision_s += max(0.0, self._link.transfer_s(num_bytes) - true_s)
        self._hidden_bytes += min(num_bytes, self._link.capacity_bytes(true_s))


def replay(
    planner: Planner,
    training: SimulatedTraining,
    link: LinkModel,
    *,
    gate: bool,
    profile_cost_frac: float,
    oracle: bool = False,
) -> ReplayOutcome:
    """Returns what the planner makes of the training, which sends a checkpoint in every iteration.

    Args:
        planner: it is shown the profiles that it wants, each after its iteration.
        training: how long each iteration takes without checkpoints.
        link: the one between a rank and the holder of its replica.
        gate: whether nothing is sent after the end of an idle span.
        profile_cost_frac: time to profile and plan an iteration, as a share of it.
        oracle: whether it is shown each iteration before it plans it, at no cost.
    """
    run = _Replay(planner, training, link, gate)
    iterations = []
    for index, base_s in enumerate(training.base_s.tolist()):
        number = index + 1
        if oracle:
            planner.observe(training.profile(index, number))
        sent, wants_profile = run.iterate(index)
        profiled = wants_profile and not oracle
        if profiled:
            planner.observe(training.profile(index, number))
        done = sent.outcome(profile_cost_frac * base_s if profiled else 0.0, profiled)
        planner.note(number, done.collision_s + done.overflow_s, done.profile_s)
        iterations.append(done)
    return ReplayOutcome(float(training.base_s.sum()), tuple(iterations))


class _Replay:
    """The iterations of a training with a planner, one at a time."""

    def __init__(self, planner: Planner, training: SimulatedTraining, link: LinkModel, gate: bool) -> None:
        self._planner, self._link = planner, link
        self._spans_IS, self._tokens_IMW = training.spans_s.tolist(), training.tokens.tolist()
        self._routed = _routed_before(training)
        self._send = Checkpoint.send_gated if gate else Checkpoint.send_blindly
        self._checkpoint = Checkpoint(Plan(()), link)

    def iterate(self, index: int) -> tuple[Checkpoint, bool]:
        """Sends the checkpoint in that iteration, and returns it with whether a profile was wanted."""
        planner, send, tokens_MW = self._planner, self._send, self._tokens_IMW[index]
        plan = planner.plan(index, self._link)
        wants_profile = planner.wants_profile(index + 1)
        if self._checkpoint.plan is not plan:
            self._checkpoint = Checkpoint(plan, self._link)
        checkpoint = self._checkpoint
        checkpoint.begin()
        for span, (layer, true_s) in enumerate(zip(self._routed, self._spans_IS[index], strict=True)):
            if layer != NO_LAYER:
                planner.on_routed(layer, tokens_MW[layer])
            if plan.limits:
                send(checkpoint, planner.limit(span), true_s)
            else:
                # Before the first plan bytes go as soon as they are staged; those that fit the spans do no harm.
                checkpoint.send_freely(true_s)
        return checkpoint, wants_profile


def _routed_before(training: SimulatedTraining) -> tuple[int, ...]:
    """Returns by idle span the layer whose router has chosen just before it begins; NO_LAYER if none has."""
    return tuple(
        span.opens.layer if span.opens is not None and span.opens[1:] == ("forward", "dispatch") else NO_LAYER
        for span in spans_of(training.ops)
    )
