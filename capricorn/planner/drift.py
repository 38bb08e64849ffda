"""How far the loads of the experts have moved since the plan was made, beyond what is noise. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import pi, sqrt
from statistics import NormalDist, fmean

TIME_CONSTANT = 15
"""Number of iterations over which loads are smoothed."""
_ABS_TO_DEVIATION = sqrt(pi) / 2  # from the mean absolute difference of two values
_MEAN_ABS, _DEVIATION_ABS = 0.8, 0.6  # of the absolute value of a standard normal
_SURE = 2.0  # deviations beyond which the mean over the layers is no noise


class _LayerLoad:
    """The smoothed load of each rank in one layer, since the last restart."""

    def __init__(self) -> None:
        self._last: tuple[float, ...] = ()
        self._noise = 0.0
        self._num_differences = 0
        self._reference: tuple[float, float] | None = None
        self.restart()

    def restart(self) -> None:
        self._smoothed: list[float] = []
        self._count, self._variance = 0, 0.0

    def note(self, tokens: Sequence[int]) -> None:
        self._count += 1
        weight = max(1 / TIME_CONSTANT, 1 / self._count)
        self._variance = (1 - weight) ** 2 * self._variance + weight**2
        before = self._smoothed or tokens
        self._smoothed = [old + weight * (new - old) for old, new in zip(before, tokens, strict=True)]
        self._note_noise(tokens)

    def _note_noise(self, tokens: Sequence[int]) -> None:
        """Learns the noise from the differences between iterations, in which slow movements do not show."""
        if self._last:
            most = max(range(len(tokens)), key=self._smoothed.__getitem__)
            self._num_differences += 1
            weight = max(1 / TIME_CONSTANT, 1 / self._num_differences)
            self._noise += weight * (_ABS_TO_DEVIATION * abs(tokens[most] - self._last[most]) - self._noise)
        self._last = tuple(tokens)

    def mark(self) -> None:
        self._reference = (max(self._smoothed), self._variance) if self._smoothed else None

    def change(self) -> tuple[float, float, float] | None:
        """Returns the change since the mark, relative to it; None while it is unknown.

        That is: the change of the largest smoothed load, its standard deviation by noise alone, and its bias.
        """
        if self._reference is None or not self._smoothed or not self._num_differences or self._reference[0] <= 0:
            return None
        load, variance = self._reference
        noise = self._noise / load
        deviation = noise * sqrt(variance + self._variance)
        # The largest of several noisy values lies above the largest mean, and the farther the less they are smoothed.
        bias = noise * _excess(len(self._smoothed)) * abs(sqrt(variance) - sqrt(self._variance))
        return abs(max(self._smoothed) - load) / load, deviation, bias


@cache
def _excess(count: int) -> float:
    """Returns the mean of the largest of so many standard normal values.

    Source: Blom, Statistical Estimates, 1958.
    """
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


class DriftMeter:
    """Follows the loads of all layers; the rule is ours."""

    def __init__(self) -> None:
        self._layers: dict[int, _LayerLoad] = {}

    def note(self, layer: int, tokens: Sequence[int]) -> None:
        """Notes the token assignments of one iteration, by rank."""
        self._layers.setdefault(layer, _LayerLoad()).note(tokens)

    def restart(self) -> None:
        """Starts to smooth anew: the next plan is made from later measurements, and compared with those alone."""
        for load in self._layers.values():
            load.restart()

    def mark(self) -> None:
        """Notes that a plan has been made from what was measured since the restart."""
        for load in self._layers.values():
            load.mark()

    def drift(self) -> float:
        """Returns the relative change of the most loaded rank's load since the mark, less the noise.

        It is the mean over the layers.
        """
        changes = [change for change in (load.change() for load in self._layers.values()) if change is not None]
        if not changes:
            return 0.0
        moved, deviation, bias = (fmean(part) for part in zip(*changes, strict=True))
        noise = deviation * (_MEAN_ABS + _SURE * _DEVIATION_ABS / sqrt(len(changes))) + bias
        return max(0.0, moved - noise)
