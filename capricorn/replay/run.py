"""Drives a planner through a training in virtual time: what its plans collide with, leave over and cost."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate

from capricorn.hooks import NO_LAYER
from capricorn.planner.link import LinkModel
from capricorn.planner.plan import Limit, Plan, Planner
from capricorn.profile import spans_of
from capricorn.replay.model import Training
from capricorn.units import Bytes, Seconds


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a policy came to, in sums over all iterations."""

    base_s: Seconds
    """What the training takes without checkpoints."""
    collision_s: Seconds = 0.0
    """By which the all-to-all was delayed."""
    overflow_s: Seconds = 0.0
    """For which the update waited for what had not been sent."""
    profile_s: Seconds = 0.0
    planned_bytes: Bytes = 0
    hidden_bytes: Bytes = 0
    """Sent while the link was idle, of those planned."""
    num_iterations: int = 0
    profiled: tuple[int, ...] = ()
    """The iterations that were measured, from 1."""

    @property
    def slowdown(self) -> float:
        """The training's time as a multiple of the same without checkpoints."""
        return 1 + (self.collision_s + self.overflow_s + self.profile_s) / self.base_s

    @property
    def profiled_frac(self) -> float:
        return len(self.profiled) / self.num_iterations

    @property
    def accuracy_frac(self) -> float | None:
        """Of the bytes planned into spans, those that did fit; None if none were planned."""
        return self.hidden_bytes / self.planned_bytes if self.planned_bytes else None

    def profiles(self, first: int, last: int) -> int:
        """How many iterations from `first` to `last` were measured."""
        return sum(first <= iteration <= last for iteration in self.profiled)


class Checkpoint:
    """The chunks of one plan, as they go out span by span in one iteration after the other."""

    def __init__(self, plan: Plan, link: LinkModel) -> None:
        self.plan = plan
        self.planned_bytes = plan.planned_bytes
        self._link = link
        self._ends = list(accumulate(chunk.num_bytes for chunk in plan.chunks))
        self._num_planned = bisect_right(self._ends, self.planned_bytes)
        self.begin()

    def begin(self) -> None:
        """Nothing has been sent."""
        self._sent = self._budget = self.hidden_bytes = 0
        self.collision_s: Seconds = 0.0

    @property
    def overflow_s(self) -> Seconds:
        """How long the rest takes if nothing is in its way."""
        rest = self._ends[-1] - self._sent
        return self._link.transfer_s(rest) if rest else 0.0

    def send_blindly(self, limit: Limit, true_s: Seconds) -> None:
        """A span without a gate: all that is planned up to its end goes out, and no overflow."""
        self._budget += limit.num_bytes
        started = bisect_left(self._ends, self._budget) + 1 if self._budget else 0
        self._send(min(started, self._num_planned), true_s)

    def send_gated(self, limit: Limit, true_s: Seconds) -> None:
        """A span with a gate: no chunk starts after its end, nor if it would leave after the limit.

        Whatever the plan, a chunk that could go earlier does, and the overflow follows on the rest.
        """
        last = self._sent + self._link.capacity_bytes(limit.end_s)
        started = bisect_left(self._ends, self._sent + true_s * self._link.bytes_per_s) + 1
        self._send(min(bisect_right(self._ends, last), started), true_s)

    def _send(self, num_chunks: int, true_s: Seconds) -> None:
        """The chunks up to that many, back to back from the begin of a span that lasts that long."""
        num_chunks = min(num_chunks, len(self._ends))
        num_bytes = self._ends[num_chunks - 1] - self._sent if num_chunks else 0
        if num_bytes <= 0:
            return
        self._sent += num_bytes
        self.collision_s += max(0.0, self._link.transfer_s(num_bytes) - true_s)
        self.hidden_bytes += min(num_bytes, self._link.capacity_bytes(true_s))


def replay(
    planner: Planner, training: Training, link: LinkModel, *, gate: bool, profile_cost_frac: float, oracle: bool = False
) -> Outcome:
    """What the planner makes of the training, which sends a checkpoint in every iteration.

    An `oracle` is shown each iteration before it plans it, for nothing; others after it, when they want a profile.
    """
    run = _Run(planner, training, link, gate)
    base_s = training.base_s.tolist()
    collision_s, overflow_s, profile_s = 0.0, 0.0, 0.0
    planned_bytes = hidden_bytes = 0
    profiled: list[int] = []
    for index in range(len(base_s)):
        iteration, cost_s = index + 1, 0.0
        if oracle:
            planner.observe(training.profile(index, iteration))
        sent, wants_profile = run.iterate(index)
        if wants_profile and not oracle:
            profiled.append(iteration)
            planner.observe(training.profile(index, iteration))
            cost_s = profile_cost_frac * base_s[index]
        planner.note(iteration, sent.collision_s + sent.overflow_s, cost_s)
        collision_s, overflow_s, profile_s = (
            collision_s + sent.collision_s,
            overflow_s + sent.overflow_s,
            profile_s + cost_s,
        )
        planned_bytes += sent.planned_bytes
        hidden_bytes += min(sent.hidden_bytes, sent.planned_bytes)
    return Outcome(
        sum(base_s), collision_s, overflow_s, profile_s, planned_bytes, hidden_bytes, len(base_s), tuple(profiled)
    )


class _Run:
    """The iterations of a training with a planner, one at a time."""

    def __init__(self, planner: Planner, training: Training, link: LinkModel, gate: bool) -> None:
        self._planner, self._link = planner, link
        self._spans_IS, self._tokens_IMW = training.spans_s.tolist(), training.tokens.tolist()
        self._routed = _routed_before(training)
        self._send = Checkpoint.send_gated if gate else Checkpoint.send_blindly
        self._checkpoint = Checkpoint(Plan(()), link)

    def iterate(self, index: int) -> tuple[Checkpoint, bool]:
        """Sends the checkpoint before in that iteration; what became of it, and whether a profile was wanted."""
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
            # What is not planned yet has no limit but the end of the span.
            send(checkpoint, planner.limit(span) if plan.limits else Limit(true_s, 0), true_s)
        return checkpoint, wants_profile


def _routed_before(training: Training) -> tuple[int, ...]:
    """By idle span: the layer whose router has chosen just before it begins; NO_LAYER if none has."""
    return tuple(
        span.opens.layer if span.opens is not None and span.opens[1:] == ("forward", "dispatch") else NO_LAYER
        for span in spans_of(training.ops)
    )
