"""Checks that hold for the whole session of tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


def _stores() -> set[Path]:
    return set(Path("/dev/shm").glob("capricorn-*"))


@pytest.fixture(scope="session", autouse=True)
def shm_leftovers() -> Iterator[None]:
    """Fails the session if it left a memory store behind."""
    before = _stores()
    yield
    left = sorted(map(str, _stores() - before))
    assert not left, f"the tests left memory stores behind: {', '.join(left)}"
