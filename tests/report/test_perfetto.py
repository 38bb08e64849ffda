"""The exported trace: its structure, when things happened, and that events on one track never overlap."""

from __future__ import annotations

import io
import json
import os
import tracemalloc
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from capricorn.records.samples import ITERATIONS, OPS, OpSample, append, read_run
from capricorn.report.export import perfetto as trace
from capricorn.report.export.perfetto import TracedRun, write_trace
from capricorn.stats.lanes import lane_of, timelines
from tests.cli.test_cli import cli
from tests.support.recorded import NUM_ITERATIONS, NUM_RANKS, SAMPLED_EVERY, iteration_sample, ops_of, write_run_folder

Event = dict[str, Any]


def traced(*folders: Path) -> list[TracedRun]:
    return [TracedRun(record.system, record, folder) for folder in folders if (record := read_run(folder))]


def events_of(*folders: Path) -> list[Event]:
    file = io.BytesIO()
    write_trace(file, traced(*folders))
    events: list[Event] = json.loads(file.getvalue())["traceEvents"]
    return events


def names_of(events: list[Event]) -> dict[tuple[int, int], str]:
    """By process and thread what a track is called."""
    named = [event for event in events if event["name"] == "thread_name"]
    return {(event["pid"], event["tid"]): event["args"]["name"] for event in named}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run_folder(tmp_path / "run-1")


def test_a_trace_has_the_structure_that_viewers_read(run: Path, tmp_path: Path) -> None:
    other = write_run_folder(tmp_path / "run-2", "none", mode="emulated")
    out = tmp_path / "out" / "trace.json"
    assert cli("export", run, other, "--trace", out, "--out", tmp_path / "table.md") == 0
    document = json.loads(out.read_text())
    assert document.keys() == {"displayTimeUnit", "traceEvents"}
    events = document["traceEvents"]
    assert {event["ph"] for event in events} == {"X", "M"}
    for event in events:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["args"], dict)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert event["cat"] in ("iterations", "compute", "communication", "checkpoint")
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert processes == {1: "capricorn, live: run-1", 2: "none, emulated: run-2"}
    tracks = names_of(events)
    assert {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"} == tracks.keys()
    assert len(set(tracks.items())) == len(tracks)
    for rank in range(NUM_RANKS):
        for lane in ("iterations", "compute", "communication", "checkpoint stage", "checkpoint send"):
            assert (f"rank {rank} {lane}") in tracks.values()
    assert not [name for (pid, _), name in tracks.items() if pid == 2 and "checkpoint" in name]


def test_ops_lie_in_microseconds_within_their_iteration(run: Path) -> None:
    events = events_of(run)
    tracks = names_of(events)
    iterations = [e for e in events if e.get("cat") == "iterations" and tracks[e["pid"], e["tid"]].startswith("rank 1")]
    assert [event["name"] for event in iterations] == [f"iteration {i}" for i in range(1, NUM_ITERATIONS + 1)]
    assert iterations[0]["ts"] == 0
    assert iterations[0]["dur"] == pytest.approx(100_000, abs=0.01)
    fifth = iterations[SAMPLED_EVERY - 1]
    (head,) = (
        event
        for event in events
        if event["name"] == "head forward"
        and event["args"]["iteration"] == SAMPLED_EVERY
        and tracks[event["pid"], event["tid"]] == "rank 1 compute"
    )
    assert head["ts"] - fifth["ts"] == pytest.approx(8 * 5_000, abs=0.01)
    assert head["dur"] == pytest.approx(5_000, abs=0.01)
    (stage, *_) = (event for event in events if event["name"] == "stage")
    assert stage["args"]["bytes"] == 500


def test_what_overlaps_gets_tracks_of_its_own(run: Path) -> None:
    events = events_of(run)
    by_track: defaultdict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            by_track[event["pid"], event["tid"]].append(event)
    for track in by_track.values():
        ordered = sorted(track, key=lambda event: event["ts"])
        ends = [event["ts"] + event["dur"] for event in ordered]
        starts = [event["ts"] for event in ordered]
        assert all(end <= start + 1e-3 for end, start in zip(ends, starts[1:], strict=False))
    assert "rank 0 checkpoint send 2" in names_of(events).values()


def test_tracks_are_ordered_by_rank_and_lane(run: Path) -> None:
    events = events_of(run)
    tracks = names_of(events)
    order = {
        tracks[event["pid"], event["tid"]]: event["args"]["sort_index"]
        for event in events
        if event["name"] == "thread_sort_index"
    }
    lanes = [f"rank {rank} {lane}" for rank in range(NUM_RANKS)
             for lane in ("iterations", "compute", "communication", "checkpoint stage")]  # fmt: skip
    assert sorted(lanes, key=order.__getitem__) == lanes


def test_a_redone_iteration_has_its_ops_at_both_times(tmp_path: Path) -> None:
    run = write_run_folder(tmp_path / "run-1")
    append(run / ITERATIONS, iteration_sample(SAMPLED_EVERY, 0, attempt=1, at_s=1050.0))
    for op in ops_of(SAMPLED_EVERY):
        append(run / OPS, op)
    events = events_of(run)
    tracks = names_of(events)
    heads = [
        event["ts"]
        for event in events
        if event["name"] == "head forward"
        and event["args"]["iteration"] == SAMPLED_EVERY
        and tracks[event["pid"], event["tid"]].startswith("rank 0 ")
    ]
    assert heads == pytest.approx([400_000 + 40_000, 49.9e6 + 40_000], abs=100)


def test_timelines_are_told_apart_where_ranks_write_in_turns() -> None:
    first, second = ops_of(5, 0), ops_of(5, 1)
    mixed = [op for both in zip(first, second, strict=True) for op in both]
    again = [*mixed, *ops_of(5, 0), *ops_of(10, 1)]
    found = [(each[0].rank, each[0].iteration, len(each)) for each in timelines(again)]
    assert sorted(found) == [(0, 5, 11), (0, 5, 11), (1, 5, 11), (1, 10, 11)]


def test_every_kind_of_op_has_its_lane() -> None:
    lanes = {op.kind: lane_of(op) for op in ops_of(5, chunks=[("stage", 0, 1), ("write", 0, 1)])}
    assert lanes == {
        "attention": "compute", "expert": "compute", "head": "compute", "dispatch": "communication",
        "combine": "communication", "reduce": "communication", "update": "communication", "stage": "checkpoint",
        "write": "checkpoint",
    }  # fmt: skip


def test_a_long_run_is_not_held_in_memory(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def peak_bytes(num_sampled: int) -> int:
        def samples(path: Path, kind: type) -> Iterator[Any]:
            """As many as asked for, made when they are read."""
            for iteration in range(1, num_sampled + 1):
                yield from ops_of(iteration) if kind is OpSample else [iteration_sample(iteration)]

        monkeypatch.setattr(trace, "read_samples", samples)
        tracemalloc.start()
        with Path(os.devnull).open("wb") as file:
            write_trace(file, traced(run))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    few, many = peak_bytes(5), peak_bytes(400)
    size_bytes = sum(len(op.model_dump_json()) for op in ops_of(1)) * 400
    assert many - few < size_bytes / 4
