"""How the figures of a comparison are written for people, wherever they are shown. Computes nothing, knows no table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from capricorn.units import Bytes, Seconds, format_bytes, format_seconds

if TYPE_CHECKING:
    from capricorn.compare.comparison import ComparisonRow, Interval

NONE = "-"
NO_DIFFERENCE = "no difference"
DIFFERS_NOT = f", {NO_DIFFERENCE}"
"""What a ratio ends with if its interval holds 1."""
LEGEND = (
    "Iteration and stall: medians of the slowest rank. Slowdown: time of the iterations that both measured over that "
    "without checkpoints; speedup of Capricorn: the same over that of Capricorn. Intervals hold the ratio with 95 % "
    f"confidence; where one holds 1 there is {NO_DIFFERENCE}. Memory is of all ranks together."
)


def format_time(value_s: Seconds | None) -> str:
    """Seconds in the unit that suits them."""
    return NONE if value_s is None else format_seconds(value_s)


def format_size(num_bytes: float | None) -> str:
    """Bytes in the unit that suits them."""
    return NONE if num_bytes is None else format_bytes(num_bytes)


def ratio_parts(value: float | None, interval: Interval | None) -> list[str]:
    """`1.099 [1.079, 1.136]`, and where that interval holds 1 that there is no difference."""
    if value is None:
        return [NONE]
    if interval is None:
        return [_figure(value)]
    low, high = interval
    if low == high == 1:  # of the same runs
        return ["1"]
    measured = f"{_figure(value)} [{_figure(low)}, {_figure(high)}]"
    return [measured, NO_DIFFERENCE] if low <= 1 <= high else [measured]


def format_ratio(value: float | None, interval: Interval | None) -> str:
    """The same in a line."""
    return ", ".join(ratio_parts(value, interval))


def _figure(ratio: float) -> str:
    return f"{ratio:.3f}" if ratio < 10 else f"{ratio:.3g}"


def format_memory(rss_bytes: Bytes | None, store_bytes: Bytes | None) -> str:
    """Resident memory of the processes and what the stores hold beside it."""
    parts = [format_bytes(part) for part in (rss_bytes, store_bytes) if part is not None]
    return " + ".join(parts) or NONE


def format_effective(row: ComparisonRow) -> str:
    """`19/20`: checkpoints that became complete, of those requested."""
    return f"{row.effective}/{row.requested}" if row.requested else NONE


def format_tiers(row: ComparisonRow) -> str:
    """Where a system restores from."""
    return ", ".join(row.tiers) or NONE


def format_notes(row: ComparisonRow) -> str:
    """All that is to be known of a row, in a line."""
    return "; ".join(row.notes) or NONE
