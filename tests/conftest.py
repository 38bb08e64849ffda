"""Checks that hold for the whole session of tests, and what runs of several folders are compared with."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

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
    "tests/machines/test_conductor.py",
    "tests/machines/test_run_on_machines.py",
)
"""Tests whose being skipped would hide what the project stands for: a session that skips one of them has failed."""
_skipped: list[str] = []


_stores_before: set[Path] = set()


def _stores() -> set[Path]:
    """Returns the stores that no run holds; somebody else's run may go on beside the tests."""
    return {store.path for store in find_stores(Path("/dev/shm")) if not store.live}


def _stores_left() -> list[str]:
    return sorted(map(str, _stores() - _stores_before))


def _is_alone(session: pytest.Session) -> bool:
    """Tells whether no other process runs tests of this session any more: only then what lies there is left over."""
    return not hasattr(session.config, "workerinput")


def pytest_sessionstart(session: pytest.Session) -> None:
    # A shell's background job ignores these, and what it starts would rightly do the same; tests send them to it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    if _is_alone(session):
        _stores_before.update(_stores())


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and report.nodeid.startswith(MUST_RUN):
        _skipped.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if _is_alone(session) and exitstatus == pytest.ExitCode.OK and (_skipped or _stores_left()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for nodeid in _skipped:
        terminalreporter.write_line(f"must not be skipped: {nodeid}", red=True)
    for store in _stores_left():
        terminalreporter.write_line(f"the tests left a memory store behind: {store}", red=True)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An uninterrupted run of 20 iterations of mixtral-tiny on two nodes of one rank, whose store is kept."""
    from tests.support.runs import run  # a session without them may know no module of ours

    folder = tmp_path_factory.mktemp("reference")
    (folder / "stores").mkdir()
    return run(folder / "out", "--keep-store", "--set", f"store.root={folder / 'stores'}")
