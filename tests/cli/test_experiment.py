"""Files of comparisons: what they say, what goes before it, what is refused. Training is faked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from capricorn.cli.experiment import experiment_of
from capricorn.cli.main import load_command

from capricorn.compare.compare_record import PlannedComparison
from capricorn.errors import ConfigError
from tests.cli.test_cli import cli
from tests.support.comparisons import Systems, compared, folder_of


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Systems:
    return Systems.installed(monkeypatch)


def experiment(*arguments: str | Path) -> list[PlannedComparison]:
    """What the command would carry out."""
    asked = load_command("compare").make_context("compare", [str(each) for each in arguments])
    with asked:
        return experiment_of(asked, asked.params["file"]).comparisons


def write_toml(folder: Path, text: str) -> Path:
    path = folder / "experiment.toml"
    path.write_text(text)
    return path


TWO = """
systems = ["none", "capricorn", "gemini:gemini.mu=0.9"]
model = "mixtral-tiny"
iterations = 6
repeats = 2
set = ["system.every=2", "planner.spans=load", "planner.risk=0.2"]
keep_store = true
device = "cpu"

[[comparisons]]
label = "short"

[[comparisons]]
label = "long"
iterations = 9
ranks_per_node = 2
systems = "none, capricorn"
set = ["planner.risk=0.4"]
"""


def test_a_file_says_all_and_each_comparison_overrides_what_it_names(tmp_path: Path) -> None:
    short, long = experiment("--scenario", write_toml(tmp_path, TWO))
    assert [short.label, long.label] == ["short", "long"]
    assert [each.scenario.train.iterations for each in (short, long)] == [6, 9]
    assert [each.repeats for each in (short, long)] == [2, 2]
    assert [each.scenario.cluster.ranks_per_node for each in (short, long)] == [1, 2]
    assert [variant.label for variant in short.variants] == ["none", "capricorn", "gemini:gemini.mu=0.9"]
    assert [variant.label for variant in long.variants] == ["none", "capricorn"]
    assert [each.scenario.planner.risk for each in (short, long)] == [0.2, 0.4]
    assert {each.scenario.system.every for each in (short, long)} == {2}
    assert short.scenario.store.keep


def test_an_empty_list_of_settings_drops_those_that_all_share(tmp_path: Path) -> None:
    added, dropped = experiment(
        "--scenario", write_toml(tmp_path, TWO.replace('set = ["planner.risk=0.4"]', "set = []"))
    )
    assert (added.scenario.system.every, dropped.scenario.system.every) == (2, 1)


def test_the_command_line_goes_before_the_file(tmp_path: Path) -> None:
    file = write_toml(tmp_path, TWO)
    more = ("--iterations", "7", "--set", "planner.risk=0.6", "--repeats", "1", "--systems", "capricorn")
    for planned in experiment("--scenario", file, *more):
        assert planned.scenario.train.iterations == 7
        assert (planned.scenario.planner.risk, planned.scenario.system.every) == (0.6, 2)
        assert (planned.repeats, len(planned.runs)) == (1, 1)


def test_what_all_comparisons_share_is_to_have_an_effect_in_one_of_them_and_what_one_has_in_that_one(
    tmp_path: Path,
) -> None:
    experiment("--scenario", write_toml(tmp_path, TWO + "persist_every = 2"))
    ours = TWO.replace("none, capricorn", "none") + "keep_store = 1"
    for text in ("persist_every = 2\nsystems = ['none', 'dcp']", ours):
        with pytest.raises(ConfigError, match="has no effect under none"):
            experiment("--scenario", write_toml(tmp_path, text))


def test_without_comparisons_a_file_is_one_and_defaults_are_those_of_the_command(tmp_path: Path) -> None:
    (planned,) = experiment("--scenario", write_toml(tmp_path, 'systems = ["none"]'))
    assert (planned.label, planned.scenario.model.name, planned.repeats) == ("", "mixtral-small", 3)
    (planned,) = experiment("--systems", "none, capricorn")
    assert [variant.label for variant in planned.variants] == ["none", "capricorn"]


def test_several_comparisons_run_one_after_the_other_and_each_has_a_table(
    launcher: Systems, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = write_toml(tmp_path, TWO + f'[[comparisons]]\nlabel = "again"\nsystems = ["none"]\n\n# {tmp_path}')
    report = compared(capsys, "compare", "--scenario", file, "--out", tmp_path / "out")
    assert report["valid"]
    assert [each["label"] for each in report["comparisons"]] == ["short", "long", "again"]
    assert all(each.keys() >= {"mode", "valid", "rows", "runs", "label"} for each in report["comparisons"])
    assert report["runs"] == [run for each in report["comparisons"] for run in each["runs"]]
    assert launcher.order[:6] == ["none", "capricorn", "gemini", "gemini", "capricorn", "none"]
    assert launcher.order[6:] == ["none", "capricorn", "capricorn", "none", "none", "none"]
    assert cli("compare", folder_of(tmp_path / "out")) == 0
    printed = capsys.readouterr().out
    assert re.findall(r"^(\w+), live: mixtral-tiny", printed, re.MULTILINE) == ["short", "long", "again"]


def test_a_file_may_say_where_results_go(launcher: Systems, tmp_path: Path) -> None:
    text = f'model = "mixtral-tiny"\nsystems = ["none"]\nrepeats = 1\niterations = 2\nout = "{tmp_path}/there"'
    assert cli("compare", "--scenario", write_toml(tmp_path, text), "-q") == 0
    assert folder_of(tmp_path / "there")


FILES = [
    ("iteration = 3", "unknown key 'iteration'; did you mean 'iterations'?"),
    ("json = true", "unknown key 'json'"),
    ("system = 'none'", "unknown key 'system'; did you mean 'systems'?"),
    ("iterations = 'x'", "iterations = 'x': 'x' is not a whole number, 1 or more"),
    ("iterations = 0", "iterations = 0: '0' is not a whole number, 1 or more"),
    ("iterations = true", "iterations = True: 'True' is not a whole number, 1 or more"),
    ("iterations = [3]", "iterations takes one value, not [3]"),
    ("systems = ['none', 'capricron']", "did you mean 'capricorn'?"),
    ("systems = []", "--systems names no system"),
    ("set = ['sytem.every=1']", "did you mean 'system.every'?"),
    ("model = 'mixtral-smal'", "did you mean 'mixtral-small'?"),
    ("model = ", "is not TOML"),
    ("comparisons = 3", "comparisons is no list of tables"),
    ("comparisons = []", "comparisons is no list of tables"),
    ("[[comparisons]]\nlabel = 3", "label = 3 is no text"),
    ("[[comparisons]]\nout = 'x'", "unknown key 'out'"),
    ("[[comparisons]]\nlabel = 'x'\nmodel = 'y'", "experiment.toml, 'x': unknown model 'y'"),
    ("[[comparisons]]\n[[comparisons]]\nset = ['a=1']", "experiment.toml, comparison 2: --set 'a=1'"),
    ("[[comparisons]]\nrepeats = 0", "repeats = 0: '0' is not a whole number"),
    ("[comparisons]\nlabel = 'x'", "comparisons is no list of tables"),
]


@pytest.mark.parametrize(("text", "message"), FILES, ids=[text for text, _ in FILES])
def test_a_mistake_in_the_file_is_one_line(
    text: str, message: str, launcher: Systems, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli("compare", "--scenario", write_toml(tmp_path, text)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert launcher.num_runs == 0
