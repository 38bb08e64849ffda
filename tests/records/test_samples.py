"""Records survive writing and reading; what is foreign, torn or damaged is told apart."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capricorn.config.fields import FrozenModel
from capricorn.config.resolve import load_model
from capricorn.config.scenario import Scenario
from capricorn.errors import ConfigError, RecordError
from capricorn.records.follow import Follower
from capricorn.records.job_file import Job
from capricorn.records.samples import (
    RUN,
    SCHEMA_VERSION,
    CpuSample,
    Environment,
    EventSample,
    IterationSample,
    LinkSample,
    LoadSample,
    OpSample,
    PaceSample,
    RecoverySample,
    RunRecord,
    append,
    damage_in_words,
    read_record,
    read_run,
    read_samples,
    write_run,
)
from tests.support.small_files import files_end_at

SAMPLES = (
    IterationSample, OpSample, PaceSample, LinkSample, CpuSample, LoadSample, EventSample, RecoverySample,
)  # fmt: skip
SECONDS = st.floats(min_value=0, max_value=1e9, allow_nan=False)
COUNTS = st.integers(min_value=0, max_value=2**50)


def record() -> RunRecord:
    return RunRecord(
        run_id="r1",
        started_at="2026-11-29T15:00:00Z",
        mode="live",
        system="capricorn",
        seed=0,
        config=Scenario(model=load_model("mixtral-tiny")),
        environment=Environment(
            versions={"torch": "2.13.0"}, commit="", host="h", cpu="c", num_cpus=2, memory_bytes=1, device="cpu",
            kernel="6",
        ),
        summary={"requested": 3, "effective": 3},
        verdict="ok",
    )  # fmt: skip


def event(rank: int = 0) -> EventSample:
    return EventSample(event="started", at_s=1.5, attempt=0, rank=rank)


def test_a_run_reads_back_as_written(tmp_path: Path) -> None:
    write_run(tmp_path, record())
    assert read_run(tmp_path) == record()
    assert [path.name for path in tmp_path.iterdir()] == [RUN]


@given(iteration=COUNTS, rank=COUNTS, at_s=SECONDS, loss=st.floats(), sent=COUNTS)
def test_a_sample_keeps_every_bit_through_its_line(
    iteration: int, rank: int, at_s: float, loss: float, sent: int
) -> None:
    sample = IterationSample(
        iteration=iteration, rank=rank, attempt=0, at_s=at_s, duration_s=0.1, stall_s=0.0, loss=loss, tokens=1,
        sent_bytes=sent,
    )  # fmt: skip
    read = IterationSample.model_validate_json(sample.model_dump_json())
    assert read.loss.hex() == loss.hex()
    assert read.model_copy(update={"loss": 0.0}) == sample.model_copy(update={"loss": 0.0})


@pytest.mark.parametrize("kind", SAMPLES)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_every_number_of_every_sample_may_be_any(kind: type[FrozenModel], data: st.DataObject) -> None:
    sample = data.draw(st.builds(kind))
    line = sample.model_dump_json()
    json.loads(line, parse_constant=pytest.fail)  # what is no JSON, as NaN
    assert repr(kind.model_validate_json(line)) == repr(sample)


def test_the_numbers_of_a_summary_may_be_any(tmp_path: Path) -> None:
    summary = {"final_loss": math.nan, "rates": [math.inf, -math.inf, 1.5], "nested": {"at": [{"x": math.nan}]}}
    write_run(tmp_path, record().model_copy(update={"summary": summary}))
    json.loads((tmp_path / RUN).read_text(), parse_constant=pytest.fail)
    assert repr(read_run(tmp_path).summary) == repr(summary)


def test_samples_come_back_in_the_order_of_their_lines(tmp_path: Path) -> None:
    for rank in range(3):
        append(tmp_path / "events.jsonl", event(rank))
    assert [sample.rank for sample in read_samples(tmp_path / "events.jsonl", EventSample)] == [0, 1, 2]


def test_an_absent_file_has_no_samples(tmp_path: Path) -> None:
    assert list(read_samples(tmp_path / "none.jsonl", EventSample)) == []


@pytest.mark.parametrize("torn", ['{"event": "sta', "", event(7).model_dump_json()])
def test_a_last_line_without_its_end_is_ignored(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "events.jsonl"
    append(path, event(0))
    path.write_text(path.read_text() + torn)
    assert [sample.rank for sample in read_samples(path, EventSample)] == [0]


@pytest.mark.parametrize("damage", ["{", "null", '{"event": "started"}', "\x00\x00", "[" * 10**5, "\udcff"])
def test_a_damaged_line_is_named_and_the_reader_goes_on(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "events.jsonl"
    append(path, event(0))
    path.write_bytes(path.read_bytes() + damage.encode(errors="surrogateescape") + b"\n")
    append(path, event(1))
    damaged: list[int] = []
    assert [sample.rank for sample in read_samples(path, EventSample, damaged)] == [0, 1]
    assert damaged == [2]
    assert not capsys.readouterr().err
    assert len(list(read_samples(path, EventSample))) == 2
    assert capsys.readouterr().err == f"note: {path}: 1 line is damaged and left out (2)\n"
    assert [sample.rank for sample in Follower(path, EventSample).new()] == [0, 1]


def test_of_many_damaged_lines_the_first_are_named_and_all_counted() -> None:
    assert damage_in_words(list(range(1, 9))) == "8 lines are damaged and left out (1, 2, 3, 4, 5, ...)"


def test_a_line_that_does_not_fit_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append(path, event(0))
    size = path.stat().st_size
    with files_end_at(size + 10), pytest.raises(RecordError, match=rf"^cannot write {path}: No space left on device$"):
        append(path, event(1))
    assert path.stat().st_size == size
    append(path, event(2))
    damaged: list[int] = []
    assert [sample.rank for sample in read_samples(path, EventSample, damaged)] == [0, 2]
    assert not damaged


def test_a_line_waits_for_room_as_long_as_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    path.touch()
    waited: list[float] = []
    with ExitStack() as full:
        full.enter_context(files_end_at(10))
        monkeypatch.setattr(time, "sleep", lambda duration_s: (waited.append(duration_s), full.close()))
        append(path, event(1), patience_s=60.0)
    assert len(waited) == 1
    assert [sample.rank for sample in read_samples(path, EventSample)] == [1]
    monkeypatch.setattr(time, "sleep", waited.append)
    with files_end_at(path.stat().st_size + 10), pytest.raises(RecordError, match="No space left on device"):
        append(path, event(2), patience_s=0.01)


def test_a_writer_that_is_killed_within_its_line_costs_that_line_only(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append(path, event(0))
    path.write_text(path.read_text() + event(1).model_dump_json()[:20])
    append(path, event(2))
    damaged: list[int] = []
    assert [sample.rank for sample in read_samples(path, EventSample, damaged)] == [0, 2]
    assert damaged == [2]


def test_empty_lines_are_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(f"\n{event(0).model_dump_json()}\n\n")
    damaged: list[int] = []
    assert len(list(read_samples(path, EventSample, damaged))) == 1
    assert not damaged


def test_a_sample_of_a_newer_version_is_read_without_what_is_new(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "events.jsonl"
    for rank in range(3):
        append(path, event(rank))
    lines = [json.dumps(json.loads(line) | {"mood": "good"}) for line in path.read_text().splitlines()]
    path.write_text("".join(f"{line}\n" for line in lines))
    assert list(read_samples(path, EventSample)) == [event(rank) for rank in range(3)]
    assert capsys.readouterr().err == f"note: {path} was written by a newer version: left out mood\n"


def newer(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Writes the record of a later version, in which something is changed."""
    data = record().model_dump(mode="json")
    data["environment"]["versions"]["capricorn-bench"] = "99.1.0"
    change(data)
    (folder / RUN).write_text(json.dumps(data))
    return folder / RUN


