"""Figures of samples as JSON can hold them: what cannot be computed is None, never not-a-number."""

from __future__ import annotations

from typing import Any

import pandas as pd


def quantile(values: pd.Series[Any], percent: int) -> float | None:
    """None of no values, and of unknown ones alone."""
    return None if values.empty else number(float(values.quantile(percent / 100)))


def ratio(amount: float, whole: float) -> float | None:
    """None of nothing."""
    return float(amount / whole) if whole > 0 else None


def number(value: float) -> float | None:
    """The value; None for not-a-number, which an empty column yields."""
    return None if pd.isna(value) else float(value)
