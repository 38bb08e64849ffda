"""Reads a record from its file, and tells apart what is no record, what is damaged, and what another version wrote.

| written by                                     | what is read                                     |
|------------------------------------------------|--------------------------------------------------|
| this version, or an older one                  | all of it                                        |
| a newer one, with more fields                  | what this version knows; a note names the others |
| a newer one, with values that are unknown here | nothing: an error names the first of them        |
| a newer one, under a higher schema version     | nothing: the same names may mean something else  |
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

import capricorn
from capricorn.errors import ConfigError, note_once
from capricorn.files import failure, read_text

UNKNOWN: Final = "extra_forbidden"
"""Pydantic's type of the error for a field that a model does not have."""
DISTRIBUTION: Final = "capricorn-bench"
MAX_NAMED: Final = 5
"""Most names that a line lists of many."""

T = TypeVar("T", bound=BaseModel)


class Known(NamedTuple):
    """What this version knows of a record, and the names of the fields that it does not."""

    record: Any
    unknown: frozenset[str]


def read_json(path: Path, what: str) -> Any:
    """Returns what that file says, which tells what its folder holds.

    Raises:
        ConfigError: there is none, it cannot be read, or it is not JSON.
    """
    try:
        return json.loads(read_text(path))
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{path.parent} holds no {what}: there is no {path.name} in it") from None
    except OSError as error:
        raise failure(f"read {path}", error) from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{path} is damaged: it is not JSON") from None


def check_schema(path: Path, data: Any, known: int) -> None:
    """Raises ConfigError unless the data has the schema version that this version reads."""
    version = data.get("schema_version") if isinstance(data, Mapping) else None
    if isinstance(version, int) and version > known:
        raise ConfigError(
            f"{path} was written by a newer version{_by(data)}: its schema version is {version}, and this one, "
            f"{capricorn.__version__}, reads {known}; update {DISTRIBUTION}"
        )
    if version != known:
        raise ConfigError(f"{path} has schema version {version!r}; this version reads {known}")


def parse_record(path: Path, kind: type[T], data: Any, *, goes_on: bool = False) -> T:
    """Returns the record that a file holds; a note names fields that this version does not know.

    Args:
        path: the file.
        kind: what is in it.
        data: what it says.
        goes_on: whether it is to be written again, by which such fields would be lost.

    Raises:
        ConfigError: it is damaged, or a newer version has written what this one cannot read, or would lose.
    """
    try:
        known = read_known(kind, data)
    except ValidationError as error:
        fault = error.errors()[0]
        wrong = f"{_name(fault['loc'])}: {fault['msg'].lower()}"
        if is_newer(data):
            raise ConfigError(f"{path} was written by a newer version{_by(data)}: cannot read {wrong}") from None
        raise ConfigError(f"{path} is damaged: {wrong}") from None
    if known.unknown and goes_on:
        raise ConfigError(
            f"{path} was written by a newer version{_by(data)}: this one, {capricorn.__version__}, would lose "
            f"{names_of(known.unknown)}; go on with the newer one"
        )
    note_unknown(path, known.unknown, data)
    found: T = known.record
    return found


def read_known(kind: type[T], data: Any) -> Known:
    """Returns the record of what this version knows of the data.

    Raises:
        ValidationError: what it knows is missing or is something else.
    """
    try:
        return Known(kind.model_validate(data), frozenset())
    except ValidationError as error:
        unknown = [fault["loc"] for fault in error.errors() if fault["type"] == UNKNOWN]
        if not unknown:
            raise
    return Known(kind.model_validate(_without(data, unknown)), frozenset(map(_name, unknown)))


def note_unknown(path: Path, unknown: Collection[str], data: Any = None) -> None:
    """Says which fields of a file were left out, if any were."""
    if unknown:
        note_once(f"{path} was written by a newer version{_by(data)}: left out {names_of(unknown)}")


def names_of(unknown: Collection[str]) -> str:
    """Returns the first of those names, and how many more there are."""
    names = sorted(unknown)
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def is_newer(data: Any) -> bool:
    """Returns whether a record says that a later version than this one wrote it."""
    return _release(_writer(data)) > _release(capricorn.__version__)


def _by(data: Any) -> str:
    """Returns the version that wrote a record in parentheses, where it says one that is newer."""
    return f" ({_writer(data)})" if is_newer(data) else ""


def _writer(data: Any) -> str:
    for key in ("environment", "versions", DISTRIBUTION):
        data = data.get(key) if isinstance(data, Mapping) else None
    return data if isinstance(data, str) else ""


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def _without(data: Any, places: Sequence[tuple[int | str, ...]]) -> Any:
    """Returns the data without what lies at those places."""
    known = deepcopy(data)
    for *above, last in places:
        table = known
        for step in above:
            table = _inside(table, step)
        if isinstance(table, dict):
            table.pop(last, None)
    return known


def _inside(value: Any, step: int | str) -> Any:
    """Returns what lies there; the value itself for a step that only says which of several types was tried."""
    try:
        return value[step]
    except (LookupError, TypeError):
        return value


def _name(place: Sequence[int | str]) -> str:
    return ".".join(map(str, place)) or "the whole"
