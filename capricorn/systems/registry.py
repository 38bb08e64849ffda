"""The registry: one table of facts about checkpointing systems, and the door for systems from outside.

A system is named `NAME` (built in, or installed as an entry point of the group `capricorn_bench.systems`),
`PACKAGE.MODULE:CLASS` or `FILE.py:CLASS`. Every fact about a system is a field of its `SystemEntry` and stands nowhere
else. Facts of built-in systems are known without importing them, and so without torch; a system from outside is
imported, and its class says the same in its attributes.
"""

from __future__ import annotations

import inspect
import os
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata, util
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Final

from pydantic import BaseModel

from capricorn.errors import CapricornError, ConfigError, unknown_name
from capricorn.systems.interface import CheckpointSystem, Kind

PROJECT: Final = "capricorn-bench"
ENTRY_POINTS: Final = "capricorn_bench.systems"

TIERS: Final[Mapping[Kind, tuple[str, ...]]] = MappingProxyType({
    "nothing": (), "replicates": ("local", "peer"), "files": ("persistent",), "own": ("local", "peer"),
})  # fmt: skip
"""Tiers that a system of that kind restores from, if its entry does not name others."""
SURVIVES: Final[Mapping[Kind, frozenset[str]]] = MappingProxyType({
    "nothing": frozenset(),
    "replicates": frozenset({"kill", "kill-all", "node-loss"}),
    "files": frozenset({"kill", "kill-all", "node-loss", "group-loss"}),
    "own": frozenset({"kill"}),
})  # fmt: skip
"""Kinds of failures after which a system of that kind still has a checkpoint, if its entry does not name others."""


@dataclass(frozen=True, slots=True)
class SystemEntry:
    """Everything that the rest of the project may know of a system without attaching it."""

    name: str
    """As users spell it."""
    target: str
    """`module:Class`; the module of a file is named after it."""
    what: str
    """One line for people."""
    kind: Kind
    tiers: tuple[str, ...] = ()
    survives: frozenset[str] = frozenset()
    profiles_first: bool = False
    """Whether it watches `profile_iterations` (a setting) before its first checkpoint."""
    tunes: str = ""
    """The setting that is tried out on the scenario before the first run, where it is `auto`."""
    settings: str = ""
    """`module:Model` of its settings, importable without torch; empty if it has none."""
    colour: str = ""
    """In figures; empty draws one from the spare ones. Source: Okabe & Ito, "Color universal design" (2008), and Tol,
    "Colour schemes" (2021)."""
    extra: str = ""
    """The extra of the distribution that brings `needs`."""
    needs: str = ""
    """A module that is there only if the extra is installed."""

    @property
    def label(self) -> str:
        """The name without the module or file it comes from."""
        return short_name(self.name)

    @property
    def replicates(self) -> bool:
        """Whether it keeps copies in the memory store of the shared runtime, which can also persist them."""
        return self.kind == "replicates"

    @property
    def writes_files(self) -> bool:
        """Whether it writes files instead of keeping copies in memory."""
        return self.kind == "files"

    @property
    def is_installed(self) -> bool:
        return not self.needs or util.find_spec(self.needs) is not None

    @property
    def install(self) -> str:
        """The command that installs what is missing."""
        return f"pip install '{PROJECT}[{self.extra}]'" if self.extra else f"pip install {PROJECT}"

    def settings_model(self) -> type[BaseModel] | None:
        """Imports the model of its settings."""
        return _attribute(self.settings) if self.settings else None


def _entry(name: str, target: str, what: str, kind: Kind, **facts: Any) -> SystemEntry:
    defaults = {"tiers": TIERS[kind], "survives": SURVIVES[kind]}
    return SystemEntry(name, f"capricorn.{target}", what, kind, **(defaults | facts))


_GEMINI: Final = {"profiles_first": True, "tunes": "mu"}
_FILES: Final = {"settings": "capricorn.systems.settings:FileSettings"}
_DCP: Final = {"settings": "capricorn.baselines.file_settings:DcpSettings"}