def test_a_record_of_a_newer_version_is_read_without_what_is_new(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(data: dict[str, Any]) -> None:
        data["mood"] = "good"
        data["config"]["train"]["warmth"] = 1
        data["config"]["optics"] = {"lens": 2}
        data["config"]["faults"] = [{"kind": "kill", "iteration": 1, "rank": 0, "force": 3}]

    path = newer(tmp_path, change)
    read = read_run(tmp_path)
    assert (read.run_id, read.config.train) == ("r1", record().config.train)
    (note,) = capsys.readouterr().err.splitlines()
    fields = "config.faults.0.force, config.optics, config.train.warmth, mood"
    assert note == f"note: {path} was written by a newer version (99.1.0): left out {fields}"


def test_a_record_that_would_lose_what_is_new_is_not_gone_on_with(tmp_path: Path) -> None:
    path = newer(tmp_path, lambda data: data.update(mood="good"))
    with pytest.raises(ConfigError, match=r"newer version \(99\.1\.0\): this one, .*, would lose mood; go on with the"):
        read_record(path, RunRecord, SCHEMA_VERSION, "run", goes_on=True)


def test_a_value_that_a_newer_version_has_brought_is_named(tmp_path: Path) -> None:
    newer(tmp_path, lambda data: data.update(mode="dreamt"))
    with pytest.raises(ConfigError, match=r"by a newer version \(99\.1\.0\): cannot read mode: input should"):
        read_run(tmp_path)


def test_a_newer_schema_version_is_not_taken_for_ours(tmp_path: Path) -> None:
    newer(tmp_path, lambda data: data.update(schema_version=SCHEMA_VERSION + 1))
    with pytest.raises(ConfigError, match=r"by a newer version \(99\.1\.0\): its schema version is 2, .*update"):
        read_run(tmp_path)


@pytest.mark.parametrize("version", [0, None, "1"])
def test_a_foreign_schema_version_is_refused(tmp_path: Path, version: object) -> None:
    data = record().model_dump(mode="json") | {"schema_version": version, "a_field_of_the_future": 1}
    (tmp_path / RUN).write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=f"has schema version {version!r}; this version reads {SCHEMA_VERSION}"):
        read_run(tmp_path)


