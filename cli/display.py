"""What a run shows while it lasts: a live panel on a terminal, plain lines in a pipe, nothing when quiet."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeAlias

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from capricorn.config.scenario import Scenario
from capricorn.launch.launcher import RunListener
from capricorn.records.samples import EventSample, IterationSample
from capricorn.report.text import describe
from capricorn.units import Seconds, format_bytes, format_seconds

from .output import console
from .progress import Progress, Snapshot

PLAIN_INTERVAL_S: Seconds = 1.0
MAX_EVENTS = 5

Heading: TypeAlias = Callable[[], str]
"""What is said above a run, as of now; nothing if empty."""


@contextmanager
def watching(folders: list[Path], *, quiet: bool, verbose: bool, heading: Heading = str) -> Iterator[RunListener]:
    """Yields the listener that suits the output, for one run whose folder it adds to `folders`."""
    out = console()
    if quiet:
        yield _Quiet(folders)
    elif out.is_terminal and not out.is_dumb_terminal and not verbose:
        with Live(console=out, auto_refresh=False, transient=True) as live:
            yield _Panel(folders, live, heading)
    else:
        yield _Lines(folders, out, verbose, heading)


def watching_each(*, quiet: bool, verbose: bool) -> Callable[[Heading], AbstractContextManager[RunListener]]:
    """Returns what makes the listener of each of several runs, below a heading of its own."""
    return lambda heading: watching([], quiet=quiet, verbose=verbose, heading=heading)


class _Quiet(RunListener):
    """Shows nothing, and remembers where the run is."""

    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders

    def on_start(self, run_dir: Path, scenario: Scenario) -> None:
        self._folders.append(run_dir)


class _Lines(_Quiet):
    """One line an iteration, at most one a second, and one an event."""

    def __init__(self, folders: list[Path], out: Console, verbose: bool, heading: Heading) -> None:
        super().__init__(folders)
        self._out, self._verbose, self._heading = out, verbose, heading
        self._printed_at_s = 0.0

    def on_start(self, run_dir: Path, scenario: Scenario) -> None:
        super().on_start(run_dir, scenario)
        self._progress = Progress(scenario)
        if heading := self._heading():
            self._print(heading)
        self._print(f"{describe(scenario)}: {run_dir}")

    def on_sample(self, sample: IterationSample) -> None:
        snapshot = self._progress.add(sample)
        now = time.monotonic()
        is_last = snapshot is not None and snapshot.iteration == self._progress.iterations
        if snapshot and (self._verbose or is_last or now - self._printed_at_s >= PLAIN_INTERVAL_S):
            self._printed_at_s = now
            self._print(_line(snapshot, self._progress.iterations))
        if snapshot and snapshot.iteration == self._progress.not_finite_from:
            self._print(_not_finite(snapshot.iteration))

    def on_event(self, event: EventSample) -> None:
        if self._verbose or _is_news(event):
            self._print(_event_line(event))

    def _print(self, text: str) -> None:
        self._out.print(text, soft_wrap=True, markup=False)


class _Panel(_Quiet):
    """The live display: redrawn at every tick, gone at the end, when the table takes its place."""

    def __init__(self, folders: list[Path], live: Live, heading: Heading) -> None:
        super().__init__(folders)
        self._live, self._heading = live, heading
        self._events: deque[str] = deque(maxlen=MAX_EVENTS)
        self._status, self._since_s = "starting", time.monotonic()

    def on_start(self, run_dir: Path, scenario: Scenario) -> None:
        super().on_start(run_dir, scenario)
        self._scenario, self._progress = scenario, Progress(scenario)

    def on_sample(self, sample: IterationSample) -> None:
        self._progress.add(sample)
        self._set_status(TRAINING)

    def on_event(self, event: EventSample) -> None:
        if _is_news(event):
            self._events.append(_event_line(event))
        self._set_status(_STATUS.get(event.event, self._status))

    def on_tick(self) -> None:
        self._live.update(self._render(), refresh=True)

    def _set_status(self, status: str) -> None:
        if status != self._status:
            self._status, self._since_s = status, time.monotonic()

    def _note(self) -> str:
        """Returns the time left, or else what is going on and for how long."""
        left = self._progress.seconds_left()
        if self._status == TRAINING:
            return TRAINING if left is None else f"{_whole_seconds(left)} left"
        return f"{self._status} {_whole_seconds(time.monotonic() - self._since_s)}"

    def _render(self) -> RenderableType:
        headings = [line for line in (self._heading(), describe(self._scenario)) if line]
        above = (Text(line, style="bold", no_wrap=True, overflow="ellipsis") for line in headings)
        events = (Text(line, style="yellow", no_wrap=True, overflow="ellipsis") for line in self._events)
        first = self._progress.not_finite_from
        loss = [] if first is None else [Text(_not_finite(first), style="yellow")]
        return Group(*above, self._bar(), _facts(self._progress.latest), *loss, *events)

    def _bar(self) -> Table:
        progress = self._progress
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True, justify="right")
        done = f"{progress.iteration}/{progress.iterations}"
        bar.add_row(done, ProgressBar(total=progress.iterations, completed=progress.iteration), self._note())
        return bar


TRAINING = "training"
NAMES = ("loss", "iteration", "local tier", "stall", "complete", "sent", "failed saves", "memory")
"""What the panel shows, two to a row."""
_STATUS = {"started": "starting", "ready": "starting", "failed": "restarting", "finished": "finishing"}


def _not_finite(first: int) -> str:
    return f"the loss is not finite from iteration {first} on; training goes on"


def _whole_seconds(seconds: Seconds) -> str:
    return f"{seconds:.0f} s" if seconds < 59.5 else format_seconds(seconds)


def _facts(latest: Snapshot | None) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for _ in range(2):
        table.add_column(style="dim", no_wrap=True)
        table.add_column(no_wrap=True, min_width=10)
    facts, names = _values(latest), iter(NAMES)
    for left, right in zip(names, names, strict=True):
        table.add_row(left, facts[left], right, facts[right])
    return table


def _values(latest: Snapshot | None) -> dict[str, str]:
    """Returns the figures of the panel, by label; a dash for each until the first iteration is over."""
    if latest is None:
        return dict.fromkeys(NAMES, "-")
    return {
        "loss": f"{latest.loss:.4f}",
        "iteration": format_seconds(latest.duration_s),
        "local tier": str(latest.latest_local or "-"),
        "complete": _complete(latest),
        "stall": format_seconds(latest.stall_s),
        "sent": f"{format_bytes(latest.sent_bytes_per_s)}/s",
        "failed saves": str(latest.failed_saves),
        "memory": format_bytes(latest.rss_bytes),
    }


def _complete(latest: Snapshot) -> str:
    """Returns the newest iteration that every rank could restore, and how far behind that is."""
    return f"{latest.latest_complete}, lag {latest.lag}" if latest.latest_complete else "-"


def _line(latest: Snapshot, iterations: int) -> str:
    values = _values(latest)
    return (
        f"iteration {latest.iteration}/{iterations}  loss {values['loss']}  {values['iteration']}  "
        f"stall {values['stall']}  local {values['local tier']}  complete {values['complete']}  "
        f"sent {values['sent']}  memory {values['memory']}"
    )


def _is_news(event: EventSample) -> bool:
    """Whether it is worth a line: what goes wrong, and once that it goes on; starts and ends come once a rank."""
    return event.event in ("fault", "not-injected", "failed", "replaced") or (
        event.event == "resumed" and (event.rank == 0 or bool(event.detail))
    )


def _event_line(event: EventSample) -> str:
    detail = f": {event.detail}" if event.detail else ""
    if event.event in ("fault", "not-injected", "replaced"):
        return f"{event.event}{detail}"
    where = {"failed": f" in iteration {event.iteration}", "resumed": f" from iteration {event.iteration}"}
    return f"rank {event.rank} {event.event}{where.get(event.event, '')}{detail}"
