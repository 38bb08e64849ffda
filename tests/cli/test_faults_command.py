"""The command `faults`: what it refuses, what it runs and writes, how it is interrupted and gone on with."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from capricorn.campaign.campaign_record import read_campaign
from tests.cli.test_cli import cli
from tests.support.runs import PROGRAM, Done, command, polls

DEVICE = ("--device", "cpu")


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """Three failures of Capricorn, two of them drawn alike, in a pipe."""
    out = tmp_path_factory.mktemp("campaign")
    return out, command("faults", *DEVICE, "--kinds", "kill,kill-all,node-loss", "--count", "3", "--out", out)


def folder_of(out: Path) -> Path:
    (folder,) = out.glob("*-faults-*")
    return folder


# --- a campaign


def test_a_pipe_gets_a_line_for_each_case_and_the_tables(campaign: tuple[Path, Done]) -> None:
    out, done = campaign
    assert done.exit_code in (0, 1), done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "capricorn without a failure: ok"
    assert [line.partition(": ")[0] for line in lines[1:4]] == [f"case {n} of 3" for n in (1, 2, 3)]
    assert "\x1b" not in done.stdout
    assert "recovery, live, in seconds" in lines
    assert lines[-1] == str(folder_of(out))


def test_every_case_goes_on_exactly_as_without_a_failure(campaign: tuple[Path, Done]) -> None:
    record = read_campaign(folder_of(campaign[0]))
    verdicts = {case.judgement.verdict for case in record.cases if case.judgement is not None}
    # How much is done again depends on how fast the machine replicates; that it is exact does not.
    assert verdicts <= {"PASS", "LOST_WORK"}
    assert {case.fault.kind for case in record.cases} == {"kill", "kill-all", "node-loss"}


def test_folders_of_runs_that_passed_are_removed_and_a_report_is_left(campaign: tuple[Path, Done]) -> None:
    folder = folder_of(campaign[0])
    record = read_campaign(folder)
    passed = {case.judgement.run_id for case in record.cases if case.judgement and case.judgement.verdict == "PASS"}
    assert not [run for run in passed if (folder.parent / run).exists()]
    report = (folder / "report.md").read_text()
    assert report.startswith(f"# Campaign {record.campaign_id}\n")
    assert "| kill-all | 1 PASS |" in report


def test_a_campaign_that_is_whole_is_only_shown_again(campaign: tuple[Path, Done]) -> None:
    folder = folder_of(campaign[0])
    done = command("faults", "--resume", folder, "--json")
    assert set(done.json) >= {"counts", "cases"}
    assert sum(done.json["counts"].values()) == 3
    assert set(done.json["cases"][0]) >= {"system", "fault", "verdict", "lost_iterations", "recovery_s", "repro"}


def test_the_command_that_repeats_a_case_makes_the_same_case(campaign: tuple[Path, Done]) -> None:
    case = read_campaign(folder_of(campaign[0])).cases[0]
    words = shlex.split(case.repro)
    assert words[0] == "capricorn-bench"
    again = command(*words[1:], "--repro", "--json")
    assert again.json == {"repros": [case.repro]}


@pytest.mark.slow
def test_cases_that_are_missing_are_run_and_no_others(campaign: tuple[Path, Done], tmp_path: Path) -> None:
    folder = folder_of(campaign[0])
    record = read_campaign(folder)
    cut = record.with_case(record.cases[1].model_copy(update={"judgement": None}))
    (tmp_path / folder.name).mkdir()
    (tmp_path / folder.name / "campaign.json").write_text(cut.model_dump_json())
    done = command("faults", "--resume", tmp_path / folder.name)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("case ", "capricorn without"))]
    assert [line.partition(":")[0] for line in lines] == ["case 2 of 3"]
    after = read_campaign(tmp_path / folder.name)
    assert after.cases[0] == record.cases[0]
    assert after.cases[1].judgement is not None


def test_ctrl_c_keeps_what_is_done_and_leaves_nothing(tmp_path: Path) -> None:
    arguments = ["faults", *DEVICE, "--kinds", "kill", "--count", "50", "--out", str(tmp_path)]
    with (tmp_path / "stdout").open("w+") as stdout:
        process = subprocess.Popen(
            [*PROGRAM, *arguments], stdout=stdout, stderr=subprocess.PIPE, start_new_session=True
        )
        try:
            for _ in polls(60.0):
                if "case 1 of 50" in (tmp_path / "stdout").read_text():
                    break
            os.killpg(process.pid, signal.SIGINT)
            _, stderr = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert stderr.decode().strip() == "interrupted"
    record = read_campaign(folder_of(tmp_path))
    assert 1 <= sum(case.judgement is not None for case in record.cases) < 50
    assert "go on with: capricorn-bench faults --resume" in (tmp_path / "stdout").read_text()
    assert not [path for path in Path("/dev/shm").glob("capricorn-*") if any(tmp_path.glob(path.name[10:]))]


# --- what is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kinds", "kil"], "unknown fault 'kil'; did you mean 'kill'?"),
        (["--systems", "caprcorn"], "unknown system 'caprcorn'; did you mean 'capricorn'?"),
        (["--fault", "kill@rank=7,iteration=3"], "names rank 7 of 2"),
        (["--fault", "kill@rank=1,iteration=99"], "comes after the last iteration, 12"),
        (["--iterations", "3"], "--iterations 3 is too short for failures to be drawn; use 4 or more"),
        (["--mtbf", "soon"], "--mtbf 'soon' is no time; write it as in 30s, 5min or 1h"),
        (["--mtbf", "0.0000001s"], "--mtbf '0.0000001s' is no time"),
        (["--mtbf", "5s", "--node-loss-frac", "nan"], "'nan' is not a finite number"),
        (["--mtbf", "5s", "--count", "3"], "--count is for single cases"),
        (["--case", "99"], "--case 99: there is none; they go from 0 to 15"),
        (["--systems", "none", "--kinds", "corrupt"], "none of these failures can happen here: none keeps no copies"),
        (["--resume", "/nowhere", "--count", "3"], "--count contradicts --resume"),
        (["--shapes", "2by1"], "--shapes '2by1' is no shape; write nodes x ranks of each, as in 2x1,3x1"),
        (["--shapes", "2x0"], "--shapes '2x0' is no shape"),
        (["--shapes", "2x1,1x1"], "--shapes 1x1: --replicas 2 needs as many nodes, there are 1"),
        (["--shapes", "2x1", "--nodes", "3"], "--nodes does not go with --shapes, which says"),
        (["--shapes", "2x1", "--fault", "kill-all@iteration=3"], "--fault does not go with --shapes"),
        (["--shapes", "2x1", "--mtbf", "5s"], "--shapes is for single cases"),
        (["--fault", "pause@iteration=3,seconds=0"], "nobody would be there to end it; use seconds=S"),
        (["--fault", "clock-jump@rank=1,iteration=3,where=up"], "where=up is none of ahead, back"),
    ],
)
def test_a_mistake_is_told_in_one_line_before_anything_is_written(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = [] if "--resume" in arguments else ["--out", str(tmp_path / "out")]
    assert cli("faults", *DEVICE, *arguments, *out) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_repro_prints_the_commands_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli("faults", *DEVICE, "--kinds", "kill", "--count", "3", "--seed", "7", "--out", tmp_path, "--repro") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all(
        line.startswith("capricorn-bench faults --model mixtral-tiny --iterations 12 --seed 7") for line in lines
    )
    assert not list(tmp_path.iterdir())
    assert cli("faults", *DEVICE, "--kinds", "kill", "--seed", "7", "--case", "1", "--repro", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"repros": [lines[1]]}
