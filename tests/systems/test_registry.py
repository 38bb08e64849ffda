"""The registry: one entry for each system that agrees with its class, and the door for systems from outside."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
from capricorn.baselines.file_checkpoints import FileCheckpoints

from capricorn.config.own_code import absolute
from capricorn.errors import ConfigError
from capricorn.runtime.replicating_system import ReplicatingSystem
from capricorn.systems import registry
from capricorn.systems.registry import SYSTEMS, find, known, load_system, short_name

INSTALLED = [name for name, entry in SYSTEMS.items() if entry.is_installed]

OWN = """
'''Systems of one's own.'''
from pydantic import BaseModel
from capricorn import CheckpointSystem, FileCheckpoints, Library, ReplicatingSystem

class Options(BaseModel):
    depth: int = 3

class Files(Library):
    def write(self, folder):
        return []
    def load(self, folder):
        pass

class Filing(FileCheckpoints):
    '''Puts it into files.

    And more.
    '''
    library = Files

class Replicating(ReplicatingSystem):
    settings = Options
    profiles_first = True

class Half(CheckpointSystem):
    pass

class Other:
    pass
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return file


# --- built in


@pytest.mark.parametrize("name", INSTALLED)
def test_what_an_entry_says_is_what_its_class_says(name: str) -> None:
    entry, system = SYSTEMS[name], load_system(name)
    assert entry.kind == system.kind
    assert entry.profiles_first == system.profiles_first
    assert entry.settings_model() == system.settings
    assert entry.replicates == issubclass(system, ReplicatingSystem)
    assert entry.writes_files == issubclass(system, FileCheckpoints)
    if system.survives is not None:
        assert entry.survives == system.survives


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_setting_that_is_tuned_exists(name: str) -> None:
    entry, model = SYSTEMS[name], SYSTEMS[name].settings_model()
    if entry.tunes:
        assert model is not None
        assert {entry.tunes, "tuned_in"} <= model.model_fields.keys()
    if entry.profiles_first:
        assert model is not None
        assert "profile_iterations" in model.model_fields


# --- from outside


def test_a_system_in_a_file_is_described_by_its_class(own: Path) -> None:
    filing, replicating = find(f"{own}:Filing"), find(f"{own}:Replicating")
    assert (filing.kind, filing.tiers, filing.what) == ("files", ("persistent",), "Puts it into files.")
    assert (replicating.kind, replicating.tiers, replicating.profiles_first) == ("replicates", ("local", "peer"), True)
    model = replicating.settings_model()
    assert model is not None
    assert list(model.model_fields) == ["depth"]
    assert filing.label == "Filing"
    assert load_system(f"{own}:Filing").__name__ == "Filing"


def test_a_system_in_a_module_beside_the_command_is_found(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "a_package_of_mine"
    package.mkdir()
    own.rename(package / "systems.py")
    monkeypatch.chdir(tmp_path)
    assert find("a_package_of_mine.systems:Filing").kind == "files"


def test_an_installed_system_has_a_name_of_its_own(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(own.parent))
    points = [
        metadata.EntryPoint("filing", "own:Filing", registry.ENTRY_POINTS),
        metadata.EntryPoint("broken", "nowhere:Filing", registry.ENTRY_POINTS),
        metadata.EntryPoint("capricorn", "own:Filing", registry.ENTRY_POINTS),
    ]
    monkeypatch.setattr(registry, "installed", lambda group: {point.name: point for point in points})
    registry._entry_points.cache_clear()
    registry.find.cache_clear()
    try:
        assert find("filing").target == "own:Filing"
        assert find("capricorn") is SYSTEMS["capricorn"], "a built-in name cannot be taken"
        assert known().keys() - SYSTEMS.keys() == {"filing"}, "what does not import is left out of lists"
        with pytest.raises(ConfigError, match="cannot load 'nowhere:Filing': ModuleNotFoundError"):
            find("broken")
        with pytest.raises(ConfigError, match="did you mean 'filing'"):
            find("filling")
    finally:
        registry._entry_points.cache_clear()
        registry.find.cache_clear()


@pytest.mark.parametrize(
    ("spelled", "message"),
    [
        ("gone.py:Filing", "cannot load 'gone.py:Filing': FileNotFoundError: .*gone.py"),
        ("own.py:Fileing", "has no 'Fileing'; it has .*Filing, Replicating, Half"),
        ("own.py:Other", "Other is no subclass of capricorn.CheckpointSystem"),
        ("own.py:Half", "Half does not define attach, close, drain, latest_complete, restore"),
        ("no_such_package.x:Filing", "cannot load 'no_such_package.x:Filing': ModuleNotFoundError"),
        (":Filing", "write PACKAGE.MODULE:NAME or FILE.py:NAME"),
    ],
)
def test_a_wrong_name_is_one_line_that_says_what_to_write(
    own: Path, monkeypatch: pytest.MonkeyPatch, spelled: str, message: str
) -> None:
    monkeypatch.chdir(own.parent)
    with pytest.raises(ConfigError, match=message) as told:
        find(spelled)
    assert "\n" not in str(told.value)


def test_a_file_with_an_error_is_named_with_it(tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    file.write_text("import capricorn\n1 / 0\n")
    for _ in range(2):
        with pytest.raises(ConfigError, match="ZeroDivisionError"):
            find(f"{file}:X")


def test_files_of_one_name_in_two_folders_are_two(tmp_path: Path) -> None:
    entries = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "own.py").write_text(OWN.replace("depth: int = 3", f"depth: int = {number}"))
        entries.append(find(f"{folder}/own.py:Replicating"))
    defaults = [entry.settings_model()().depth for entry in entries]  # type: ignore[misc, union-attr]
    assert defaults == [1, 2]


def test_settings_of_a_system_that_writes_files_say_where(tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(OWN + "\nclass Wrong(FileCheckpoints):\n    settings = Options\n    library = Files\n")
    with pytest.raises(ConfigError, match=r"Wrong.settings must be a subclass of capricorn.FileSettings"):
        find(f"{file}:Wrong")


def test_a_file_means_the_same_in_every_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute("a/own.py:Filing") == f"{tmp_path}/a/own.py:Filing"
    assert absolute("capricorn") == "capricorn"
    assert absolute("mine.systems:Filing") == "mine.systems:Filing"
    assert [short_name(name) for name in ("capricorn", "mine.systems:Filing", "/a/own.py:Filing")] == [
        "capricorn", "Filing", "Filing",
    ]  # fmt: skip
