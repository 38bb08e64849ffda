"""The files that a run writes: frozen models, as JSON and JSON lines, with a schema version. Raw samples only: stats/
computes every mean and percentile.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

from pydantic import AfterValidator, BeforeValidator, ValidationError

from capricorn.config.fields import FrozenModel
from capricorn.config.scenario import Scenario
from capricorn.errors import RecordError, note_once
from capricorn.files import named, open_descriptor, open_file, write_text
from capricorn.records.record_file import MAX_NAMED, check_schema, note_unknown, parse_record, read_json, read_known
from capricorn.records.strict_json import numbers
from capricorn.units import Bytes, BytesPerSecond, Seconds, count_noun

SCHEMA_VERSION = 1
ROOM_POLL_S: Final[Seconds] = 0.05
"""How often it is looked whether there is room again."""
RENAMED: Final = {"faults_struck": "faults_triggered"}
"""Figures of a summary: the name in version 0.1, and the one since."""

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
    """End of the iteration, in seconds since the epoch as the monotonic clock counts them on from the run's start."""
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


EventName: TypeAlias = Literal["started", "ready", "failed", "fault", "not-injected", "resumed", "finished", "replaced"]
"""`not-injected` takes back the `fault` before it of the same rank, which was not done after all; `replaced` is told of
a process beside the ranks.
"""


class EventSample(FrozenModel):
    """Something that happened to a worker, with the time as samples have it."""

    event: EventName
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
    """The time as samples have it."""
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
    other_hosts: tuple[str, ...] = ()
    """Of a run over several machines: those that were nodes at its end, from node 1 on, and then spares."""


def _as_named_now(summary: Any) -> Any:
    """Returns a summary under today's names of its figures."""
    return {RENAMED.get(key, key): value for key, value in summary.items()} if isinstance(summary, dict) else summary


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
    summary: Annotated[dict[str, Any], BeforeValidator(_as_named_now), AfterValidator(numbers)]
    verdict: str
    """`ok`, or what is wrong with the run, in one sentence."""


S = TypeVar("S", bound=FrozenModel)


# --- lines -------------------------------------------------------------------------------------------------------


def append(path: Path, sample: FrozenModel, *, patience_s: Seconds = 0.0) -> None:
    """Adds the sample as one line, in one write, so that several processes may share the file.

    Where there is no room it is tried again for `patience_s`.

    Raises:
        RecordError: there is no room for it, or none may write there; nothing of it is left then.
    """
    line = (sample.model_dump_json() + "\n").encode()
    end_s = time.monotonic() + patience_s
    while not _added(path, line, may_fail=time.monotonic() < end_s):
        time.sleep(ROOM_POLL_S)


def _added(path: Path, line: bytes, *, may_fail: bool) -> bool:
    """Adds a line; returns False if there is no room for it and that is no error yet."""
    try:
        descriptor = open_descriptor(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        try:
            _write_line(descriptor, line)
        finally:
            os.close(descriptor)
    except OSError as error:
        if may_fail and error.errno == errno.ENOSPC:
            return False
        raise RecordError(f"cannot write {path}: {error.strerror}") from error
    return True


def _write_line(descriptor: int, line: bytes) -> None:
    """Writes a line behind the others: all of it or nothing."""
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        line = b"\n" + line  # somebody was killed within a line, which is to cost that line only
    written = os.write(descriptor, line)
    if written < len(line):
        end = os.lseek(descriptor, 0, os.SEEK_CUR)
        if os.fstat(descriptor).st_size == end:  # nobody has come after it
            os.ftruncate(descriptor, end - written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_samples(path: Path, kind: type[S], damaged: list[int] | None = None) -> Iterator[S]:
    """Yields the samples of one file, none if it is absent; a last line without its end (a kill) is left out.

    So are lines that are damaged: their numbers are added to `damaged`, or a note says them.

    Raises:
        ConfigError: the file cannot be read.
    """
    wrong: list[int] = []
    unknown: set[str] = set()
    with named(f"read {path}"):
        try:
            lines = open_file(path)
        except FileNotFoundError:
            return
    with lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                break
            if not line.strip():
                continue
            if (sample := read_line(line, kind, unknown)) is not None:
                yield sample
            else:
                wrong.append(number)
    note_unknown(path, unknown)
    if damaged is not None:
        damaged += wrong
    elif wrong:
        note_once(f"{path}: {damage_in_words(wrong)}")


def read_line(line: bytes, kind: type[S], unknown: set[str]) -> S | None:
    """Returns the sample in that line, None if it is damaged; fields that this version lacks are added to `unknown`."""
    try:
        return kind.model_validate_json(line)
    except ValidationError:
        return _read_newer(line, kind, unknown)


def _read_newer(line: bytes, kind: type[S], unknown: set[str]) -> S | None:
    try:
        known = read_known(kind, json.loads(line))
    except (ValueError, RecursionError):  # a ValidationError is a ValueError
        return None
    unknown.update(known.unknown)
    found: S = known.record
    return found


def damage_in_words(numbers: list[int]) -> str:
    """Returns that the lines of these numbers are damaged: `2 lines are damaged and left out (5, 9)`."""
    few = ", ".join(map(str, numbers[:MAX_NAMED])) + (", ..." if len(numbers) > MAX_NAMED else "")
    verb = "is" if len(numbers) == 1 else "are"
    return f"{count_noun(len(numbers), 'line')} {verb} damaged and left out ({few})"


# --- records -----------------------------------------------------------------------------------------------------


def read_run(folder: Path) -> RunRecord:
    """Returns the record of a run folder.

    Raises:
        ConfigError: there is none, it is damaged, or a newer version has written what this one cannot read.
    """
    return read_record(folder / RUN, RunRecord, SCHEMA_VERSION, "run")


def read_record(path: Path, kind: type[S], schema_version: int, what: str, *, goes_on: bool = False) -> S:
    """Returns the record in that file, which says what a folder holds.

    Args:
        path: the file.
        kind: what is in it.
        schema_version: the one that this version reads.
        what: what the folder is said to hold.
        goes_on: whether it will be written again, where fields that this version does not know would be lost.

    Raises:
        ConfigError: there is none, it is damaged, or a newer version has written what this one cannot read.
    """
    data = read_json(path, what)
    check_schema(path, data, schema_version)
    return parse_record(path, kind, data, goes_on=goes_on)


def write_run(folder: Path, record: RunRecord) -> None:
    """Writes `run.json`, as `write_record` does."""
    write_record(folder / RUN, record)


def write_record(path: Path, record: FrozenModel, *, indent: int | None = 2) -> None:
    """Writes a record so that a reader sees the old one or the new one, never a part.

    Raises:
        CapricornError: there is no room for it, or none may write there.
    """
    write_text(path, record.model_dump_json(indent=indent) + "\n")
