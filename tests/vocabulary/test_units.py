"""Sizes and durations, as people write and read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capricorn.units import format_bytes, format_seconds, parse_bytes


@given(st.integers(min_value=0, max_value=10**15))
def test_a_formatted_size_parses_to_within_half_a_percent(num_bytes: int) -> None:
    assert parse_bytes(format_bytes(num_bytes).replace(",", "")) == pytest.approx(num_bytes, rel=0.006)


@given(st.integers(min_value=0, max_value=2**60))
def test_a_plain_number_is_that_many_bytes(num_bytes: int) -> None:
    assert parse_bytes(str(num_bytes)) == pytest.approx(num_bytes, rel=1e-15)


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("4096", 4096), ("64KB", 64_000), ("1.5 GiB", 3 << 29), (" 1 mib ", 1 << 20), ("0b", 0)]
)
def test_sizes_are_read_in_decimal_and_binary_units(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GB", "-1", "1 XB", "1e3", "1 2"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (999, "999 B"), (92.3e6, "92.3 MB"), (8.05e12, "8.05 TB"), (999_999, "1 MB")]
)
def test_sizes_are_written_in_three_figures(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 us"), (3.14e-3, "3.14 ms"), (0.552, "0.552 s"), (59.96, "60 s"), (125, "2 min 05 s"), (999.6e-6, "1 ms")],
)
def test_durations_are_written_in_three_figures(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
