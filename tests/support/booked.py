"""What has been booked on modelled links and storage, read from the clocks that their users share."""

from __future__ import annotations

from capricorn.emulation.paced_link import _HIGH, _LOW, Link
from capricorn.emulation.storage import Storage


def high_bytes(link: Link) -> int:
    """Returns the bytes of the high class that all users have booked so far."""
    return int(link._fields[_HIGH])


def low_bytes(link: Link) -> int:
    """Returns the bytes of the low class that all users have booked so far."""
    return int(link._fields[_LOW])


def charged_bytes(storage: Storage) -> int:
    """Returns the bytes that all ranks of its node were charged for so far."""
    return high_bytes(storage._node)
