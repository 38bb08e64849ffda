"""Runs what a comparison still misses, one run after the other, and writes down at once how far it has come."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, TypeAlias

from capricorn.compare.compare_record import (
    CompareRecord,
    PlannedComparison,
    PlannedRun,
    Tuned,
    differing,
    missing_runs,
    write_compare,
)
from capricorn.config.scenario import Scenario
from capricorn.errors import CapricornError
from capricorn.launch.launcher import Launch, RunListener, launch
from capricorn.records.samples import EventSample, IterationSample
from capricorn.systems.settings import flat_settings
from capricorn.units import Seconds

Watch: TypeAlias = Callable[[Callable[[], str]], AbstractContextManager[RunListener]]
"""Makes the listener that shows one run, below a heading that is asked for anew each time it is shown."""


class _Turn(NamedTuple):
    """One run to be made: of which comparison, and which."""

    comparison: int
    run: PlannedRun

    @property
    def variant(self) -> tuple[int, str]:
        return self.comparison, self.run.variant


class CompareRunner:
    """Carries out the comparisons of one record; the runs lie beside its folder."""

    def __init__(
        self, folder: Path, record: CompareRecord, watch: Watch, say: Callable[[str], None], start: Launch = launch
    ) -> None:
        """Makes ready.

        Args:
            folder: of the comparisons.
            record: what is to be done.
            watch: shows a run.
            say: gets a line for each run that failed.
            start: launches a run; by default on this machine.
        """
        self._folder, self._record, self._watch, self._say, self._start = folder, record, watch, say, start
        planned = record.comparisons
        self._left = [_Turn(at, run) for at, each in enumerate(planned) for run in missing_runs(folder, each)]
        self._num_turns = sum(len(each.runs) for each in planned)
        self._took_s: dict[tuple[int, str], list[Seconds]] = defaultdict(list)
        self._began_s = time.monotonic()

    def run(self) -> None:
        """Makes all runs that are missing. One that fails is written down, and the others go on.

        Raises:
            CapricornError: the record cannot be written.
            KeyboardInterrupt: it was interrupted; what was finished is written down.
        """
        while self._left:
            turn = self._left[0]
            same = [other for other in self._left if other.variant == turn.variant]
            if self._succeeds(self._tune, turn, same) and self._succeeds(self._make, turn, [turn]):
                self._took_s[turn.variant].append(time.monotonic() - self._began_s)
                self._left.remove(turn)

    def _succeeds(self, act: Callable[[_Turn], None], turn: _Turn, concerned: Sequence[_Turn]) -> bool:
        """Acts on a turn; returns False if that fails, and then all turns it concerns are over."""
        self._began_s = time.monotonic()
        try:
            act(turn)
        except CapricornError as error:
            for each in concerned:
                self._fail(each, " ".join(str(error).split()))
            return False
        return True

    def _planned(self, at: int) -> PlannedComparison:
        return self._record.comparisons[at]

    def _write(self, at: int, planned: PlannedComparison) -> None:
        self._record = self._record.with_comparison(at, planned)
        write_compare(self._folder, self._record)

    def _tune(self, turn: _Turn) -> None:
        """Tunes a variant before its first run, if its settings are tried out on the scenario itself."""
        from capricorn.launch.tuning import needs_tuning, tune

        at, run = turn
        scenario = self._planned(at).scenario_of(run.variant)
        if not needs_tuning(scenario):
            return
        heading = f"tuning {run.variant} for {self._heading(turn)}"
        with self._watch(lambda: heading) as listener:
            tuned, run_id = tune(scenario, self._folder.parent, listener, self._start)
        before, after = flat_settings(scenario), flat_settings(tuned)
        assignments = tuple(f"{key}={after[key]}" for key in differing(after, before))
        self._write(at, self._planned(at).with_tuned(run.variant, Tuned(assignments=assignments, run_id=run_id)))

    def _make(self, turn: _Turn) -> None:
        at, run = turn

        def started(run_dir: Path) -> None:
            self._note(turn, run_id=run_dir.name, failure="", finished=False)

        with self._watch(partial(self._heading, turn)) as listener:
            self._start(self._planned(at).scenario_of(run.variant), self._folder.parent, _Noting(listener, started))
        self._note(turn, finished=True)

    def _note(self, turn: _Turn, **facts: str | bool) -> None:
        """Writes down what has become of that run."""
        at, run = turn
        now = next(each for each in self._planned(at).runs if (each.variant, each.repeat) == (run.variant, run.repeat))
        self._write(at, self._planned(at).with_run(now.model_copy(update=facts)))

    def _fail(self, turn: _Turn, failure: str) -> None:
        run = turn.run
        self._note(turn, failure=failure, finished=True)
        self._left.remove(turn)
        self._say(f"{run.variant}, repeat {run.repeat} failed: {failure}")

    def _heading(self, turn: _Turn) -> str:
        number = self._num_turns - len(self._left) + 1
        label = self._planned(turn.comparison).label
        where = f" of {label}" if label else ""
        left_s = self._left_s()
        left = "" if left_s is None else f"; about {_rounded(left_s)} left"
        return f"run {number} of {self._num_turns}{where}: {turn.run.variant}, repeat {turn.run.repeat}{left}"

    def _left_s(self) -> Seconds | None:
        """Returns how long the rest takes at the mean of the runs so far; None before the first."""
        all_s = [took_s for each in self._took_s.values() for took_s in each]
        if not all_s:
            return None
        expected_s = [fmean(self._took_s.get(turn.variant, all_s)) for turn in self._left]
        now_s = max(0.0, expected_s[0] - (time.monotonic() - self._began_s))
        return now_s + sum(expected_s[1:])


def _rounded(seconds: Seconds) -> str:
    """Returns the time in words, no finer than such an estimate is."""
    if seconds < 60:
        return f"{10 * max(1, ceil(seconds / 10))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


class _Noting(RunListener):
    """Tells when a run has a folder, and hands on all it hears."""

    def __init__(self, listener: RunListener, started: Callable[[Path], None]) -> None:
        self._listener, self._started = listener, started

    def on_start(self, run_dir: Path, scenario: Scenario) -> None:
        self._started(run_dir)
        self._listener.on_start(run_dir, scenario)

    def on_sample(self, sample: IterationSample) -> None:
        self._listener.on_sample(sample)

    def on_event(self, event: EventSample) -> None:
        self._listener.on_event(event)

    def on_tick(self) -> None:
        self._listener.on_tick()
