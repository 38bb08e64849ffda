"""Checks that hold for the whole session of tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from capricorn.runtime.store.node_store import find_stores

MUST_RUN = (
    "tests/rules/",
    "tests/planner/",
    "tests/systems/",
    "tests/conformance/",
    "tests/baselines/test_conformance.py",
    "tests/runtime/test_crashes.py",
    "tests/runtime/test_fuzz.py",
    "tests/runtime/test_security.py",
    "tests/launch/test_fork_server.py",
    "tests/cli/test_own_systems.py",
)
"""Tests whose being skipped would hide what the project stands for: a session that skips one of them has failed."""
_skipped: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and report.nodeid.startswith(MUST_RUN):
        _skipped.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if _skipped and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for nodeid in _skipped:
        terminalreporter.write_line(f"must not be skipped: {nodeid}", red=True)


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
