"""The working folder and the signals of a shell: files there stand in for no module, and nohup is heeded."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.mounts import tmpfs
from tests.support.runs import TINY, LiveRun, assert_ok
from tests.support.sources import ROOT, sources

SHADOWS = ("queue", "random", "json", "torch", "socket", "select", "tempfile", "xxhash", "pydantic", "ctypes")
MODULE = (sys.executable, "-m", "capricorn")
"""Which puts the working folder first on the path of imports, as the installed command does not."""


@pytest.fixture
def shadowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with files named like modules; none of them may ever be run."""
    (folder := tmp_path / "work").mkdir()
    for name in SHADOWS:
        (folder / f"{name}.py").write_text(f"raise ImportError('the user\\'s own {name}.py was imported')\n")
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(
    "options",
    [
        ("--persist-every", "3"),
        pytest.param(("--set", "launch.restart=torchrun"), marks=pytest.mark.slow),
        pytest.param(("--system", "dcp-async", "--set", "system.options.mode=process"), marks=pytest.mark.slow),
        pytest.param(("--cluster", "p4d", "--model", "mixtral-8x7b"), marks=pytest.mark.slow),
    ],
    ids=lambda options: options[-1],
)
def test_a_run_imports_nothing_from_the_working_folder(
    options: tuple[str, ...], tmp_path: Path, shadowed: Path
) -> None:
    with LiveRun(tmp_path / "out", "--iterations", "6", "--warmup", "1", *options, program=MODULE) as live:
        ended = live.finish()
    # Whether links and ops were faithful, a busy machine decides.
    assert (ended.summary["iterations"], ended.summary["effective"]) == (6, 6)


@pytest.mark.parametrize("arguments", [("doctor",), ("list", "models"), ("run", *TINY, "--dry-run")])
@pytest.mark.parametrize("module", ["capricorn", "capricorn.cli"])
def test_python_m_imports_nothing_from_the_working_folder(
    module: str, arguments: tuple[str, ...], shadowed: Path
) -> None:
    for name in ("re", "typing", "enum", "functools", "dataclasses", "contextlib", "click", "rich"):
        (shadowed / f"{name}.py").write_text("raise SystemExit('shadowed')\n")

    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in done.stderr
    assert done.returncode == 0, done.stderr


def test_a_system_of_ones_own_is_found_in_the_working_folder_all_the_same(shadowed: Path) -> None:
    (shadowed / "my_system.py").write_text((ROOT / "examples" / "own_system.py").read_text())
    for name in ("my_system:OwnFiles", "my_system.py:OwnFiles"):
        command = [*MODULE[:2], "capricorn.cli", "run", *TINY, "--system", name, "--dry-run"]

        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr


def test_every_python_that_is_started_leaves_the_working_folder_out() -> None:
    """`sys.executable` stands in `process.PYTHON` alone: what starts a module otherwise would look there first."""
    using = {
        str(path)
        for path, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.executable"
    }
    assert using == {"capricorn/process.py"}


def test_a_run_under_nohup_goes_on_when_its_terminal_is_closed(tmp_path: Path) -> None:
    with LiveRun(tmp_path, "--iterations", "60", prefix=("nohup",)) as live:
        live.wait_iteration(5)
        for process in live.processes():
            os.kill(process.pid, signal.SIGHUP)
        assert_ok(live.finish())


@pytest.mark.slow
def test_a_background_job_of_a_shell_is_not_ended_by_a_ctrl_c(tmp_path: Path) -> None:
    shell = ("bash", "-c", 'trap "" INT; exec "$@"', "bash")
    with LiveRun(tmp_path, "--iterations", "60", prefix=shell) as live:
        live.wait_iteration(5)
        live.interrupt(signal.SIGINT)
        assert_ok(live.finish())


def test_a_full_disk_below_out_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with tmpfs("64K") as small:
        command = [*MODULE, "run", *TINY, "--out", str(small / "out")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert not any(small.iterdir())
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert f"--out {small / 'out'}" in done.stderr
