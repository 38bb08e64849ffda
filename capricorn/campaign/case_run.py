"""Makes one run of a campaign, which others judge: it may fail, and is ended when its time is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Final, Self, TypeAlias, TypeVar

from capricorn.campaign.outcomes import RunOutcome
from capricorn.campaign.pid_namespace import launch_as_pid_1
from capricorn.campaign.verdict import HANG
from capricorn.compare.compare_runner import Watch
from capricorn.config.fault_kinds import kind_of
from capricorn.config.scenario import Scenario
from capricorn.errors import CapricornError
from capricorn.launch.fork_client import ForkServer
from capricorn.launch.launcher import Launch, RunListener, launch
from capricorn.process import AwakeClock
from capricorn.records.samples import (
    EVENTS,
    ITERATIONS,
    RECOVERIES,
    EventSample,
    IterationSample,
    RecoverySample,
    read_samples,
)
from capricorn.units import Seconds

T = TypeVar("T")
Say: TypeAlias = Callable[[str, bool], None]
"""Prints a line on what is over; the second argument says whether that is remarkable."""


class Workplace:
    """Makes the runs of a campaign and shows them; at the end closes what they shared."""

    def __init__(self, out: Path, watch: Watch, say: Say, start: Launch | None = None) -> None:
        """Makes ready.

        Args:
            out: where the folders of runs are made.
            watch: makes the listener of each run.
            say: prints a line.
            start: launches a run; by default on this machine, where runs share what forks their ranks.
        """
        self._out, self._watch, self._say, self._start = out, watch, say, start
        self._stack = ExitStack()
        self._fork_server: ForkServer | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def run(
        self,
        scenario: Scenario,
        heading: Callable[[], str],
        *,
        limit_s: Seconds | None = None,
        out: Path | None = None,
        as_pid_1: bool = False,
    ) -> tuple[Path | None, RunOutcome]:
        """Makes a run; returns its folder, if it came to have one, and what it left, also where it failed.

        Args:
            scenario: what is run.
            heading: tells what is shown of it.
            limit_s: ends it when it takes longer.
            out: where its folder is made, if not where those of all others are.
            as_pid_1: makes its launcher process 1 of a namespace.

        Raises:
            KeyboardInterrupt: it was interrupted.
        """
        failure = ""
        with self._watch(heading) as listener:
            watched = Watched(listener, limit_s)
            try:
                if as_pid_1:
                    launch_as_pid_1(scenario, out or self._out, watched)
                elif self._start is not None:
                    self._start(scenario, out or self._out, watched)
                else:
                    launch(scenario, out or self._out, watched, self._fork_server_for(scenario))
            except CapricornError as error:
                failure = " ".join(str(error).split())
            except OSError as error:
                failure = f"{type(error).__name__}: {error}"
        if failure and not as_pid_1:
            self._fork_server = None  # it may be what failed; all of them are closed at the end
        try:
            return watched.run_dir, outcome_of(watched, failure)
        except CapricornError as error:  # its records are damaged
            run_id = watched.run_dir.name if watched.run_dir is not None else ""
            return watched.run_dir, RunOutcome(run_id, (), (), (), watched.took_s, failure or str(error))

    def enter(self, context: AbstractContextManager[T]) -> T:
        """Enters a context that is left at the end of all runs."""
        return self._stack.enter_context(context)

    def say(self, line: str, *, is_news: bool = False) -> None:
        """Prints a line on what is over."""
        self._say(line, is_news)

    def _fork_server_for(self, scenario: Scenario) -> ForkServer | None:
        """Returns the process that forks ranks, the same for all runs; another one after a run that failed.

        A run that will lose its own starts one, which is None here.
        """
        if any(kind_of(fault.kind).ends_fork_server for fault in scenario.faults):
            return None
        if self._fork_server is None:
            self._fork_server = self.enter(ForkServer())
        return self._fork_server


MAX_GAP_S: Final[Seconds] = 5.0
"""Between two looks at the time; the launcher ticks much more often."""


class Watched(RunListener):
    """Hands on all it hears, remembers the run's folder, and ends the run when its time is over.

    Time in which this process was stopped itself is not the run's.
    """

    def __init__(
        self,
        listener: RunListener,
        limit_s: Seconds | None = None,
        clock: Callable[[], Seconds] = time.monotonic,
    ) -> None:
        """Begins now; the run may take `limit_s`, by that clock."""
        self._listener, self._limit_s = listener, limit_s
        self._began_s = time.monotonic()
        self._awake = AwakeClock(MAX_GAP_S, clock)
        self._is_over = False
        self.run_dir: Path | None = None

    def on_start(self, run_dir: Path, scenario: Scenario) -> None:
        self.run_dir = run_dir
        self._listener.on_start(run_dir, scenario)

    def on_sample(self, sample: IterationSample) -> None:
        self._listener.on_sample(sample)

    def on_event(self, event: EventSample) -> None:
        self._listener.on_event(event)

    def on_tick(self) -> None:
        self._listener.on_tick()
        awake_s = self._awake()
        # Once: the launcher ticks again while it ends the run.
        if self._limit_s is not None and not self._is_over and awake_s > self._limit_s:
            self._is_over = True
            raise CapricornError(f"{HANG} not done after {self._limit_s:.0f} s")

    @property
    def took_s(self) -> Seconds:
        return time.monotonic() - self._began_s


def outcome_of(watched: Watched, failure: str) -> RunOutcome:
    """Returns what the run that was watched has left in its folder.

    Raises:
        ConfigError: a file of it is damaged.
    """
    run_dir, wall_s = watched.run_dir, watched.took_s
    if run_dir is None:
        return RunOutcome("", (), (), (), wall_s, failure)
    return RunOutcome(
        run_id=run_dir.name,
        samples=tuple(read_samples(run_dir / ITERATIONS, IterationSample)),
        events=tuple(read_samples(run_dir / EVENTS, EventSample)),
        recoveries=tuple(read_samples(run_dir / RECOVERIES, RecoverySample)),
        wall_s=wall_s,
        failure=failure,
    )
