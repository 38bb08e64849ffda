"""What is printed where nothing can be printed, and what libraries print: a line or nothing, and a right exit code."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
from capricorn.cli.streams import hushed

from capricorn.errors import ConfigError, note_once
from tests.support.recorded import write_run_folder
from tests.support.runs import PROGRAM

PRINTING = (["list", "--json"], ["run", "--help"], ["export", "RUN"], ["compare", "RUN", "RUN2"])
WRONG = ["list", "nothing"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("printed")
    for name, system in (("RUN", "capricorn"), ("RUN2", "none")):
        write_run_folder(root / name, system)
    return root


def in_shell(folder: Path, arguments: Sequence[str], ending: str) -> subprocess.CompletedProcess[str]:
    """Runs the command with streams that are changed by the end of a line of shell."""
    script = f'set -o pipefail; "$@" {ending}'
    return subprocess.run(
        ["bash", "-c", script, "bash", *PROGRAM, *arguments],
        cwd=folder, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("arguments", PRINTING, ids=" ".join)
def test_a_stdout_that_is_full_is_one_line(folder: Path, arguments: Sequence[str]) -> None:
    done = in_shell(folder, arguments, "> /dev/full")
    assert (done.returncode, done.stderr) == (1, "error: cannot write to stdout: No space left on device\n")


@pytest.mark.parametrize("ending", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_stdout_that_is_closed_is_nowhere(folder: Path, ending: str) -> None:
    done = in_shell(folder, ["list", "models"], ending)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_reader_that_has_gone_ends_it_quietly(folder: Path) -> None:
    for arguments in (["list", "settings"], ["list", "--json"]):
        done = in_shell(folder, arguments, "| true")
        assert (done.stdout, done.stderr) == ("", "")
        assert done.returncode in (0, 1)  # all may have been written before the reader went


@pytest.mark.parametrize("ending", ["2> /dev/full", "2>&-", "> /dev/full 2> /dev/full"])
def test_an_error_that_cannot_be_told_still_has_its_exit_code(folder: Path, ending: str) -> None:
    done = in_shell(folder, WRONG, ending)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_a_descriptor_that_was_closed_is_no_file_of_ours(folder: Path) -> None:
    code = "from capricorn.cli.streams import own_streams; own_streams(); import os; print(os.open('x', 65))"
    done = subprocess.run(
        ["bash", "-c", '"$@" <&- 2>&-', "bash", sys.executable, "-c", code], cwd=folder, capture_output=True, check=True
    )
    assert int(done.stdout) > 2


def test_warnings_and_log_lines_of_libraries_are_not_shown(folder: Path) -> None:
    code = (
        "import logging, warnings; from capricorn.cli.streams import hush_libraries; hush_libraries();"
        "warnings.warn('old', DeprecationWarning); warnings.warn('odd'); logging.getLogger('lib').warning('hm');"
        "logging.getLogger('lib').exception('oh')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")


def chatter() -> None:
    """Prints as a library does: by hand, by descriptor, from a process, as a warning and as a log line."""
    print("chatter")
    print("chatter", file=sys.stderr)
    os.write(1, b"chatter\n")
    os.write(2, b"chatter\n")
    subprocess.run(["sh", "-c", "echo chatter; echo chatter >&2"], check=True)
    warnings.warn("chatter", stacklevel=1)
    logging.getLogger("library").warning("chatter")


def fail_loudly(error: Exception) -> None:
    chatter()
    raise error


@pytest.mark.filterwarnings("always")
def test_what_a_library_prints_is_not_shown(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with hushed():
        chatter()
        note_once(f"{tmp_path}: ours")
    print("after")
    assert capfd.readouterr() == ("after\n", f"note: {tmp_path}: ours\n")


def test_a_mistake_of_the_user_is_told_without_what_a_library_printed(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="wrong"), hushed():
        fail_loudly(ConfigError("wrong"))
    assert capfd.readouterr() == ("", "")


@pytest.mark.filterwarnings("always")
def test_an_error_that_nobody_expected_is_told_with_what_was_printed(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), hushed():
        fail_loudly(KeyError("unexpected"))
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.count("chatter") >= 6


NOISY = """
import logging, os, sys, warnings
print("noise"); os.write(2, b"noise\\n"); warnings.warn("noise", DeprecationWarning); logging.error("noise")
import traceback
try:
    1 / 0
except ZeroDivisionError:
    traceback.print_exc()
"""


def test_an_export_is_as_quiet_as_its_libraries_are_loud(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"""
import importlib.abc, sys
class Loud(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in ('jinja2', 'matplotlib'):
            exec({NOISY!r})
sys.meta_path.insert(0, Loud())
""")
    done = subprocess.run(
        [*PROGRAM, "export", str(folder / "RUN"), "--out", str(tmp_path / "page.html")],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"wrote {tmp_path / 'page.html'}\n"
