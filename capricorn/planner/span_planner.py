"""The planner of system `capricorn`: profiles, when they are due, become plans that fill the idle spans. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import fmean

from capricorn.config.planner import PlannerConfig
from capricorn.hooks import NO_LAYER
from capricorn.planner.drift import DriftMeter
from capricorn.planner.estimate import FLOOR, LoadFit, SpanEstimate, deviations_at, estimate
from capricorn.planner.link_model import LinkModel
from capricorn.planner.partition import partition
from capricorn.planner.plan import Limit, Plan, tile
from capricorn.planner.profile import IdleSpan, IterationProfile, spans_of
from capricorn.planner.replan import make_policy
from capricorn.units import Bytes, Seconds

WINDOW = 8
"""Number of observations of a span that are kept, beside those its load fit keeps."""
_ENOUGH = 3  # observations of the current profile that need no older ones


class _Durations:
    """Observations of one duration."""

    def __init__(self) -> None:
        self._observed: deque[Seconds] = deque(maxlen=WINDOW)
        self._fit = LoadFit()

    def note(self, span_s: Seconds, tokens: int | None) -> None:
        self._observed.append(span_s)
        if tokens is not None:
            self._fit.note(tokens, span_s)

    def last(self, count: int) -> list[Seconds]:
        return list(self._observed)[-count:]

    def at(self, tokens: int | None) -> SpanEstimate | None:
        """Returns the estimate by the load; None if the load or its effect is unknown."""
        line = None if tokens is None else self._fit.line()
        return None if line is None or tokens is None else line.at(tokens)


class SpanPlanner:
    """Plans from profiles of idle spans; implements `Planner`.

    Source: Capricorn, CLUSTER 2025. Departs: spans may also follow the loads of the running iteration.
    """

    def __init__(self, config: PlannerConfig, *, rank: int, holders: Sequence[int], shard_bytes: Bytes) -> None:
        """Makes a planner without a profile.

        Args:
            config: how it profiles and plans.
            rank: whose shard is sent.
            holders: the ranks that keep its remote replicas, in sending order.
            shard_bytes: of one replica.
        """
        self.spans: tuple[IdleSpan, ...] = ()
        """Empty before the first profile."""
        self.drift = 0.0
        """Drift of the loads since the plan."""
        self.replanned = False
        """Whether the plan last made was the first to use a whole profile."""
        is_oracle = config.replan == "oracle"
        self._config, self._own, self._holders, self._shard_bytes = config, rank, tuple(holders), shard_bytes
        self._by_load = config.spans == "load" and not is_oracle  # an oracle has seen the very spans to come
        self._window = 1 if is_oracle else WINDOW
        self._enough = 1 if is_oracle else _ENOUGH
        self._policy, self._loads = make_policy(config.replan), DriftMeter()
        self._usable: list[_Durations] = []
        self._lasting: list[_Durations] = []
        self._tokens: dict[int, int] = {}
        self._num_left = 0  # iterations of the current profile still to be measured
        self._started = self._last_wanted = -1
        self._is_profiling = self._has_new = self._is_outdated = self._owes = False
        self._num_fresh = 0
        self._cost_s: Seconds = 0.0
        self._plan, self._link = Plan(()), LinkModel(0.0, 1.0)
        self._deviations = 0.0

    def wants_profile(self, iteration: int) -> bool:
        if not self._num_left and not self._is_profiling and self._policy.is_due(iteration):
            self._begin_profile(iteration)
        if not self._num_left:
            return False
        self._num_left -= 1
        self._last_wanted = iteration
        return True

    def _begin_profile(self, iteration: int) -> None:
        if iteration > self._last_wanted + 1:  # else it goes on, as when one is due in every iteration
            self._num_fresh = 0
        self._started, self._is_profiling, self._cost_s = iteration, True, 0.0
        self._num_left = self._config.profile_iterations
        self._loads.restart()

    def on_routed(self, layer: int, tokens: Sequence[int]) -> None:
        self._tokens[layer] = max(tokens)
        self._loads.note(layer, tokens)

    def observe(self, profile: IterationProfile) -> None:
        spans = spans_of(profile.ops)
        if spans != self.spans:
            self.spans = spans
            self._usable, self._lasting = [_Durations() for _ in spans], [_Durations() for _ in spans]
        rows = profile.span_s()
        ends = [rows[rank] for rank in (self._own, *self._holders)]
        most = {layer: max(tokens) for layer, tokens in profile.tokens.items()}
        for index, span in enumerate(spans):
            tokens = most.get(span.load_layer)
            self._usable[index].note(min(row[index] for row in ends), tokens)
            self._lasting[index].note(rows[self._own][index], tokens)
        self._tokens = most | self._tokens
        self._num_fresh += 1
        self._is_outdated = True
        self._has_new = self._has_new or self._num_fresh % self._config.profile_iterations == 0

    def note(self, iteration: int, lost_s: Seconds, cost_s: Seconds) -> None:
        if not self._is_profiling:
            if self._owes and cost_s:
                # What the last of its iterations took to share and to plan is heard of only after it.
                self._policy.charge(cost_s)
                self._owes = False
            self.drift = self._loads.drift()
            self._policy.note(self.drift, lost_s)
            return
        self._cost_s += cost_s
        if not self._num_left:
            self._is_profiling, self._owes, self.drift = False, True, 0.0
            self._policy.replanned(self._started, self._cost_s)
            self._loads.mark()

    def plan(self, iteration: int, link: LinkModel | None) -> Plan:
        config = self._config
        if link is None or not self.spans:
            self._plan = Plan(tile(self._shard_bytes, len(self._holders), config.max_chunk_bytes))
            return self._plan
        if self._plan.limits and link == self._link and not (self._is_outdated or self._by_load):
            self.replanned = False
            return self._plan
        spans, ends = self._estimates(self._usable), self._estimates(self._lasting)
        self._plan = partition(
            spans, link, self._shard_bytes, len(self._holders), config.max_chunk_bytes, config.risk, ends
        )
        self._deviations = deviations_at(self._plan.risk)
        self._link = link
        self.replanned, self._has_new, self._is_outdated = self._has_new, False, False
        return self._plan

    def limit(self, span: int) -> Limit:
        planned, tokens = self._plan.limits[span], self._tokens_of(span)
        usable, lasting = self._usable[span].at(tokens), self._lasting[span].at(tokens)
        if usable is None or lasting is None:
            return planned
        room = self._link.capacity_bytes(usable.at_s(self._deviations)) if planned.num_bytes else 0
        return Limit(lasting.at_s(self._deviations), room)

    def _estimates(self, durations: Sequence[_Durations]) -> list[SpanEstimate]:
        """Returns an estimate for each span."""
        count = min(max(self._num_fresh, self._enough), self._window)
        if self._config.spans == "global" and durations:
            mean_s = fmean(span_s for each in durations for span_s in each.last(count))
            return [SpanEstimate(mean_s, FLOOR * mean_s)] * len(durations)
        return [each.at(self._tokens_of(index)) or estimate(each.last(count)) for index, each in enumerate(durations)]

    def _tokens_of(self, span: int) -> int | None:
        """Returns the newest known load of the most loaded rank; None if the span is not to follow a load."""
        layer = self.spans[span].load_layer
        return self._tokens.get(layer) if self._by_load and layer != NO_LAYER else None
