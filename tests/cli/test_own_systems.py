"""Systems from outside the project, by path, by module and installed, in every command that names a system."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.sources import ROOT

CAPRICORN = [sys.executable, "-m", "capricorn"]
TINY = ("--model", "mixtral-tiny", "--iterations", "8", "--warmup", "0", "--seed", "3")
MAX_EXAMPLE_LINES = 45


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder of a user, with a system in a module, and a package that installs it."""
    (tmp_path / "my_systems.py").write_text((ROOT / "examples/own_files.py").read_text())
    installed = tmp_path / "site/my_systems-1.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: my-systems\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[capricorn_bench.systems]\nraw = my_systems:RawFiles\n")
    return tmp_path


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{folder / 'site'}{os.pathsep}{folder}"}
    return subprocess.run(
        [*CAPRICORN, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False
    )


def printed(done: subprocess.CompletedProcess[str], code: int = 0) -> dict[str, object]:
    assert done.returncode == code, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    "name",
    [
        "raw",
        *(pytest.param(f"{where}:RawFiles", marks=pytest.mark.slow) for where in ("./my_systems.py", "my_systems")),
    ],
)
def test_an_own_system_runs_and_recovers_by_path_by_module_and_installed(outside: Path, name: str) -> None:
    words = ("run", *TINY, "--system", name, "--fault", "kill@rank=1,iteration=5", "--json")
    record = printed(command(outside, *words))
    summary = record["summary"]
    assert isinstance(summary, dict)
    assert record["verdict"] == "ok"
    assert (summary["requested"], summary["effective"]) == (8, 8)
    assert record["system"] == ("raw" if name == "raw" else "RawFiles")


@pytest.mark.slow
def test_ranks_that_torchrun_starts_find_it_too(outside: Path) -> None:
    words = ("run", *TINY, "--system", "my_systems.py:RawFiles", "--set", "launch.restart=torchrun", "--json")
    assert printed(command(outside, *words))["verdict"] == "ok"


def test_its_options_are_those_of_its_model_and_a_dry_run_counts_its_files(outside: Path) -> None:
    words = ("run", *TINY, "--system", "my_systems.py:RawFiles", "--dry-run", "--json")
    on_disk = printed(command(outside, *words))
    in_memory = printed(command(outside, *words, "--set", "system.options.medium=tmpfs"))
    assert [each["needs"]["store_bytes"] > 0 for each in (on_disk, in_memory)] == [False, True]  # type: ignore[index]
    wrong = command(outside, *words, "--set", "system.options.mediun=tmpfs")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert "did you mean 'medium'" in wrong.stderr


def test_it_is_compared_under_its_short_name_and_its_record_is_read_where_it_is_gone(outside: Path) -> None:
    systems = "none,my_systems.py:RawFiles,my_systems.py:RawFiles:keep=3"
    report = printed(command(outside, "compare", *TINY, "--systems", systems, "--repeats", "1", "--json"))
    rows = report["rows"]
    assert isinstance(rows, list)
    assert [row["label"] for row in rows] == ["none", "RawFiles", "RawFiles:keep=3"]
    assert rows[1]["tiers"] == ["persistent"]
    (outside / "my_systems.py").write_text("raise SystemExit('was run')")
    folder = next((outside / "results").glob("*-compare-*"))
    for words, says in (("export", "RawFiles:keep=3"), ("compare", "RawFiles a: keep=3")):
        done = command(outside, words, str(folder))
        assert done.returncode == 0, done.stderr
        assert says in done.stdout
        assert "was run" not in done.stderr


@pytest.mark.slow
def test_a_campaign_judges_it_and_prints_commands_that_mean_the_same_everywhere(outside: Path) -> None:
    words = ("faults", "--model", "mixtral-tiny", "--systems", "my_systems.py:RawFiles", "--count", "6", "--json")
    report = printed(command(outside, *words))
    cases = report["cases"]
    assert isinstance(cases, list)
    assert {case["verdict"] for case in cases} == {"PASS"}
    assert all(f"--systems {outside}/my_systems.py:RawFiles" in case["repro"] for case in cases)


def test_a_planner_of_ones_own_is_asked(tmp_path: Path) -> None:
    words = ("run", "--model", "mixtral-tiny", "--iterations", "16", "--warmup", "0", "--json")
    own = ("--system", f"{ROOT}/examples/own_planner.py:Refill", "--set", "system.options.interval=5")
    summary = printed(command(tmp_path, *words, *own))["summary"]
    assert isinstance(summary, dict)
    assert summary["effective"] == 16
    assert summary["profiled_frac"] > 0.1


@pytest.mark.parametrize("name", ["own_files", "own_planner", "own_system"])
def test_the_document_shows_each_example_as_it_is_and_short(name: str) -> None:
    code = re.sub(r'^""".*?"""\n+', "", (ROOT / f"examples/{name}.py").read_text(), flags=re.DOTALL).rstrip()
    assert f"```python\n{code}\n```" in (ROOT / "docs/own-system.md").read_text()
    assert len(code.splitlines()) <= MAX_EXAMPLE_LINES