_BUILT_IN: Final = (
    _entry("none", "baselines.none:NoCheckpoint", "no checkpoints: what a slowdown is measured from", "nothing",
           colour="#7d8590"),
    _entry("blocking", "baselines.blocking:Blocking", "replicates as capricorn does, while training waits",
           "replicates", colour="#d55e00"),
    _entry("gemini", "baselines.gemini:Gemini", "spans profiled once, peers sent the live state, the update waits",
           "replicates", settings="capricorn.planner.gemini_planner:GeminiSettings", colour="#e69f00", **_GEMINI),
    _entry("gemini-staged", "baselines.gemini:GeminiStaged", "Gemini's plan, sent from the local copy",
           "replicates", settings="capricorn.planner.gemini_planner:GeminiStagedSettings", colour="#cc79a7", **_GEMINI),
    _entry("lm-resiliency", "baselines.lm_resiliency:LmResiliency",
           "lm-resiliency, by Gemini's first author: copied after the update, then exchanged with a peer", "own",
           survives=frozenset({"kill", "node-loss"}), colour="#999933", needs="lm_resiliency", extra="peers"),
    _entry("torchsnapshot", "baselines.torch_snapshot:TorchSnapshot",
           "TorchSnapshot 0.1.0: staged, then written beside", "files",
           settings="capricorn.baselines.file_settings:TorchSnapshotSettings", colour="#009e73"),
    _entry("dcp-async", "baselines.torch_dcp:DcpAsync", "torch.distributed.checkpoint, written beside training",
           "files", colour="#56b4e9", **_DCP),
    _entry("dcp", "baselines.torch_dcp:Dcp", "torch.distributed.checkpoint, while training waits", "files",
           colour="#8073c4", **_DCP),
    _entry("torch-save", "baselines.torch_save:TorchSave", "torch.save, a file a rank, while training waits", "files",
           colour="#882255", **_FILES),
    _entry("torch-checkpointing", "baselines.torch_checkpointing:TorchCheckpointing",
           "Meta's torch_checkpointing: written by a process beside training", "files", needs="torch_checkpointing",
           extra="peers", **_FILES),
    _entry("capricorn", "runtime.replicating_system:ReplicatingSystem",
           "chunks planned into the idle spans of each layer", "replicates", colour="#0072b2"),
)  # fmt: skip
SYSTEMS: Final[dict[str, SystemEntry]] = {entry.name: entry for entry in _BUILT_IN}
"""The built-in systems by name."""


def known() -> dict[str, SystemEntry]:
    """Returns the systems that have a name here: the built-in ones, and those that other distributions install.

    An installed one that does not import is left out; `find` says why.
    """
    return SYSTEMS | dict(_installed())


@cache
def find(name: str) -> SystemEntry:
    """Returns the facts of the system that is spelled so.

    Raises:
        ConfigError: there is no such name, file, module or class, or the class is no system that could run.
    """
    if name in SYSTEMS:
        return SYSTEMS[name]
    points = _entry_points()
    if name in points:
        return _describe(name, _load(name, points[name].value), points[name].value)
    if ":" not in name:
        raise unknown_name("system", name, [*SYSTEMS, *points])
    return _describe(name, _load(name, name), name)


def recorded(name: str) -> SystemEntry | None:
    """Returns the facts of a system that a record names; None if it is not to be had here any more."""
    try:
        return find(name)
    except ConfigError:
        return None


def check_system(name: str) -> None:
    """Raises ConfigError for a system that is not known, with the known ones, or whose extra is not installed."""
    entry = find(name)
    if not entry.is_installed:
        raise ConfigError(f"system {name} needs the module {entry.needs}; {entry.install}")


def load_system(name: str) -> type[CheckpointSystem]:
    """Imports the class of that system.

    Raises:
        ConfigError: no system is spelled so, or what it needs is not installed.
    """
    check_system(name)
    entry = find(name)
    return _load(name, entry.target)


