"""What is no file where a file should be: every command says so in one line, and waits for nobody."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from capricorn.records.samples import EVENTS, ITERATIONS, LOADS, OPS, RECOVERIES, RUN
from capricorn.stats.run_summary import STORE
from tests.cli.test_cli import cli
from tests.support.recorded import write_run_folder
from tests.support.small_files import NOT_FILES

TINY = ("--model", "mixtral-tiny", "--iterations", "3", "--warmup", "1", "--nodes", "2", "--device", "cpu")
OWN_FAULT = "@rank=1,iteration=2"

NAMED: dict[str, Callable[[Path], list[str | Path]]] = {
    "export": lambda path: ["export", path],
    "inspect": lambda path: ["inspect", path],
    "compare": lambda path: ["compare", path, path],
    "compare --scenario": lambda path: ["compare", "--scenario", path],
    "compare --resume": lambda path: ["compare", "--resume", path],
    "faults --resume": lambda path: ["faults", "--resume", path],
    "run --model": lambda path: ["run", "--dry-run", "--model", path.with_suffix(".toml")],
    "run --cluster": lambda path: ["run", "--dry-run", "--cluster", path.with_suffix(".toml")],
    "run --loads": lambda path: ["run", "--dry-run", *TINY, "--loads", path.with_suffix(".npz")],
    "run --system": lambda path: ["run", "--dry-run", *TINY, "--system", f"{path.with_suffix('.py')}:Own"],
    "run --fault": lambda path: ["run", "--dry-run", *TINY, "--fault", f"{path.with_suffix('.py')}:Own{OWN_FAULT}"],
    "doctor --model": lambda path: ["doctor", "--model", path.with_suffix(".toml")],
    "ablate --trace": lambda path: ["ablate", "--trace", path.with_suffix(".npz")],
    "export --out": lambda path: ["export", "RUN", "--format", "md", "--out", path],
    "export --trace": lambda path: ["export", "RUN", "--trace", path],
}


def no_files(kind: str, folder: Path) -> Path:
    """Puts something that is no file at that path, also under the suffixes that options ask for."""
    for suffix in ("", ".toml", ".npz", ".py"):
        NOT_FILES[kind](folder / f"it{suffix}")
    return folder / "it"


@pytest.mark.parametrize("kind", NOT_FILES)
@pytest.mark.parametrize("command", NAMED)
def test_what_is_no_file_is_refused_in_one_line(
    command: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run_folder(tmp_path / "RUN")
    assert cli(*NAMED[command](no_files(kind, tmp_path))) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "it" in line


INSIDE = (RUN, ITERATIONS, EVENTS, RECOVERIES, STORE)


@pytest.mark.parametrize("kind", NOT_FILES)
@pytest.mark.parametrize("name", INSIDE)
def test_what_is_no_file_in_the_folder_of_a_run_is_named(
    name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run_folder(tmp_path / "run")
    (run / name).unlink(missing_ok=True)
    NOT_FILES[kind](run / name)
    for command in ("export", "compare", "inspect") if name in (RUN, RECOVERIES) else ("export", "compare"):
        assert cli(command, run) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert str(run / name) in line


@pytest.mark.parametrize("kind", NOT_FILES)
@pytest.mark.parametrize("name", [OPS, LOADS])
def test_what_is_no_file_under_a_figure_is_named(
    name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run_folder(tmp_path / "run")
    (run / name).unlink()
    NOT_FILES[kind](run / name)
    assert cli("export", run, "--out", tmp_path / "page.html") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(run / name) in line
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("kind", NOT_FILES)
@pytest.mark.parametrize("name", ["job.json", "compare.json", "campaign.json"])
def test_what_is_no_file_where_a_record_should_be_is_named(
    name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    NOT_FILES[kind](tmp_path / name)
    command = {
        "job.json": ["inspect", tmp_path], "compare.json": ["export", tmp_path],
        "campaign.json": ["faults", "--resume", tmp_path],
    }[name]  # fmt: skip
    assert cli(*command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / name) in line
