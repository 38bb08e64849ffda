"""One run of a campaign, judged by others: it may fail, and is ended when its time is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Self, TypeVar

from capricorn.campaign.verdict import Outcome
from capricorn.config.scenario import Scenario
from capricorn.errors import CapricornError
from capricorn.launch.fork_client import ForkServer
from capricorn.launch.launcher import RunListener, launch
from capricorn.launch.persist_folder import PERSISTENT
from capricorn.records.samples import (
    EVENTS,
    ITERATIONS,
    RECOVERIES,
    EventSample,
    IterationSample,
    RecoverySample,
    read_samples,
)
from capricorn.runtime.persist.layout import iterations_in
from capricorn.systems.registry import find
from capricorn.units import Seconds

from .display import watching
from .output import console

T = TypeVar("T")


class Workplace:
    """Where the runs of a campaign are made, and what is shown of them."""

    def __init__(self, out: Path, *, quiet: bool, verbose: bool) -> None:
        self._out, self._quiet, self._verbose = out, quiet, verbose
        self._is_live = console().is_terminal and not verbose
        self._stack = ExitStack()
        self._fork_server: ForkServer | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def run(
        self, scenario: Scenario, heading: Callable[[], str], limit_s: Seconds | None = None
    ) -> tuple[Path | None, Outcome]:
        """The run's folder, if it came to have one, and what it left; that it failed is part of that.

        Raises:
            KeyboardInterrupt: it was interrupted.
        """
        # A pipe gets a line for each case, and those of its iterations only if asked for.
        quiet, failure = self._quiet or not (self._is_live or self._verbose), ""
        with watching([], quiet=quiet, verbose=self._verbose, heading=heading) as listener:
            watched = Watched(listener, limit_s)
            try:
                launch(scenario, self._out, watched, self._shared_fork_server())
            except CapricornError as error:
                failure = " ".join(str(error).split())
            except OSError as error:
                failure = f"{type(error).__name__}: {error}"
        if failure:
            self._fork_server = None  # it may be what failed; all of them are closed at the end
        try:
            return watched.run_dir, outcome_of(watched, failure)
        except CapricornError as error:  # its records are damaged
            run_id = watched.run_dir.name if watched.run_dir is not None else ""
            return watched.run_dir, Outcome(run_id, (), (), (), watched.took_s, failure or str(error))

    def enter(self, context: AbstractContextManager[T]) -> T:
        """What the context yields; it is left at the end of all runs."""
        return self._stack.enter_context(context)

    def say(self, line: str, *, is_news: bool = False) -> None:
        """A line for what is over; on a terminal, where the display told it, only for what is remarkable."""
        if not self._quiet and (is_news or not self._is_live):
            console().print(line, style="yellow" if is_news else "", soft_wrap=True, markup=False)

    def _shared_fork_server(self) -> ForkServer:
        """Returns a fork server, the same for all runs; another one after a run that failed."""
        if self._fork_server is None:
            self._fork_server = self.enter(ForkServer())
        return self._fork_server


class Watched(RunListener):
    """Hands on all it hears, remembers the run's folder, and ends the run when its time is over."""

    def __init__(self, listener: RunListener, limit_s: Seconds | None = None) -> None:
        self._listener, self._limit_s = listener, limit_s
        self._began_s = time.monotonic()
        self._is_over = False
        self.run_dir: Path | None = None
        self._slow_tier: Path | None = None
        self.on_disk: tuple[int, ...] | None = None
        """Checkpoints that were complete on the slow tier when the failure struck."""

    def on_start(self, run_dir: Path, scenario: Scenario) -> None:
        self.run_dir = run_dir
        if scenario.persist.every and find(scenario.system.name).replicates:
            self._slow_tier = Path(scenario.persist.dir) if scenario.persist.dir else run_dir / PERSISTENT
        self._listener.on_start(run_dir, scenario)

    def on_sample(self, sample: IterationSample) -> None:
        self._listener.on_sample(sample)

    def on_event(self, event: EventSample) -> None:
        if event.event == "fault" and self._slow_tier is not None:
            # What is written ends with the failure; what is restored comes later than this is heard.
            self.on_disk = tuple(iterations_in(self._slow_tier))
        self._listener.on_event(event)

    def on_tick(self) -> None:
        self._listener.on_tick()
        # Once: the launcher ticks again while it ends the run.
        if self._limit_s is not None and not self._is_over and self.took_s > self._limit_s:
            self._is_over = True
            raise CapricornError(f"hang: not done after {self._limit_s:.0f} s")

    @property
    def took_s(self) -> Seconds:
        return time.monotonic() - self._began_s


def outcome_of(watched: Watched, failure: str) -> Outcome:
    """What the run that was watched has left in its folder.

    Raises:
        ConfigError: a file of it is damaged.
    """
    run_dir, wall_s = watched.run_dir, watched.took_s
    if run_dir is None:
        return Outcome("", (), (), (), wall_s, failure)
    return Outcome(
        run_id=run_dir.name,
        samples=tuple(read_samples(run_dir / ITERATIONS, IterationSample)),
        events=tuple(read_samples(run_dir / EVENTS, EventSample)),
        recoveries=tuple(read_samples(run_dir / RECOVERIES, RecoverySample)),
        wall_s=wall_s,
        failure=failure,
        on_disk=watched.on_disk,
    )
