"""Recorded timelines as a trace that Perfetto and chrome://tracing open, written as it is read: of a run of any length
no more is held than when its iterations began. Knows no comparison.

Source: Trace Event Format, complete (X) and metadata (M) events.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

from capricorn.records.samples import ITERATIONS, OPS, IterationSample, OpSample, RunRecord, read_samples
from capricorn.records.strict_json import as_json
from capricorn.stats.lanes import LANES, is_chunk, lane_of, name_of, timelines
from capricorn.units import Seconds

Event: TypeAlias = dict[str, Any]
Place: TypeAlias = dict[str, int]

ITERATION_LANE = "iterations"
ORDER = (ITERATION_LANE, *LANES)
"""Order of the lanes of one rank, from above."""


class TracedRun(NamedTuple):
    """A run, and what it is called in the trace."""

    label: str
    record: RunRecord
    folder: Path


class _Track(NamedTuple):
    """A row of the trace; what overlaps needs another with a higher number."""

    rank: int
    lane: str
    kind: str
    """The kind of a checkpoint's transfers; empty in the other lanes."""
    number: int

    @property
    def name(self) -> str:
        lane = f"rank {self.rank} {self.lane} {self.kind}".rstrip()
        return f"{lane} {self.number + 1}" if self.number else lane


class _Tracks:
    """The tracks of one run, and when the last event on each ends."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._tids: dict[_Track, int] = {}
        self._ends_s: dict[_Track, Seconds] = {}

    def place(self, rank: int, lane: str, kind: str, begin_s: Seconds, end_s: Seconds) -> Place:
        """Returns where the event goes: the first track of that lane which is free by then."""
        number = 0
        while self._ends_s.get(track := _Track(rank, lane, kind, number), begin_s) > begin_s:
            number += 1
        self._ends_s[track] = end_s
        return {"pid": self._pid, "tid": self._tids.setdefault(track, len(self._tids) + 1)}

    def names(self) -> Iterator[Event]:
        """Yields the names and the order of all tracks."""
        for track, tid in self._tids.items():
            place = {"pid": self._pid, "tid": tid}
            order = (track.rank * len(ORDER) + ORDER.index(track.lane)) * 1000 + tid
            yield _metadata("thread_name", place, name=track.name)
            yield _metadata("thread_sort_index", place, sort_index=order)


def write_trace(file: IO[bytes], runs: Sequence[TracedRun]) -> None:
    """Writes the trace of all these runs; the clock of each starts with its first iteration.

    Raises:
        ConfigError: a file of a run is damaged.
    """
    file.write(b'{"displayTimeUnit": "ms", "traceEvents": [')
    separator = b"\n"
    for event in trace_events(runs):
        file.write(separator + as_json(event).encode())
        separator = b",\n"
    file.write(b"\n]}\n")


def trace_events(runs: Sequence[TracedRun]) -> Iterator[Event]:
    """Yields the events of all runs; a process is a run, its threads are the lanes of its ranks."""
    for pid, run in enumerate(runs, 1):
        name = f"{run.label}, {run.record.mode}: {run.record.run_id}"
        yield _metadata("process_name", {"pid": pid, "tid": 0}, name=name)
        yield _metadata("process_sort_index", {"pid": pid, "tid": 0}, sort_index=pid)
        yield from _run_events(pid, run.folder)


def _run_events(pid: int, folder: Path) -> Iterator[Event]:
    tracks = _Tracks(pid)
    samples = read_samples(folder / ITERATIONS, IterationSample)
    begins_s: defaultdict[tuple[int, int], list[Seconds]] = defaultdict(list)
    start_s = _start_s(folder)
    for sample in samples:
        begin_s = sample.at_s - sample.duration_s - start_s
        begins_s[sample.rank, sample.iteration].append(begin_s)
        yield _iteration_event(tracks, sample, begin_s)
    for timeline in timelines(read_samples(folder / OPS, OpSample)):
        # A redone iteration has a sample and a timeline of each attempt, in the same order.
        attempts = begins_s[timeline[0].rank, timeline[0].iteration]
        begin_s = attempts.pop(0) if len(attempts) > 1 else attempts[0] if attempts else 0.0
        yield from _timeline_events(tracks, timeline, begin_s)
    yield from tracks.names()


def _start_s(folder: Path) -> Seconds:
    samples = read_samples(folder / ITERATIONS, IterationSample)
    return min((sample.at_s - sample.duration_s for sample in samples), default=0.0)


def _iteration_event(tracks: _Tracks, sample: IterationSample, begin_s: Seconds) -> Event:
    end_s = begin_s + sample.duration_s
    about = {"attempt": sample.attempt, "stall_s": sample.stall_s, "sent_bytes": sample.sent_bytes, "loss": sample.loss}
    place = tracks.place(sample.rank, ITERATION_LANE, "", begin_s, end_s)
    return _complete(f"iteration {sample.iteration}", ITERATION_LANE, place, begin_s, end_s, about)


def _timeline_events(tracks: _Tracks, timeline: Iterable[OpSample], start_s: Seconds) -> Iterator[Event]:
    for op in sorted(timeline, key=lambda op: op.begin_s):
        begin_s, end_s, lane = start_s + op.begin_s, start_s + op.end_s, lane_of(op)
        about = {"iteration": op.iteration} | ({"bytes": op.bytes} if op.bytes else {})
        place = tracks.place(op.rank, lane, op.kind if is_chunk(op) else "", begin_s, end_s)
        yield _complete(name_of(op), lane, place, begin_s, end_s, about)


def _complete(name: str, category: str, place: Place, begin_s: Seconds, end_s: Seconds, about: dict[str, Any]) -> Event:
    """Returns an event with its duration, in microseconds to the nanosecond."""
    begin_us, end_us = round(begin_s * 1e6, 3), round(end_s * 1e6, 3)
    duration_us = round(end_us - begin_us, 3)
    return {"name": name, "cat": category, "ph": "X", "ts": begin_us, "dur": duration_us, **place, "args": about}


def _metadata(kind: str, place: Place, **arguments: str | int) -> Event:
    return {"name": kind, "ph": "M", **place, "args": arguments}