def test_a_record_without_its_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / RUN).write_text("[]")
    with pytest.raises(ConfigError, match="has schema version None"):
        read_run(tmp_path)


@pytest.mark.parametrize(("text", "message"), [("{", "is not JSON"), ('{"schema_version": 1}', "is damaged")])
def test_a_damaged_record_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / RUN).write_text(text)
    with pytest.raises(ConfigError, match=message) as raised:
        read_run(tmp_path)
    assert str(tmp_path / RUN) in str(raised.value)


def test_a_folder_without_a_record_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"holds no run: there is no {RUN}"):
        read_run(tmp_path)


def test_a_summary_that_could_not_be_computed_is_null_in_the_file(tmp_path: Path) -> None:
    write_run(tmp_path, record().model_copy(update={"summary": {"slowdown": None}}))
    assert json.loads((tmp_path / RUN).read_text())["summary"] == {"slowdown": None}


@pytest.mark.parametrize(("text", "message"), [("{", "is damaged: it is not JSON"), ("{}", r"is damaged: run_id: ")])
def test_a_damaged_job_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "job.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        Job.read(tmp_path / "job.json")


def test_the_clock_of_a_run_does_not_jump_with_the_clock_on_the_wall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_s = time.time()
    scenario = Scenario(model=load_model("mixtral-tiny"))
    job = Job(
        run_id="r", scenario=scenario, run_dir=tmp_path, store_dir=tmp_path, tokens=tmp_path,
        epoch_s=start_s - time.monotonic(),
    )  # fmt: skip
    read = Job.read(job.write())
    monkeypatch.setattr(time, "time", lambda: start_s - 1e6)
    first_s = read.now_s()
    assert start_s <= first_s <= read.now_s()
