"""From what a user writes to a checked scenario: preset names, TOML files, `every-N`, `key=value`. Knows no torch."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from capricorn.config.cluster import LOCAL
from capricorn.config.fields import validate
from capricorn.config.presets import CLUSTERS, MODELS
from capricorn.config.scenario import MOVED_SECTIONS, ModelConfig, Scenario
from capricorn.errors import ConfigError, note_once, unknown_name
from capricorn.files import read_text

SEE: Final = "see capricorn-bench list settings"
RENAMED: Final[Mapping[str, str]] = {"system.give_way": "system.idle_priority"}
"""Keys of earlier versions, each with its key of today; still accepted, with a note."""


def load_model(name: str) -> ModelConfig:
    """Returns the preset of that name, or the TOML file at that path.

    Raises:
        ConfigError: no such preset or file, or the file does not describe a model.
    """
    if name in MODELS:
        return validate(ModelConfig, {"name": name} | MODELS[name], f"model {name}")
    path = Path(name)
    if path.suffix == ".toml":
        return validate(ModelConfig, {"name": path.stem} | read_toml(path), str(path))
    raise unknown_name("model", name, MODELS)


def load_cluster(name: str) -> dict[str, Any]:
    """Returns the fields of the cluster of that name, or of the one that the TOML file at that path describes.

    Raises:
        ConfigError: no such preset or file.
    """
    if name == LOCAL:
        return {"name": LOCAL}
    if name in CLUSTERS:
        return {"name": name} | CLUSTERS[name]
    path = Path(name)
    if path.suffix == ".toml":
        return {"name": path.stem} | read_toml(path)
    raise unknown_name("cluster", name, [LOCAL, *CLUSTERS])


def read_toml(path: Path) -> dict[str, Any]:
    """Returns the table in a TOML file.

    Raises:
        ConfigError: it cannot be read or is not TOML.
    """
    try:
        return tomllib.loads(read_text(path))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def parse_ckpt(text: str) -> int:
    """Returns the interval that `every-iter`, `every-N` or `off` stands for; 0 is off.

    Raises:
        ConfigError: it is none of these, or N is 0.
    """
    if text in ("every-iter", "off"):
        return {"every-iter": 1, "off": 0}[text]
    match = re.fullmatch(r"every-(\d+)", text)
    if match is None or int(match[1]) == 0:
        raise ConfigError(f"--ckpt {text!r} is not every-iter, every-N with N >= 1, or off")
    return int(match[1])


OPTIONS = "system.options."


def canonical_key(key: str) -> str:
    """Returns a key as it is spelled today: `system.options.mu` for the older `gemini.mu`."""
    section, _, field = key.partition(".")
    return OPTIONS + field if section in MOVED_SECTIONS else RENAMED.get(key, key)


def note_older(assignments: Iterable[str]) -> None:
    """Says on stderr, once in a process, which keys that a user has written are spelled otherwise now."""
    for key in (assignment.partition("=")[0] for assignment in assignments):
        if canonical_key(key) != key:
            note_once(f"{key} is now {canonical_key(key)}")


def assign(scenario: Scenario, assignments: Iterable[str]) -> Scenario:
    """Returns the scenario with `section.key=value` settings applied and all of it checked again.

    Options of the system are taken as they are: only its own model knows them.

    Raises:
        ConfigError: a key is unknown or a value does not fit it.
    """
    tree = scenario.model_dump()
    for assignment in assignments:
        written, equals, value = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set {assignment!r} is not key=value, as in system.every=2; {SEE}")
        key = canonical_key(written)
        if key.startswith(OPTIONS) and key != OPTIONS:
            tree["system"]["options"][key.removeprefix(OPTIONS)] = value
            continue
        section, _, field = key.partition(".")
        known = [f"{s}.{f}" for s, table in tree.items() if isinstance(table, dict) for f in table]
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1)
            sections = ", ".join(name for name, table in tree.items() if isinstance(table, dict))
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"sections: {sections}; {SEE}"
            raise ConfigError(f"--set {assignment!r}: unknown key {written!r}; {hint}")
        if key == OPTIONS.removesuffix("."):
            raise ConfigError(f"--set {assignment!r}: name one of them, as in {OPTIONS}KEY=VALUE")
        tree[section][field] = value
    return validate(Scenario, tree, "--set", lax=True)
