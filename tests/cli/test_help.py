"""What --help says: options in groups, in two columns that fit the terminal, with examples that work."""

from __future__ import annotations

import json
import re
import shlex

import pytest
import rich_click as click
from capricorn.cli.main import COMMANDS, app, load_command
from capricorn.cli.options import GROUPS
from capricorn.cli.values import system_settings

from capricorn.config.setting_list import Setting
from tests.cli.test_cli import cli

GROUPED = ("run", "compare", "faults", "ablate", "doctor")


def printed_help(command: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    assert cli(command, "--help") == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", GROUPED)
@pytest.mark.parametrize("width", [60, 80])
def test_help_is_in_groups_and_fits_the_terminal(
    command: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed_help(command, width, monkeypatch, capsys)
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text
    headings = re.findall(r"^ (\w+) *$", text, re.MULTILINE)
    assert headings == [group for group in GROUPS if group in headings]
    assert len(headings) >= 5


@pytest.mark.parametrize("command", COMMANDS)
def test_no_option_is_without_help_and_no_default_is_broken(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed_help(command, 200, monkeypatch, capsys)
    for parameter in load_command(command).params:
        if isinstance(parameter, click.Option):
            assert parameter.help
            assert re.search(rf"{parameter.opts[-1]}\b.*  \S", text), parameter.name
    assert re.findall(r"\[default: *(?:None|\(.*|\"\")?\]", text) == []


@pytest.mark.parametrize("command", GROUPED)
def test_the_examples_in_the_help_are_understood(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = re.findall(
        rf"^ \$ capricorn-bench {command}(.*)$", printed_help(command, 200, monkeypatch, capsys), re.MULTILINE
    )
    assert len(examples) >= 2
    for example in examples:
        load_command(command).make_context(command, shlex.split(example))


@pytest.mark.parametrize(("setting", "systems"), system_settings(), ids=lambda value: getattr(value, "key", ""))
def test_every_option_of_a_system_is_described_and_listed_with_its_systems(
    setting: Setting, systems: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(setting.description.split()) >= 2
    assert cli("list", "settings", "--json") == 0
    listed = json.loads(capsys.readouterr().out)["details"][setting.key]
    assert listed["what"] == f"{setting.description} ({', '.join(systems)})"


def test_the_defaults_of_a_command_are_those_that_its_help_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "Do it all this many times [default: 3]" in printed_help("compare", 200, monkeypatch, capsys)
    assert "Train this many iterations [default: 12]" in printed_help("faults", 200, monkeypatch, capsys)


def test_every_command_is_listed_in_the_order_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli("--help") == 0
    text = capsys.readouterr().out
    places = [text.index(f"\n {name} ") for name in COMMANDS]
    assert places == sorted(places)
    assert list(app.commands) == list(COMMANDS)
    assert all(load_command(name).name == name for name in COMMANDS)
