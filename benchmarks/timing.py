"""Timing of alternatives in turn, so that the moods of a shared machine hit all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

import numpy as np

from capricorn.units import Seconds

ROUNDS = 15


def interleaved(alternatives: Mapping[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, list[Seconds]]:
    """Durations of each alternative: all are run once in every round, in alternating order, after one round unseen."""
    names = list(alternatives)
    durations: dict[str, list[Seconds]] = {name: [] for name in names}
    for count in range(rounds + 1):
        for name in names if count % 2 else reversed(names):
            begin_s = time.perf_counter()
            alternatives[name]()
            if count:
                durations[name].append(time.perf_counter() - begin_s)
    return durations


def ratio(numerator: list[float], denominator: list[float]) -> str:
    """The median of the paired ratios and its bootstrap interval, for people."""
    pairs = np.array(numerator) / np.array(denominator)
    draws = np.random.default_rng(0).choice(pairs, (2000, len(pairs)))
    low, high = np.percentile(np.median(draws, axis=1), (2.5, 97.5))
    return f"{median(pairs):.3f} [{low:.3f}, {high:.3f}]"
