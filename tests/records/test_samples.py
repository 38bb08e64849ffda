"""Records survive writing and reading; what is foreign, torn or damaged is told apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capricorn.config.resolve import load_model
from capricorn.config.scenario import Scenario
from capricorn.errors import ConfigError
from capricorn.records.samples import (
    RUN,
    SCHEMA_VERSION,
    Environment,
    EventSample,
    IterationSample,
    RunRecord,
    append,
    read_run,
    read_samples,
    write_run,
)

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


@given(iteration=COUNTS, rank=COUNTS, at_s=SECONDS, loss=st.floats(allow_nan=False, allow_infinity=False), sent=COUNTS)
def test_a_sample_keeps_every_bit_through_its_line(
    iteration: int, rank: int, at_s: float, loss: float, sent: int
) -> None:
    sample = IterationSample(
        iteration=iteration, rank=rank, attempt=0, at_s=at_s, duration_s=0.1, stall_s=0.0, loss=loss, tokens=1,
        sent_bytes=sent,
    )  # fmt: skip
    assert IterationSample.model_validate_json(sample.model_dump_json()) == sample


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


@pytest.mark.parametrize("damage", ["{", "null", '{"event": "started"}', "\x00\x00"])
def test_a_damaged_whole_line_is_named_with_its_number(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "events.jsonl"
    append(path, event(0))
    path.write_text(path.read_text() + damage + "\n")
    with pytest.raises(ConfigError, match=r"events\.jsonl, line 2 is damaged: not a EventSample"):
        list(read_samples(path, EventSample))


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, 0, None, "1"])
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
