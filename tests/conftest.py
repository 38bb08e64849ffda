"""Checks that hold for the whole session of tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from capricorn.runtime.store.node_store import find_stores


def _stores() -> set[Path]:
    """Stores that no run holds; somebody else's run may go on beside the tests."""
    return {store.path for store in find_stores(Path("/dev/shm")) if not store.live}


@pytest.fixture(scope="session", autouse=True)
def shm_leftovers() -> Iterator[None]:
    """Fails the session if it left a memory store behind."""
    before = _stores()
    yield
    left = sorted(map(str, _stores() - before))
    assert not left, f"the tests left memory stores behind: {', '.join(left)}"
