"""The files that a run writes: frozen models, as JSON and JSON lines, with a schema version. Raw samples only: stats/
computes every mean and percentile.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from pydantic import ValidationError

from capricorn.config.fields import FrozenModel
from capricorn.config.scenario import Scenario
from capricorn.errors import ConfigError
from capricorn.units import Bytes, BytesPerSecond, Seconds

SCHEMA_VERSION = 1

Mode = Literal["live", "emulated", "simulated"]
RUN, ITERATIONS, OPS, LOADS, RECOVERIES, EVENTS, PACE, LINKS, CPU = (
    "run.json", "iterations.jsonl", "ops.jsonl", "loads.jsonl", "recoveries.jsonl", "events.jsonl",
    "pace.jsonl", "links.jsonl", "cpu.jsonl",
)  # fmt: skip


class IterationSample(FrozenModel):
    """One rank's view of one iteration; a redone iteration has one sample per attempt."""

    iteration: int
    rank: int
    attempt: int
    at_s: Seconds
    """End of the iteration, seconds since the epoch."""
    duration_s: Seconds
    stall_s: Seconds
    """Time the training thread spent inside the checkpointing system's hooks."""
    loss: float
    tokens: int
    staged_bytes: Bytes = 0
    sent_bytes: Bytes = 0
    requested: bool = False
    """Whether a checkpoint of this iteration was asked for; not of those that a system watches before its first."""
    latest_complete: int = 0
    """Newest iteration every rank could restore, as this rank knew at the end of the iteration; 0 is none."""
    latest_local: int = 0
    """Newest iteration of which this rank's local copy is complete; 0 is none."""
    completed: tuple[int, ...] = ()
    """Iterations whose checkpoint became complete on all ranks since the last sample of this attempt."""
    failed_saves: int = 0
    persisted: int = 0
    """Checkpoints of the persistent tier that became complete since the last sample; the next two likewise."""
    failed_persists: int = 0
    skipped_persists: int = 0
    """Came due while a writer was busy."""
    rss_bytes: Bytes = 0
    """Resident memory of the process, without the memory store that it maps."""
    collision_s: Seconds = 0.0
    """Time that the colliding bytes take at the measured rate of the link."""
    overflow_s: Seconds = 0.0
    """How long the update waited for bytes to leave."""
    profiled: bool = False
    """Whether its ops were measured for the planner."""
    replanned: bool = False
    profile_s: Seconds = 0.0
    plan_s: Seconds = 0.0
    planned_bytes: Bytes = 0
    """Bytes of the plan made in it that fit the idle spans."""
    hidden_bytes: Bytes = 0
    """Sent while the link was idle."""
    colliding_bytes: Bytes = 0
    """Sent while an all-to-all or a reduction moved bytes on this rank."""
    overflow_bytes: Bytes = 0
    """Sent because the update or the next checkpoint waited for them."""
    drift: float = 0.0
    """Drift of the expert loads since the plan."""
    risk: float = 0.0
    """Quantile of their durations to which idle spans are filled."""
    idle_s: Seconds = 0.0
    """Length of all idle spans, as measured last; 0 is never."""
    link_bytes_per_s: BytesPerSecond = 0.0
    """Rate of the link as measured during the run; 0 is not yet."""


class OpSample(FrozenModel):
    """One op or one chunk of a sampled iteration; times since the iteration's begin on that rank."""

    iteration: int
    rank: int
    layer: int
    direction: str
    kind: str
    begin_s: Seconds
    end_s: Seconds
    bytes: Bytes = 0


class PaceSample(FrozenModel):
    """Deviations of one rank's compute ops of one iteration from their modelled durations."""

    iteration: int
    rank: int
    attempt: int
    errors_s: list[Seconds]
    """How late each op ended that was stretched to its time."""
    overruns_s: dict[str, Seconds]
    """Time by which ops exceeded their model, by op; only of those that did."""


class LinkSample(FrozenModel):
    """One emulated link, measured before training with all links busy in the same direction of the ring."""

    source: int
    target: int
    bytes_per_s: BytesPerSecond
    round_trip_s: Seconds
    """Round trip of 64 bytes on the idle link."""


class CpuSample(FrozenModel):
    """CPU time of this machine while the run trained."""

    duration_s: Seconds
    ours_s: Seconds
    others_s: Seconds


class LoadSample(FrozenModel):
    """Token assignments per global expert of one layer in one iteration, summed over ranks."""

    iteration: int
    layer: int
    tokens_per_expert: list[int]


