"""Runs of the real command line in a process of their own, and what they leave: records, processes, stores."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Self, TypeVar

import psutil
import pytest

from capricorn.records.samples import (
    EVENTS,
    ITERATIONS,
    OPS,
    RECOVERIES,
    EventSample,
    IterationSample,
    OpSample,
    RecoverySample,
    read_samples,
)
from tests.support.processes import command_of

PROGRAM = (sys.executable, "-c", "from capricorn.cli.main import main; main()")
MARK = "CAPRICORN_TEST_RUN"
"""Environment variable by which every process of a run is found again, whoever its parent is by then."""
DEADLINE_S = 100.0
ITERATIONS_DONE = 20
TINY = ("--model", "mixtral-tiny", "--device", "cpu")

T = TypeVar("T")


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """The one object on stdout."""
        return json.loads(self.stdout)


@dataclass(frozen=True)
class Run(Done):
    """A run that has ended, and its folder if it came to have one."""

    folder: Path | None

    @property
    def record(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((self._folder() / "run.json").read_text())
        return record

    @property
    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = self.record["summary"]
        return summary

    @property
    def samples(self) -> list[IterationSample]:
        return list(read_samples(self._folder() / ITERATIONS, IterationSample))

    @property
    def events(self) -> list[EventSample]:
        return list(read_samples(self._folder() / EVENTS, EventSample))

    @property
    def recoveries(self) -> list[RecoverySample]:
        return list(read_samples(self._folder() / RECOVERIES, RecoverySample))

    @property
    def ops(self) -> list[OpSample]:
        return list(read_samples(self._folder() / OPS, OpSample))

    @property
    def num_triggered(self) -> int:
        """Injected failures that happened."""
        return sum(event.event == "fault" for event in self.events)

    @property
    def resumed(self) -> list[int]:
        """The iteration whose state each restart began with; 0 is the initial one."""
        starts = {event.attempt: event.iteration for event in self.events if event.event == "resumed"}
        return [starts.get(attempt, 0) for attempt in self._restarts]

    @property
    def lost(self) -> list[int]:
        """Iterations that each restart had to do again, by what had been recorded until then."""
        samples = self.samples
        done = [
            max((sample.iteration for sample in samples if sample.attempt < attempt), default=0)
            for attempt in self._restarts
        ]
        return [max(0, before - resumed) for before, resumed in zip(done, self.resumed, strict=True)]

    @property
    def _restarts(self) -> list[int]:
        """The attempts after the first in which a rank has started; one may be over before that."""
        return sorted({event.attempt for event in self.events if event.event == "started" and event.attempt})

    @property
    def sources(self) -> list[list[str]]:
        return [list(recovery.sources) for recovery in self.recoveries]

    def _folder(self) -> Path:
        assert self.folder is not None, f"no run folder: {self.stderr}"
        return self.folder


def command(*arguments: str | Path, deadline_s: float = DEADLINE_S) -> Done:
    """Any command of the program, run to its end."""
    done = subprocess.run(
        [*PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=deadline_s, check=False
    )
    return Done(done.returncode, done.stdout, done.stderr)


def run(out: Path, *options: str | Path, prefix: Sequence[str] = (), deadline_s: float = DEADLINE_S) -> Run:
    """`capricorn-bench run` of 20 iterations of mixtral-tiny unless the options say otherwise, to its end.

    Leaves no process and, unless it is to be kept, no store.
    """
    with LiveRun(out, *options, prefix=prefix) as live:
        return live.finish(deadline_s=deadline_s)


def faults(*specs: str) -> list[str]:
    """The options that inject these failures."""
    return [part for spec in specs for part in ("--fault", spec)]


class LiveRun:
    """A run from the moment it is started; whatever happens, leaving the block ends all of its processes."""

    def __init__(
        self,
        out: Path,
        *options: str | Path,
        prefix: Sequence[str] = (),
        program: Sequence[str] = PROGRAM,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self._out, self._mark = out, uuid.uuid4().hex
        out.mkdir(parents=True, exist_ok=True)
        usual = (*TINY, "--iterations", str(ITERATIONS_DONE), "--out", out)
        arguments = [*prefix, *program, "run", *map(str, (*usual, *options))]
        # Files, as a pipe that nobody reads may fill up and block.
        self._stdout, self._stderr = TemporaryFile(), TemporaryFile()  # noqa: SIM115 - closed in __exit__
        self.process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=self._stdout,
            stderr=self._stderr,
            env={**(os.environ if env is None else env), MARK: self._mark},
            cwd=cwd,
            start_new_session=True,  # a process group of its own, as a shell makes it
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        self._stdout.close()
        self._stderr.close()
        if exception[0] is not None and self.folder is not None:
            shutil.rmtree(self.store(), ignore_errors=True)

    def processes(self) -> list[psutil.Process]:
        """All living processes of the run."""
        return [process for process in psutil.process_iter() if self._is_mine(process)]

    def _is_mine(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.Error, OSError):
            return False

    @property
    def folder(self) -> Path | None:
        return next((path for path in sorted(self._out.iterdir()) if path.is_dir() and self._has_job(path)), None)

    def _has_job(self, path: Path) -> bool:
        return (path / "job.json").exists()

    def store(self) -> Path:
        """The folder of its memory store."""
        return Path(self._job()["store_dir"])

    def _job(self) -> dict[str, Any]:
        assert self.folder is not None
        job: dict[str, Any] = json.loads((self.folder / "job.json").read_text())
        return job

    def samples(self) -> list[IterationSample]:
        return list(read_samples(self.folder / ITERATIONS, IterationSample)) if self.folder else []

    def events(self) -> list[EventSample]:
        return list(read_samples(self.folder / EVENTS, EventSample)) if self.folder else []

    def stderr(self) -> str:
        """What it has said so far."""
        return _text(self._stderr)

    def wait_iteration(self, iteration: int) -> None:
        """Returns once some rank has done that iteration."""
        self.wait(lambda: any(sample.iteration >= iteration for sample in self.samples()), f"iteration {iteration}")

    def wait(self, happened: Callable[[], T], what: str, *, deadline_s: float = 60.0) -> T:
        """What `happened` yields once that is true, which must come before the run ends."""
        for _ in polls(deadline_s):
            if value := happened():
                return value
            assert self.process.poll() is None, f"the run ended before {what}: {_text(self._stderr)}"
        pytest.fail(f"{what} did not come within {deadline_s} s\n{self._logs()}")

    def interrupt(self, number: signal.Signals) -> None:
        """Sends the signal to the process group, as a terminal does."""
        os.killpg(self.process.pid, number)

    def finish(self, *, deadline_s: float = DEADLINE_S) -> Run:
        """The run once it has ended by itself and, but for a kept store, left nothing."""
        try:
            code = self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the run hangs: not done after {deadline_s} s\n{self._logs()}")
        ended = Run(code, _text(self._stdout), _text(self._stderr), self.folder)
        left = [f"{process.pid}: {command_of(process)}" for process in self.processes()]
        assert not left, f"the run left processes behind: {left}"
        if (
            ended.folder is not None
            and not json.loads((ended.folder / "job.json").read_text())["scenario"]["store"]["keep"]
        ):
            assert not self.store().exists(), "the run left its store behind"
        return ended

    def _logs(self) -> str:
        files = sorted((self.folder / "log").glob("*.log")) if self.folder else []
        tails = [f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in files]
        events = "\n".join(map(str, self.events()[-20:]))
        return "\n".join([_text(self._stderr), events, *tails])


def _text(file: IO[bytes]) -> str:
    """What a process has written to the file so far; leaves its position alone, which they share."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


