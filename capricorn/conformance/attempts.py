"""The attempts of a toy job: each starts its ranks, has them do something, and kills them.

Knows no torch; what the ranks do is a generator that tells facts as it goes on, see `rank_functions`.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from capricorn.conformance.subject import SystemUnderTest
from capricorn.errors import CapricornError
from capricorn.process import PYTHON, STOPPED_S, AnswerWait, end_child
from capricorn.units import Seconds

START_TIMEOUT_S: Final[Seconds] = 120.0
"""For the imports of the server and of a system."""
STOP_TIMEOUT_S: Final[Seconds] = 20.0
DEADLINE_S: Final[Seconds] = 60.0
POLL_S: Final[Seconds] = 0.2


class BrokenRule(Exception):  # noqa: N818 - it is what a rule has to say
    """What does not hold of a system, in words."""


@dataclass(frozen=True, slots=True)
class Told:
    """What one rank has told before it ended."""

    rank: int
    facts: dict[str, Any]

    def __getitem__(self, key: str) -> Any:
        """Returns a fact.

        Raises:
            BrokenRule: the rank ended before it could tell it; with the reason.
        """
        if key not in self.facts:
            raise BrokenRule(self.error or f"rank {self.rank} ended before it could tell {key}")
        return self.facts[key]

    @property
    def error(self) -> str:
        """Why it ended early; empty if it did not."""
        return str(self.facts.get("error", ""))


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of the job, after all its ranks have been killed."""

    ranks: list[Told]
    outlived: list[str]
    """Processes that did not end when their rank was gone, in words."""

    def __iter__(self) -> Iterator[Told]:
        return iter(self.ranks)

    def __getitem__(self, rank: int) -> Told:
        return self.ranks[rank]


class AttemptServer:
    """Our side of the process that forks the ranks; serves any number of attempts, one after the other."""

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        """Starts it; the first attempt waits for it. `check` is called often and may raise to end a wait."""
        self._check, self._received = check, b""
        path = os.pathsep.join(place or os.getcwd() for place in sys.path)
        self._process = subprocess.Popen(
            [*PYTHON, "capricorn.conformance.attempt_server", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            # A system from outside is found there as it is found here. Threads are counted when torch is imported.
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # a Ctrl-C at the terminal is for us
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(
        self,
        function: Callable[..., Iterator[dict[str, Any]]],
        folder: Path,
        subject: SystemUnderTest,
        *,
        deadline_s: Seconds = DEADLINE_S,
        **arguments: Any,
    ) -> Attempt:
        """Runs `function(rank, folder=folder, subject=subject, **arguments)` on each rank, then kills all of them.

        Args:
            function: stands in a module; the facts it yields are kept even if the rank is killed or fails after that.
            folder: of the job.
            subject: the system, loaded before the ranks are forked.
            deadline_s: for the ranks to end or to stand still.
            arguments: as JSON can say them.

        Raises:
            CapricornError: the system cannot be imported, or the server has ended.
        """
        request = {
            "function": f"{function.__module__}:{function.__qualname__}",
            "folder": str(folder),
            "subject": subject.model_dump(mode="json"),
            "deadline_s": deadline_s,
            "arguments": arguments,
        }
        answer = json.loads(self._ask(json.dumps(request) + "\n", deadline_s + START_TIMEOUT_S))
        if "error" in answer:
            raise CapricornError(f"system {subject.system} cannot be loaded: {answer['error']}")
        ranks = [Told(rank, facts) for rank, facts in enumerate(answer["ranks"])]
        return Attempt(ranks, answer["outlived"])

    def close(self) -> None:
        """Ends it, and with it the ranks."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        end_child(self._process, self._process.pid, STOP_TIMEOUT_S, "the process that forks the ranks of the test")
        self._process.stdout.close()

    def _ask(self, request: str, timeout_s: Seconds) -> bytes:
        """Sends a line and receives one."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        ended = CapricornError("the process that forks the ranks of the test has ended or hangs")
        try:
            self._process.stdin.write(request.encode())
        except BrokenPipeError:
            raise ended from None
        wait = AnswerWait(self._process.pid, POLL_S)
        while b"\n" not in self._received:
            self._check()
            owed_s, stopped_s = wait.look()
            if owed_s > timeout_s or stopped_s > STOPPED_S:
                raise ended
            if select.select([self._process.stdout], [], [], POLL_S)[0]:
                received = self._process.stdout.read(1 << 16)
                if not received:
                    raise ended
                self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return line
