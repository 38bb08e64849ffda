"""The figures that samples come to: to the last bit those of pandas, which computed them before."""

from __future__ import annotations

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capricorn.stats.numbers import mean, quantile, ratio, total

seconds = st.lists(st.floats(0, 1e6), min_size=1, max_size=40)
checked = settings(deadline=None)


@checked
@given(seconds, st.integers(0, 100))
def test_a_quantile_is_that_of_pandas(values: list[float], percent: int) -> None:
    assert quantile(values, percent) == pd.Series(values).quantile(percent / 100)


@checked
@given(seconds)
def test_a_total_is_that_of_pandas(values: list[float]) -> None:
    assert total(values) == pd.Series(values).sum()


@checked
@given(seconds)
def test_a_mean_is_close_to_that_of_pandas_in_any_version(values: list[float]) -> None:
    assert mean(values) == pytest.approx(pd.Series(values).groupby([0] * len(values)).mean()[0], rel=1e-12, abs=1e-300)


def test_what_cannot_be_computed_is_none() -> None:
    assert quantile([], 50) is None
    assert ratio(1.0, 0.0) is None
    assert total([]) == 0