def fill_up(path: Path) -> None:
    """Writes a file until its file system has no room left."""
    with path.open("ab", buffering=0) as file:
        for size in (1 << 20, 4096):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                assert error.errno == errno.ENOSPC  # noqa: PT017 - the end of the loop


def flip_byte(path: Path, offset: int) -> None:
    """Changes one bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def polls(deadline_s: float, every_s: float = 0.05) -> Iterator[None]:
    """Yields again and again until the deadline."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        yield
        time.sleep(every_s)


def assert_ok(ended: Run) -> None:
    """It did all it was asked for, and every checkpoint was complete."""
    assert ended.exit_code == 0, f"{ended.stderr}\n{ended.stdout}"
    assert ended.record["verdict"] == "ok"
    assert ended.summary["requested"] == ended.summary["effective"]


def assert_same_losses(ended: Run, reference: Run) -> None:
    """Every iteration, also one that was done again, had the loss of the uninterrupted run, bit for bit."""
    expected = {(sample.rank, sample.iteration): sample.loss for sample in reference.samples}
    actual = ended.samples
    assert actual
    wrong = [
        s for s in actual if (s.rank, s.iteration) in expected and s.loss.hex() != expected[s.rank, s.iteration].hex()
    ]
    assert not wrong, [(s.rank, s.iteration, s.attempt, s.loss, expected[s.rank, s.iteration]) for s in wrong]
    # A rank that dies between an iteration and its record may still be restored to that iteration.
    missing = expected.keys() - {(sample.rank, sample.iteration) for sample in actual}
    missing = {(rank, iteration) for rank, iteration in missing if iteration not in ended.resumed}
    assert not missing, f"iterations without a record: {sorted(missing)}"
