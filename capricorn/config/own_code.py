"""Finds what users wrote themselves: `PACKAGE.MODULE:NAME`, `FILE.py:NAME`, or an entry point of an installed package.

Runs the module that holds it, so it is called with what somebody typed, and never with what a record says.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from capricorn.errors import ConfigError
from capricorn.files import check_regular


def is_own(name: str) -> bool:
    """Returns whether a name is spelled as a module or a file and what is in it."""
    return ":" in name


def absolute(name: str) -> str:
    """Returns `FILE.py:NAME` with a path that means the same in every folder; any other name as it is."""
    path, colon, attribute = name.rpartition(":")
    return f"{Path(path).absolute()}{colon}{attribute}" if path.endswith(".py") else name


def installed(group: str) -> dict[str, EntryPoint]:
    """Returns the entry points of that group by name."""
    return {entry.name: entry for entry in entry_points(group=group)}


@cache
def load_own(name: str, is_wanted: Callable[[object], bool] | None = None) -> Any:
    """Returns the object that `PACKAGE.MODULE:NAME` or `FILE.py:NAME` stands for.

    What stands beside a file, or in the folder that the command was started in, can be imported.

    Raises:
        ConfigError: its module cannot be run, or has nothing of that name; what `is_wanted` there is named.
    """
    place, _, attribute = name.rpartition(":")
    if not place:
        raise ConfigError(f"cannot load {name!r}: write PACKAGE.MODULE:NAME or FILE.py:NAME")
    module = _run(name, place)
    if not hasattr(module, attribute):
        own = (key for key, value in vars(module).items() if is_wanted is not None and is_wanted(value))
        has = f"; it has {', '.join(own)}" if is_wanted is not None else ""
        raise ConfigError(f"cannot load {name!r}: {place} has no {attribute!r}{has}")
    return getattr(module, attribute)


def _run(name: str, place: str) -> ModuleType:
    _search(Path.cwd())
    try:
        if not place.endswith(".py"):
            return import_module(place)
        check_regular(Path(place))
        return _run_file(Path(place))
    except (Exception, SystemExit) as error:  # whatever the module raises is its author's mistake
        raise ConfigError(f"cannot load {name!r}: {type(error).__name__}: {' '.join(str(error).split())}") from error


def _run_file(path: Path) -> ModuleType:
    path = path.absolute()
    name = f"{path.stem}@{path}"  # no import finds it, so that it stands in the place of no other module
    if name in sys.modules:
        return sys.modules[name]
    _search(path.parent)
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _search(folder: Path) -> None:
    """Lets imports look in a folder, after all others."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
