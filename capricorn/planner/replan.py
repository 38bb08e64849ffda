"""Decides when a new profile is taken and a new plan made. Pure."""

from __future__ import annotations

from math import inf
from typing import Protocol

from capricorn.config.planner import parse_replan
from capricorn.units import Seconds

MEMORY = 50
"""Number of iterations over which the cost of staleness is learned, and forgotten."""
PRIOR_DRIFT = 1.0
"""Drift, summed over iterations, that is taken to cost as much as a profile while nothing is known: 10 % over 10."""
PRIOR_WEIGHT = 0.01
"""Weight of that belief, in squares of drift: it weighs as 4 iterations 5 % off the mean drift."""


class ReplanPolicy(Protocol):
    """Decides, on every rank alike, when a new profile starts."""

    def is_due(self, iteration: int) -> bool:
        """Tells whether a profile is to start with that iteration; always so before the first."""
        ...

    def replanned(self, iteration: int, cost_s: Seconds) -> None:
        """Notes that a plan was made from a profile that started with that iteration; together they took `cost_s`."""
        ...

    def charge(self, cost_s: Seconds) -> None:
        """Adds to the cost of the last profile and its plan a part that was not known when it was made."""
        ...

    def note(self, drift: float, lost_s: Seconds) -> None:
        """Notes one iteration under the plan: the drift of the loads since, and the time lost."""
        ...


class Periodic:
    """A profile every `interval` iterations, from begin to begin; an infinite interval means only the first."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._last = -inf

    def is_due(self, iteration: int) -> bool:
        return iteration - self._last >= self._interval

    def replanned(self, iteration: int, cost_s: Seconds) -> None:
        self._last = iteration

    def charge(self, cost_s: Seconds) -> None:
        """Does nothing: the interval does not depend on the cost."""

    def note(self, drift: float, lost_s: Seconds) -> None:
        """Does nothing: the interval does not depend on the drift."""


class StalenessCost:
    """Learns how much an iteration loses by the drift since its plan: a slope, in seconds per unit of drift.

    A regression with intercept, since the time lost without drift is not due to the plan's age; it forgets
    exponentially.
    """

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def note(self, drift: float, lost_s: Seconds) -> None:
        keep = 1 - 1 / MEMORY
        self._weight = keep * self._weight + 1
        self._x = keep * self._x + drift
        self._y = keep * self._y + lost_s
        self._xx = keep * self._xx + drift * drift
        self._xy = keep * self._xy + drift * lost_s

    def slope_s(self, prior_s: Seconds) -> Seconds:
        """Returns the slope, at least 0; it is near the prior while the drift has hardly varied."""
        if not self._weight:
            return prior_s
        varied = max(0.0, self._xx - self._x * self._x / self._weight)
        together = self._xy - self._x * self._y / self._weight
        return max(0.0, (together + PRIOR_WEIGHT * prior_s) / (varied + PRIOR_WEIGHT))


class Speculative:
    """A profile once the stale plan has cost as much as a profile costs: at most twice the optimum.

    Without routers there is no drift, and the first plan stays.

    Source: reconstructs the speculative activation of Capricorn, CLUSTER 2025, whose formulas are not public, as a ski
    rental; the rule is ours.
    """

    def __init__(self) -> None:
        self._staleness = StalenessCost()
        self._cost_s: Seconds | None = None
        self._lost_s: Seconds = 0.0

    def is_due(self, iteration: int) -> bool:
        return self._cost_s is None or (self._lost_s > 0 and self._lost_s >= self._cost_s > 0)

    def replanned(self, iteration: int, cost_s: Seconds) -> None:
        self._cost_s, self._lost_s = cost_s, 0.0

    def charge(self, cost_s: Seconds) -> None:
        if self._cost_s is not None:
            self._cost_s += cost_s

    def note(self, drift: float, lost_s: Seconds) -> None:
        self._staleness.note(drift, lost_s)
        if self._cost_s is not None:
            self._lost_s += drift * self._staleness.slope_s(self._cost_s / PRIOR_DRIFT)


def make_policy(text: str) -> ReplanPolicy:
    """Returns the policy with that spelling in the configuration.

    Raises:
        ConfigError: it is no such policy.
    """
    interval = parse_replan(text)
    if interval is not None:
        return Periodic(interval)
    match text:
        case "never":
            return Periodic(inf)
        case "oracle":
            return Periodic(1)
        case _:
            return Speculative()
