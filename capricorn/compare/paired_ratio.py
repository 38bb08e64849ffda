"""The ratio of what two systems take for the same iterations, with its interval. Reads no file and knows no run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from capricorn.units import Seconds

RESAMPLES = 2000
LEVEL = 0.95

Interval: TypeAlias = tuple[float, float]
Durations: TypeAlias = Mapping[int, Seconds]
"""How long each iteration of one run took."""
Pair: TypeAlias = npt.NDArray[np.float64]
"""Seconds of the iterations that both runs of a repeat have, [2, iterations]."""


class Ratio(NamedTuple):
    """Time of one system / time of the other, and the interval that holds it with 95 % confidence."""

    value: float
    ci: Interval


def paired_ratio(ours: Sequence[Durations | None], theirs: Sequence[Durations | None]) -> Ratio | None:
    """Returns our time over theirs; None if no two runs of one repeat have an iteration in common.

    Both are by repeat, None where a run is missing. Of each repeat count the iterations that both have: one system may
    have measured fewer, or begun later. Their sums are compared, not their medians: a system that stalls in one
    iteration of three pays for it, and no median would show that.
    """
    pairs = list(_pairs(ours, theirs).values())
    if not pairs:
        return None
    ours_s, theirs_s = sum(pair.sum(1) for pair in pairs)
    value = float(ours_s / theirs_s)
    low, high = interval_of(np.log(_resampled(pairs)))
    # Rounding alone may put the value outside where all resamples are alike.
    return Ratio(value, (min(low, value), max(high, value)))


def interval_of(logs: npt.NDArray[np.float64]) -> Interval:
    """Returns the interval that holds a ratio with 95 % confidence, by the logarithms of its resamples.

    By logarithms the interval of the inverse ratio is the inverse interval.
    """
    low, high = np.exp(np.quantile(logs, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
    return float(low), float(high)


def unpaired(ours: Sequence[Durations | None], theirs: Sequence[Durations | None]) -> list[int]:
    """Returns the repeats, from 0, of which our run is in no ratio with theirs, since it has no partner."""
    pairs = _pairs(ours, theirs)
    return [repeat for repeat, one in enumerate(ours) if one is not None and repeat not in pairs]


def _pairs(ours: Sequence[Durations | None], theirs: Sequence[Durations | None]) -> dict[int, Pair]:
    """Returns by repeat what both measured; one of the two may have fewer repeats."""
    return {
        repeat: pair
        for repeat, (one, other) in enumerate(zip(ours, theirs, strict=False))
        if one is not None and other is not None and (pair := _common(one, other)).shape[1]
    }


def _common(ours: Durations, theirs: Durations) -> Pair:
    both = [iteration for iteration in ours if iteration in theirs]
    return np.array([[each[iteration] for iteration in both] for each in (ours, theirs)])


def _resampled(pairs: Sequence[Pair]) -> npt.NDArray[np.float64]:
    """Returns the ratio in each of many resamples: as many repeats, drawn anew, and of each as many of its iterations.

    Two levels, since iterations of one run are alike in what was slow or fast about that run.
    Source: Efron & Tibshirani, "An Introduction to the Bootstrap" (1993), sections 8.4 and 13.3.
    """
    random = np.random.default_rng(0)
    sums = np.zeros((2, RESAMPLES))
    for drawn in random.integers(len(pairs), size=(len(pairs), RESAMPLES)):
        for number, pair in enumerate(pairs):
            where = np.flatnonzero(drawn == number)
            num_iterations = pair.shape[1]
            chosen = random.integers(num_iterations, size=(len(where), num_iterations))
            sums[:, where] += pair[:, chosen].sum(2)
    ratios: npt.NDArray[np.float64] = sums[0] / sums[1]
    return ratios
