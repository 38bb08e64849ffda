"""The toy job of the conformance tests, for tests of one system: its ranks do what the test says."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from capricorn.conformance.attempts import DEADLINE_S, AttemptServer
from capricorn.conformance.subject import SystemUnderTest


@cache
def server() -> AttemptServer:
    """One for all tests of the session."""
    started = AttemptServer()
    atexit.register(started.close)
    return started


def attempt(
    function: Callable[..., Iterator[dict[str, Any]]],
    folder: Path,
    subject: SystemUnderTest,
    *,
    deadline_s: float = DEADLINE_S,
    **arguments: Any,
) -> list[dict[str, Any]]:
    """What each rank has told in `function(rank, folder=folder, subject=subject, **arguments)`, which must end well."""
    ranks = server().run(function, folder, subject, deadline_s=deadline_s, **arguments).ranks
    errors = [f"{told.error}\n{told.facts.get('traceback', '')}" for told in ranks if told.error]
    assert not errors, "\n".join(errors)
    return [told.facts for told in ranks]
