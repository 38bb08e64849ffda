"""Faults of one's own: from a file, a module or an installed package, wherever a kind of fault is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from capricorn.config.fault_kinds import check_kinds, kind_of, known_kinds
from capricorn.config.fault_spec import FaultSpec
from capricorn.config.fields import validate
from capricorn.errors import ConfigError
from capricorn.faults.applicability import why_not
from capricorn.faults.feasibility import check_faults
from capricorn.records.job_file import Job
from tests.cli.test_cli import cli
from tests.support.fault_jobs import TINY, make_job, with_faults
from tests.support.runs import assert_ok, faults, run

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_fault.py"
FREEZE = f"{EXAMPLE}:FREEZE"
MODULE = """
from capricorn.config.fault_kinds import FaultKind

def nothing(fault, context):
    pass

NOTHING = FaultKind("nothing happens", "rank", places={"here": (), "memory": ("memory copies",)}, inject=nothing)
NUMBER = 3
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An installed package with an entry point that works and one that is broken."""
    name = f"own_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    info = tmp_path / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[capricorn_bench.faults]\nnothing = {name}:NOTHING\nbroken = {name}:MISSING\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


# --- how they are named


def test_an_installed_kind_is_known_by_its_name(package: str) -> None:
    assert {"kill", "nothing"} <= set(known_kinds())
    assert str(FaultSpec.parse("nothing@rank=1,iteration=3")) == (
        "nothing@rank=1,iteration=3,op=before_update,where=here"
    )
    with pytest.raises(ConfigError, match="did you mean 'nothing'"):
        kind_of("nothin")


def test_a_kind_in_a_module_or_a_file_is_spelled_like_a_system(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert kind_of(f"{package}:NOTHING").what == kind_of(f"{package}.py:NOTHING").what == "nothing happens"
    fault = FaultSpec.parse(f"{package}.py:NOTHING@rank=1,iteration=3")
    assert fault.kind == f"{tmp_path / package}.py:NOTHING", "it means the same in the folder of a rank"
    assert FaultSpec.parse(str(fault)) == fault


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nowhere.py:KIND@rank=1,iteration=3", "nowhere.py:KIND': FileNotFoundError"),
        ("no.such.module:KIND@rank=1,iteration=3", "cannot load 'no.such.module:KIND': ModuleNotFoundError"),
        ("{package}:OTHER@rank=1,iteration=3", "has no 'OTHER'"),
        ("{package}:NUMBER@rank=1,iteration=3", "is no FaultKind with an inject="),
        ("broken@rank=1,iteration=3", "has no 'MISSING'"),
        ("nothing@iteration=3", "needs rank="),
        ("nothing@rank=1,iteration=3,seconds=2", "takes no seconds="),
        ("nothing@rank=1,iteration=3,where=there", "where=there is none of here, memory"),
    ],
)
def test_what_is_wrong_with_a_kind_of_ones_own_is_told_in_one_line(text: str, message: str, package: str) -> None:
    with pytest.raises(ConfigError) as raised:
        FaultSpec.parse(text.replace("{package}", package))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_record_that_names_a_kind_of_ones_own_is_read_without_running_it(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("raise SystemExit('it was run')")
    name = f"{tmp_path / 'own.py'}:KIND"
    read = FaultSpec.model_validate_json(json.dumps({"kind": name, "iteration": 3, "node": 0}))
    assert read.kind == name
    with pytest.raises(ConfigError, match="cannot load"):
        check_faults(with_faults().model_copy(update={"faults": (read,)}), tmp_path)


def test_kinds_are_looked_up_without_importing_torch() -> None:
    look_up = f"from capricorn.config.fault_kinds import kind_of; kind_of({FREEZE!r})"
    script = f"import sys; {look_up}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# --- where they are used


def test_what_a_kind_of_ones_own_needs_is_asked_for(package: str) -> None:
    files = TINY.model_copy(update={"system": TINY.system.model_copy(update={"name": "dcp"})})
    fault = FaultSpec.parse("nothing@rank=0,iteration=3,where=memory")
    assert "no copies in the memory store" in why_not(fault, files)
    assert why_not(fault, TINY) == why_not(FaultSpec.parse("nothing@rank=0,iteration=3"), files) == ""


def test_a_list_of_faults_has_the_installed_ones_and_what_is_broken(
    package: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli("list", "faults", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert {"kill", "nothing", "broken"} <= set(listed["faults"])
    assert listed["details"]["nothing"]["spelling"] == ("nothing@rank=K,iteration=I[,op=MOMENT][,where=here|memory]")
    assert "has no 'MISSING'" in listed["details"]["broken"]["what"]


def test_a_campaign_draws_kinds_of_ones_own_only_if_they_are_named(
    package: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "nothing" not in check_kinds([])
    own = f"nothing,{FREEZE}"
    assert cli("faults", "--device", "cpu", "--kinds", own, "--count", "2", "--repro", "--json") == 0
    repros = json.loads(capsys.readouterr().out)["repros"]
    assert any("nothing@rank=" in line for line in repros)
    assert any("own_fault.py:FREEZE@node=" in line and "seconds=" in line for line in repros)


def test_a_job_file_hands_a_kind_of_ones_own_on_to_the_ranks(tmp_path: Path) -> None:
    job = make_job(tmp_path, f"{FREEZE}@node=1,iteration=3")
    job.write()
    assert Job.read(tmp_path / "run" / "job.json").scenario.faults == job.scenario.faults


@pytest.mark.parametrize(
    "way", [(), pytest.param(("--set", "launch.restart=torchrun"), marks=pytest.mark.slow)], ids=["forked", "torchrun"]
)
def test_the_example_freezes_a_node_which_goes_on_without_a_restart(way: tuple[str, ...], tmp_path: Path) -> None:
    ended = run(tmp_path, "--iterations", "8", *way, *faults(f"{FREEZE}@node=1,iteration=4,seconds=0.3"))
    assert_ok(ended)
    assert ended.num_triggered == 1
    assert not ended.resumed


def test_a_kind_that_is_not_built_in_keeps_its_fields_in_a_record() -> None:
    values = {"kind": "not-installed", "iteration": 3, "rank": 1, "seconds": 2.0}
    assert validate(FaultSpec, values, "a record").seconds == 2.0
