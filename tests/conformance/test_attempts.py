"""Our side of the process that forks the ranks of a conformance test, over one that does nothing."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator

import pytest

from capricorn.conformance import attempts
from capricorn.conformance.attempts import AttemptServer
from capricorn.errors import CapricornError


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[AttemptServer]:
    """One whose process takes requests and answers none."""
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: start(["sleep", "60"], **options))
    monkeypatch.setattr(attempts, "STOP_TIMEOUT_S", 0.1)
    made = AttemptServer()
    yield made
    made.close()


def test_a_server_that_was_stopped_is_not_waited_for_as_long_as_one_that_works(
    server: AttemptServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "STOPPED_S", 0.3)
    server._process.send_signal(signal.SIGSTOP)
    with pytest.raises(CapricornError, match="has ended or hangs"):
        server._ask("{}\n", timeout_s=1e6)


def test_a_server_that_does_not_answer_is_waited_for_until_the_deadline(server: AttemptServer) -> None:
    with pytest.raises(CapricornError, match="has ended or hangs"):
        server._ask("{}\n", timeout_s=0.3)
