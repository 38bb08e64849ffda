"""The command check-system: what it prints, how it ends, and that nothing is left of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from capricorn.cli.main import main

from capricorn.conformance.rules import RULES
from capricorn.conformance.traces import files_in
from tests.support.processes import children_of, command_of
from tests.support.runs import PROGRAM, command, polls
from tests.support.sources import ROOT

OWN = f"{ROOT}/examples/own_system.py:OwnFiles"


def test_the_example_of_an_own_system_keeps_every_rule() -> None:
    done = command("check-system", OWN, "--timeout", "3", "--json")
    found = json.loads(done.stdout)
    assert [row for row in found["rows"] if row["verdict"] != "PASS"] == []
    assert [row["rule"] for row in found["rows"]] == [rule.name for rule in RULES]
    assert (found["system"], found["ok"], done.exit_code) == (OWN, True, 0)


def test_a_broken_system_ends_with_exit_code_1_and_a_line_that_says_why() -> None:
    file = ROOT / "tests" / "conformance" / "broken_systems.py"
    with_path = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from capricorn.cli.main import main; main()"
    arguments = ["check-system", f"{file}:StateChanged", "--rules", "no-change,nothing-yet"]
    done = subprocess.run([PROGRAM[0], "-c", with_path, *arguments], capture_output=True, text=True, check=False)
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    assert done.returncode == 1, done.stderr
    assert lines[0][:2] == ["PASS", "nothing-yet"]
    assert lines[1][:2] == ["FAIL", "no-change"]
    assert "saving changed odd" in lines[1][2]
    assert lines[2] == ["1", "of", "2 rules do not hold"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["capricron"], "did you mean 'capricorn'?"),
        (["capricorn", "--rules", "kil"], "did you mean 'kill'?"),
        (["no.such:System"], "no.such:System"),
        (["capricorn", "--without", "float9"], "did you mean 'float8'?"),
        (["capricorn", "--timeout", "0"], "--timeout"),
        (["capricorn", "--set", "train.seed=1"], "system.options.KEY=VALUE"),
        (["dcp", "--set", "system.options.threads=none"], "threads"),
        (["capricorn", "--set", "system.options.threads=2"], "no options"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["check-system", *arguments])
    said = capsys.readouterr()
    assert raised.value.code == 2
    assert complaint in said.err
    assert said.err.count("\n") == 1
    assert not said.out


def test_an_interrupt_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*PROGRAM, "check-system", "capricorn"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        start_new_session=True,
    ) as process:
        for _ in polls(60.0):
            if len(children_of(process.pid)) >= 3:  # the server and two ranks
                break
        children = children_of(process.pid)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60.0)
    assert process.returncode == 130, stderr
    assert len(children) >= 3
    assert not any(map(command_of, children))
    assert files_in(tmp_path) == []
