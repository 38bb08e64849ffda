"""Figures of samples as JSON can hold them: what cannot be computed is None, never not-a-number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


def quantile(values: Iterable[float], percent: int) -> float | None:
    """Returns the percentile, interpolated linearly between the two nearest values; None if there is no value."""
    known = list(values)
    return float(np.percentile(known, percent)) if known else None


def total(values: Sequence[float]) -> float:
    """Returns the sum, added up pairwise so that rounding errors stay small."""
    with np.errstate(invalid="ignore"):  # of infinities of both signs, which have no sum
        return float(np.sum(values))


def mean(values: Sequence[float]) -> float:
    """Returns the mean of at least one value."""
    # The first is added last, as numpy's reduceat does, so that figures stay those of older versions to the last bit.
    return (values[0] + total(values[1:])) / len(values)


def ratio(amount: float, whole: float) -> float | None:
    """Returns the share of the amount in the whole; None if the whole is nothing."""
    return float(amount / whole) if whole > 0 else None