class EventSample(FrozenModel):
    """Something that happened to a worker, with the time since the epoch."""

    event: Literal["started", "ready", "failed", "fault", "resumed", "finished"]
    at_s: Seconds
    attempt: int
    rank: int
    iteration: int = 0
    detail: str = ""
    completed: tuple[int, ...] = ()
    """Iterations whose checkpoint became complete after the last one, while draining."""
    persisted: int = 0
    failed_persists: int = 0
    skipped_persists: int = 0
    staged_bytes: Bytes = 0
    sent_bytes: Bytes = 0
    state_digest: str = ""
    """`finished`: a digest of all that the rank owns at the end; two runs that ended alike have the same."""
    sources: tuple[str, ...] = ()
    """`resumed`: tier each owner's state came from, `local`, `peer` or `persistent`."""
    agree_s: Seconds = 0.0
    fetch_s: Seconds = 0.0
    load_s: Seconds = 0.0
    on_disk: tuple[int, ...] | None = None
    """`fault`: checkpoints that were complete on the persistent tier right before it, ascending; None in older records.
    """


RECOVERY_PHASES: Final = ("detect_s", "restart_s", "agree_s", "fetch_s", "load_s", "first_iteration_s")
"""Phases of a recovery, in the order they happen."""


class RecoverySample(FrozenModel):
    """One failure and the way back; phases in seconds, in the order they happen."""

    attempt: int
    what: str
    detected_at_s: Seconds
    """Seconds since the epoch."""
    resumed_iteration: int
    """The iteration whose state was restored; 0 is the initial state."""
    lost_iterations: int
    """Iterations that had finished and had to be done again."""
    sources: tuple[str, ...]
    """Tier each rank's state came from, by rank: `local`, `peer`, `persistent`; empty for the initial state."""
    detect_s: Seconds
    restart_s: Seconds
    agree_s: Seconds
    fetch_s: Seconds
    load_s: Seconds
    first_iteration_s: Seconds | None
    """None if a failure came before its end."""

    @property
    def phases_s(self) -> dict[str, Seconds]:
        """How long each phase took; 0 if it did not come to its end."""
        return {phase: float(getattr(self, phase) or 0.0) for phase in RECOVERY_PHASES}


class Environment(FrozenModel):
    """The machine and the software that a run ran on."""

    versions: dict[str, str]
    commit: str
    host: str
    cpu: str
    num_cpus: int
    memory_bytes: Bytes
    device: str
    kernel: str


class RunRecord(FrozenModel):
    """`run.json`: one finished or interrupted run. `summary` is what stats/ computed from the samples beside it."""

    schema_version: int = SCHEMA_VERSION
    run_id: str
    started_at: str
    """UTC, ISO 8601."""
    mode: Mode
    system: str
    seed: int
    config: Scenario
    environment: Environment
    summary: dict[str, Any]
    verdict: str
    """`ok`, or what is wrong with the run, in one sentence."""


S = TypeVar("S", bound=FrozenModel)


def append(path: Path, sample: FrozenModel) -> None:
    """Adds the sample as one line, in one write, so that several processes may share the file.

    Raises:
        OSError: there is no room for it.
    """
    line = (sample.model_dump_json() + "\n").encode()
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        if os.write(fd, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(fd)


def read_samples(path: Path, kind: type[S]) -> Iterator[S]:
    """Yields the samples of one file, none if it is absent; a last line without its end (a kill) is left out.

    Raises:
        ConfigError: a whole line is not such a sample.
    """
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith("\n"):
                return
            try:
                yield kind.model_validate_json(line)
            except ValidationError:
                raise ConfigError(f"{path}, line {number} is damaged: not a {kind.__name__}") from None


def read_run(folder: Path) -> RunRecord:
    """Returns the record of a run folder.

    Raises:
        ConfigError: there is none, it is damaged, or it has another schema version.
    """
    return read_record(folder / RUN, RunRecord, SCHEMA_VERSION, "run")


def read_record(path: Path, kind: type[S], schema_version: int, what: str) -> S:
    """Returns the record in that file, which says what a folder holds.

    Raises:
        ConfigError: there is none, it is damaged, or it has another schema version.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise ConfigError(f"{path.parent} holds no {what}: there is no {path.name} in it") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{path} is damaged: it is not JSON") from None
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != schema_version:
        raise ConfigError(f"{path} has schema version {version!r}; this version reads {schema_version}")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{path} is damaged: {error.errors()[0]['msg'].lower()}") from None


def write_run(folder: Path, record: RunRecord) -> None:
    """Writes `run.json`, as `write_record` does."""
    write_record(folder / RUN, record)


def write_record(path: Path, record: FrozenModel, *, indent: int | None = 2) -> None:
    """Writes a record so that a reader sees the old one or the new one, never a part.

    Raises:
        OSError: there is no room for it.
    """
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(record.model_dump_json(indent=indent) + "\n", encoding="utf-8")
    temporary.replace(path)
