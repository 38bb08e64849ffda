"""The link as a planner sees it: a latency and a rate, and how both are learned from transfers. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import ceil

from capricorn.units import Bytes, BytesPerSecond, Seconds

WINDOW = 32
QUANTILE = 1 / 3
"""Quantile of the transfers' durations: below the median, since whatever disturbs a transfer only ever slows it."""
SHORTEST_S: Seconds = 1e-9
DISTINCT = 1.1
"""Sizes within this ratio count as one size: over so short a lever noise would pass for latency."""


@dataclass(frozen=True, slots=True)
class LinkModel:
    """A transfer of n bytes takes `latency_s` + n / `bytes_per_s`. Source: Gemini, SOSP'23, section 5.2."""

    latency_s: Seconds
    bytes_per_s: BytesPerSecond

    def transfer_s(self, num_bytes: Bytes) -> Seconds:
        return self.latency_s + num_bytes / self.bytes_per_s

    def capacity_bytes(self, span_s: Seconds) -> Bytes:
        """Returns how much one transfer can move within that time."""
        return max(0, int((span_s - self.latency_s) * self.bytes_per_s))


class LinkEstimator:
    """Learns latency and rate of a link from its last transfers, even if some were slowed by others.

    Fits a line of duration over size by quantile regression; the rule is ours.
    """

    def __init__(self) -> None:
        self._transfers: deque[tuple[Bytes, Seconds]] = deque(maxlen=WINDOW)

    def note(self, num_bytes: Bytes, duration_s: Seconds) -> None:
        """Notes one uninterrupted transfer; an empty one, or one too short to be timed, tells nothing."""
        if num_bytes > 0 and duration_s >= SHORTEST_S:
            self._transfers.append((num_bytes, duration_s))

    def model(self) -> LinkModel | None:
        """Returns the model, without latency while all transfers are of about one size; None before the first."""
        if not self._transfers:
            return None
        sizes = [num_bytes for num_bytes, _ in self._transfers]
        if max(sizes) < DISTINCT * min(sizes):
            return LinkModel(0.0, 1 / _quantile([duration_s / size for size, duration_s in self._transfers]))
        s_per_byte = _best_slope(self._transfers)
        return LinkModel(_latency_s(self._transfers, s_per_byte), 1 / s_per_byte)


def _best_slope(transfers: Sequence[tuple[Bytes, Seconds]]) -> float:
    """Returns the seconds per byte of the best line.

    The loss is convex in the slope and has its minimum at the slope between two transfers, or between one and nothing.
    """
    points = [(0, 0.0), *transfers]
    slopes = ((t - s) / (m - n) for (n, s), (m, t) in combinations(points, 2) if n != m)
    candidates = sorted(slope for slope in slopes if slope > 0)
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        if _loss_s(transfers, candidates[middle]) > _loss_s(transfers, candidates[middle + 1]):
            low = middle + 1
        else:
            high = middle
    return candidates[low]


def _loss_s(transfers: Sequence[tuple[Bytes, Seconds]], s_per_byte: float) -> float:
    latency_s = _latency_s(transfers, s_per_byte)
    errors = (duration_s - num_bytes * s_per_byte - latency_s for num_bytes, duration_s in transfers)
    return sum(QUANTILE * error if error > 0 else (QUANTILE - 1) * error for error in errors)


def _latency_s(transfers: Sequence[tuple[Bytes, Seconds]], s_per_byte: float) -> Seconds:
    """Returns the best latency for a slope; never negative."""
    return max(0.0, _quantile([duration_s - num_bytes * s_per_byte for num_bytes, duration_s in transfers]))


def _quantile(values: Sequence[float]) -> float:
    return sorted(values)[ceil(QUANTILE * len(values)) - 1]
