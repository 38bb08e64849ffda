"""How long an idle span lasts, as a distribution: from its own observations, or from the load of the experts. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist, fmean, median, stdev

from capricorn.units import Seconds

FLOOR = 0.01
"""Least spread, relative to the median: few observations that agree are no certainty."""
FITTED_FLOOR = 0.002
"""Least spread about a line through many observations that lie on it, relative to the mean."""
WINDOW = 64
PRIOR_NOISE = 0.005
"""Relative noise of a span, as known from one observation before the first."""
PRIOR_SLOPE_SPREAD = 0.3
"""Prior spread of the slope, relative to the slope of a span proportional to the tokens."""
STEEPEST = 1.5
"""Largest slope, relative to that of a span proportional to the tokens; a span never shrinks with the tokens."""
OUTLIER = 4.0
"""Residuals beyond this many deviations are left out: an iteration that was disturbed says nothing of the load."""
_TO_DEVIATION = 1.4826  # from the median absolute deviation of a normal distribution
_FEW = 4


def deviations_at(risk: float) -> float:
    """Returns how many standard deviations above the median a normal distribution has that quantile; 0 at 0.5."""
    return NormalDist().inv_cdf(risk)


@dataclass(frozen=True, slots=True)
class SpanEstimate:
    """A duration, taken as normal."""

    median_s: Seconds
    spread_s: Seconds
    """Standard deviation."""

    def at_s(self, deviations: float) -> Seconds:
        """Returns the duration so many standard deviations above the median; never negative."""
        return max(0.0, self.median_s + deviations * self.spread_s)


def estimate(observations: Sequence[Seconds]) -> SpanEstimate:
    """Estimates a duration from at least one observation; a few of several may lie off, however far."""
    median_s = median(observations)
    return SpanEstimate(median_s, max(_spread(observations, median_s), FLOOR * median_s))


def _spread(values: Sequence[float], middle: float) -> float:
    if len(values) < _FEW:  # of so few the median deviation is often that of two that happen to agree
        return stdev(values) if len(values) > 1 else 0.0
    return _TO_DEVIATION * median(abs(value - middle) for value in values)


@dataclass(frozen=True, slots=True)
class LoadLine:
    """A span as a line over the tokens on the most loaded rank, with the uncertainty of both."""

    tokens: float
    """Mean over the observations it is fitted on."""
    mean_s: Seconds
    slope: float
    """Seconds per token."""
    noise: float
    """Variance of a span about the line, and of the line at the mean."""
    slope_noise: float
    """Variance of the slope."""
    floor_s: Seconds
    """Least spread."""

    def at(self, tokens: float) -> SpanEstimate:
        """Returns the span at that load; the farther from all loads seen, the less certain."""
        off = tokens - self.tokens
        spread_s = sqrt(self.noise + self.slope_noise * off * off)
        return SpanEstimate(max(0.0, self.mean_s + self.slope * off), max(spread_s, self.floor_s))

    @classmethod
    def fit(cls, points: Sequence[tuple[float, Seconds]]) -> LoadLine:
        """Returns the line of ridge regression towards a span proportional to the tokens.

        The prior weighs as Bayes' rule has it for normal noise, so it decides if the tokens hardly varied beside the
        noise, and vanishes if they did.

        Source: Capricorn, CLUSTER 2025, has no such model; the rule is ours.
        """
        n = len(points)
        x_mean, y_mean = fmean(x for x, _ in points), fmean(y for _, y in points)
        sxx = sum((x - x_mean) ** 2 for x, _ in points)
        sxy = sum((x - x_mean) * (y - y_mean) for x, y in points)
        syy = sum((y - y_mean) ** 2 for _, y in points)
        unexplained = max(0.0, syy - sxy * sxy / sxx) if sxx > 0 else syy
        noise = (unexplained + (PRIOR_NOISE * y_mean) ** 2) / (max(0, n - 2) + 1)
        floor_s = max(FITTED_FLOOR, FLOOR / sqrt(n)) * y_mean
        if not (x_mean > 0 and y_mean > 0):
            return cls(x_mean, y_mean, 0.0, noise * (1 + 1 / n), 0.0, floor_s)
        prior = y_mean / x_mean
        weight = noise / (PRIOR_SLOPE_SPREAD * prior) ** 2
        slope = min(max(0.0, (sxy + weight * prior) / (sxx + weight)), STEEPEST * prior)
        return cls(x_mean, y_mean, slope, noise * (1 + 1 / n), noise / (sxx + weight), floor_s)


class LoadFit:
    """Learns on line how a span depends on the tokens on the most loaded rank, from its last observations."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, Seconds]] = deque(maxlen=WINDOW)
        self._line: LoadLine | None = None

    def note(self, tokens: float, span_s: Seconds) -> None:
        """Adds an observation."""
        self._points.append((tokens, span_s))
        self._line = None

    def line(self) -> LoadLine | None:
        """Returns the line through the observations; None before the first one."""
        if self._line is None and self._points:
            self._line = LoadLine.fit(_without_outliers(self._points, LoadLine.fit(self._points)))
        return self._line


def _without_outliers(points: Sequence[tuple[float, Seconds]], line: LoadLine) -> Sequence[tuple[float, Seconds]]:
    if len(points) < _FEW:
        return points
    residuals = [span_s - line.at(tokens).median_s for tokens, span_s in points]
    middle = median(residuals)
    reach = OUTLIER * max(_spread(residuals, middle), FITTED_FLOOR * line.mean_s)
    return [point for point, residual in zip(points, residuals, strict=True) if abs(residual - middle) <= reach]
