"""What ranks of another machine write comes to the folder of machine 0 as it is, in order and once."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capricorn.errors import TransportError
from capricorn.machines import record_stream
from capricorn.machines.control_messages import FileGrew
from capricorn.machines.record_stream import RecordReader, append_to

LINE = st.tuples(st.sampled_from(["events.jsonl", "log/node1.log"]), st.text("aé\n", max_size=9))


@given(writes=st.lists(LINE, max_size=30), cut=st.integers(0, 30), piece_bytes=st.integers(4, 9))
def test_whatever_is_appended_arrives_as_it_is(writes: list[tuple[str, str]], cut: int, piece_bytes: int) -> None:
    with TemporaryDirectory() as here, TemporaryDirectory() as there, pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_stream, "MAX_PIECE_BYTES", piece_bytes)
        reader, written = RecordReader(Path(here)), dict[str, str]()
        for number, (name, text) in enumerate(writes):
            path = Path(here) / name
            path.parent.mkdir(exist_ok=True)
            with path.open("a") as file:
                file.write(text)
            written[name] = written.get(name, "") + text
            if number == cut:
                for grown in reader.grown():
                    append_to(Path(there), grown)
        for grown in reader.grown(is_last=True):
            append_to(Path(there), grown)
        assert {name: (Path(there) / name).read_text() for name in written} == written


def test_a_line_waits_for_its_end_and_marks_and_reasons_come_at_once(tmp_path: Path) -> None:
    reader = RecordReader(tmp_path)
    (tmp_path / "events.jsonl").write_text('{"event": 1}\n{"eve')
    (tmp_path / "fatal.json").write_text('{"why": "so"}')
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / "0").touch()
    found = {grown.name: grown.text for grown in reader.grown()}
    assert found == {"events.jsonl": '{"event": 1}\n', "fatal.json": '{"why": "so"}', "faults/0": ""}
    assert not list(reader.grown())


def test_of_the_reasons_of_several_machines_to_stop_the_first_counts(tmp_path: Path) -> None:
    for why in ("first", "second"):
        append_to(tmp_path, FileGrew(name="fatal.json", text=json.dumps({"why": why})))
    assert json.loads((tmp_path / "fatal.json").read_text()) == {"why": "first"}


def test_what_concerns_the_processes_of_a_machine_stays_there(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text("{}")
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "rank0").write_text("1\n")
    (tmp_path / "fatal.json.tmp").write_text("{")
    assert not list(RecordReader(tmp_path).grown(is_last=True))


@pytest.mark.parametrize("name", ["../events.jsonl", "/etc/hosts", "log/../../x", "job.json", "workers/rank0", ""])
def test_a_name_that_leads_out_of_the_run_or_to_what_is_not_carried_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="none of the run"):
        append_to(tmp_path / "run", FileGrew(name=name, text="x"))
    assert not list(tmp_path.iterdir())