def canonical_name(name: str) -> str:
    """Returns the name as it means the same in every folder: a file by its absolute path."""
    path, colon, attribute = name.rpartition(":")
    return f"{Path(path).absolute()}:{attribute}" if colon and path.endswith(".py") else name


def short_name(name: str) -> str:
    """Returns what a system is called in names of runs, tables and figures: `Raw` of `folder/raw.py:Raw`."""
    return name.rpartition(":")[2]


def _installed() -> Iterator[tuple[str, SystemEntry]]:
    for name in _entry_points():
        try:
            yield name, find(name)
        except ConfigError:
            continue


@cache
def _entry_points() -> dict[str, metadata.EntryPoint]:
    return {point.name: point for point in metadata.entry_points(group=ENTRY_POINTS) if point.name not in SYSTEMS}


def _describe(name: str, system: type[CheckpointSystem], target: str) -> SystemEntry:
    """The entry of a system from outside, by the attributes of its class."""
    kind, model = system.kind, system.settings
    first_line = (inspect.getdoc(system) or "").partition("\n")[0]
    return SystemEntry(
        name=name,
        target=target,
        what=first_line or f"{system.__name__} of {target.rpartition(':')[0]}",
        kind=kind,
        tiers=system.tiers or TIERS[kind],
        survives=SURVIVES[kind] if system.survives is None else system.survives,
        profiles_first=system.profiles_first,
        settings="" if model is None else f"{model.__module__}:{model.__qualname__}",
    )


def _load(name: str, target: str) -> type[CheckpointSystem]:
    """The class at `module:Class` or `file.py:Class`, found to be a system that can be made.

    Raises:
        ConfigError: it is not.
    """
    where, _, attribute = target.rpartition(":")
    try:
        module = _import_file(Path(where)) if where.endswith(".py") else _import_module(where)
    except CapricornError:
        raise
    except Exception as error:
        raise ConfigError(f"system {name}: {where} does not import: {type(error).__name__}: {error}") from error
    loaded = getattr(module, attribute, None)
    if loaded is None:
        own = (value for value in vars(module).values() if _is_system(value) and value.__module__ == module.__name__)
        has = ", ".join(each.__name__ for each in own) or "no system"
        raise ConfigError(f"system {name}: {where} has no {attribute!r}; it has {has}")
    if not _is_system(loaded):
        raise ConfigError(f"system {name}: {attribute} is no subclass of capricorn.CheckpointSystem")
    if missing := sorted(getattr(loaded, "__abstractmethods__", ())):
        raise ConfigError(f"system {name}: {attribute} does not define {', '.join(missing)}")
    checked: type[CheckpointSystem] = loaded
    return checked


def _is_system(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, CheckpointSystem) and value is not CheckpointSystem


def _import_module(name: str) -> ModuleType:
    """Imports a module, also one in the folder that the command was started in."""
    if not name:
        raise ConfigError("a system of one's own is PACKAGE.MODULE:CLASS or FILE.py:CLASS")
    _search(Path.cwd())
    return import_module(name)


def _search(folder: Path) -> None:
    """Lets imports look in a folder, after all others."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _import_file(path: Path) -> ModuleType:
    """Imports a file under a name of its own; it can import what stands beside it, or where the command was started."""
    path = path.absolute()
    if not path.is_file():
        raise ConfigError(f"there is no file {path}; a system of one's own is FILE.py:CLASS")
    name = f"capricorn_own_{path.stem}_{zlib.crc32(os.fsencode(path)):08x}"
    before = sys.modules.get(name)
    if before is not None and before.__file__ == str(path):
        return before
    spec = util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    _search(path.parent)
    _search(Path.cwd())
    module = sys.modules[name] = util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _attribute(target: str) -> Any:
    where, _, attribute = target.partition(":")
    return getattr(import_module(where), attribute)
