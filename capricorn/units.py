"""Seconds and bytes: their types, and how people write and read them. Knows nothing else of the project."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import TypeAlias

Seconds: TypeAlias = float
Bytes: TypeAlias = int
BytesPerSecond: TypeAlias = float

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

_BYTE_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": 1 << 40,
}  # fmt: skip
_BIT_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}
_MAX_BYTES = 1 << 63
_BYTES_PATTERN = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*$")


def parse_bytes(text: str) -> Bytes:
    """Returns bytes written as `4096`, `64KB`, `1.5 GiB`.

    Raises:
        ValueError: the text is not a number followed by a known unit, or no file can be that large.
    """
    match = _BYTES_PATTERN.match(text)
    if match is None or match[2].lower() not in _BYTE_UNITS:
        raise ValueError(f"not a size: {text!r}; write a number and one of B, KB, MB, GB, KiB, MiB, GiB")
    num_bytes = int(Fraction(match[1]) * _BYTE_UNITS[match[2].lower()])
    if num_bytes >= _MAX_BYTES:
        raise ValueError(f"not a size: {text!r} is more than any memory holds")
    return num_bytes


def parse_rate(text: str) -> BytesPerSecond:
    """Returns bytes a second written as networks are (`200Mbit`, `400 Gbit/s`) or as disks are (`5GB/s`).

    Raises:
        ValueError: the text is not a number followed by a known unit, or the number is infinite.
    """
    match = _BYTES_PATTERN.match(text.strip().removesuffix("/s"))
    unit = match[2].lower() if match else ""
    known = {name: size / 8 for name, size in _BIT_UNITS.items()} | _BYTE_UNITS
    if match is None or unit not in known or math.isinf(float(match[1]) * known[unit]):
        raise ValueError(f"not a rate: {text!r}; write a number and a unit, as in 200Mbit, 400Gbit or 5GB/s")
    return float(match[1]) * known[unit]


def format_bytes(num_bytes: float) -> str:
    """Returns a size for people, in decimal units and three figures: `92.3 MB`."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(num_bytes) < 999.5:  # what rounds to 1000 is 1 of the next unit
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.3g} TB" if num_bytes < 999.5 else f"{num_bytes:,.0f} TB"


def format_rate(bytes_per_s: BytesPerSecond) -> str:
    """Returns a link's rate for people, in bits and three figures: `200 Mbit/s`."""
    bits_per_s = 8 * bytes_per_s
    for unit in ("bit", "Kbit", "Mbit"):
        if bits_per_s < 999.5:
            return f"{bits_per_s:.3g} {unit}/s"
        bits_per_s /= 1000
    return f"{bits_per_s:,.4g} Gbit/s"


def format_seconds(seconds: Seconds) -> str:
    """Returns a duration for people, in three figures: `3.14 ms`, `0.552 s`, `2 min 05 s`."""
    if seconds < 999.5e-6:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 0.1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"


def count_noun(number: int, what: str) -> str:
    """Returns a number and its noun: `1 node`, `2 nodes`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
