"""The registry: one table of facts about checkpointing systems, and the door for systems from outside.

A system is named `NAME` (built in, or installed as an entry point of the group `capricorn_bench.systems`),
`PACKAGE.MODULE:CLASS` or `FILE.py:CLASS`. Every fact about a system is a field of its `SystemEntry` and stands nowhere
else. Facts of built-in systems are known without importing them, and so without torch; a system from outside is
imported, and its class says the same in its attributes.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module, metadata, util
from types import MappingProxyType
from typing import Any, Final

from pydantic import BaseModel

from capricorn.config.fields import check_path_part
from capricorn.config.own_code import installed, is_own, load_own
from capricorn.errors import ConfigError, unknown_name
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
    ignores: frozenset[str] = frozenset()
    """Settings of the scenario that others of its kind have and it does nothing with, as `planner.spans`."""
    colour: str = ""
    """In figures; empty draws one from the spare ones. Source: Okabe & Ito, "Color universal design" (2008), and Tol,
    "Colour schemes" (2021)."""
    extra: str = ""
    """The extra of the distribution that brings `needs`."""
    needs: str = ""
    """A module that is there only if the extra is installed."""
    toy: Mapping[str, Any] = field(default_factory=dict)
    """How it is set up in the toy job of `check-system`, where that differs from the defaults."""

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


# Its own limit is 128 MiB. What is larger is not copied together but written as it is.
_SLABS: Final = {"TORCHSNAPSHOT_SLAB_SIZE_THRESHOLD_BYTES_OVERRIDE": "1000000"}
_PLANNING: Final = frozenset(
    f"planner.{field}" for field in ("spans", "replan", "gate", "risk", "max_chunk_bytes", "profile_iterations")
)
# Twenty iterations of profiling are longer than the toy job, and `auto` is found by trial runs before a job.
_GEMINI: Final = {"ignores": _PLANNING, "profiles_first": True, "tunes": "mu",
                  "toy": {"options": {"profile_iterations": 2, "mu": 0.8}}}  # fmt: skip
# Its replicas leave through sockets of the library.
_SOCKETS: Final = frozenset(
    f"system.{field}"
    for field in ("block_bytes", "low_class", "send_buffer_bytes", "idle_priority", "staging_threads", "max_lost")
)
_FILES: Final = {"settings": "capricorn.systems.settings:FileSettings"}

_BUILT_IN: Final = (
    _entry("none", "baselines.none:NoCheckpoint", "no checkpoints: what a slowdown is measured from", "nothing",
           colour="#7d8590"),
    _entry("blocking", "baselines.blocking:Blocking", "replicates as capricorn does, while training waits",
           "replicates", ignores=_PLANNING, colour="#d55e00"),
    _entry("gemini", "baselines.gemini:Gemini", "spans profiled once, peers sent the live state, the update waits",
           "replicates", settings="capricorn.planner.gemini_planner:GeminiSettings", colour="#e69f00", **_GEMINI),
    _entry("gemini-staged", "baselines.gemini:GeminiStaged", "Gemini's plan, sent from the local copy",
           "replicates", settings="capricorn.planner.gemini_planner:GeminiStagedSettings", colour="#cc79a7", **_GEMINI),
    _entry("lm-resiliency", "baselines.lm_resiliency:LmResiliency",
           "lm-resiliency, by Gemini's first author: copied after the update, then exchanged with a peer", "own",
           survives=frozenset({"kill", "node-loss"}), ignores=_SOCKETS | _PLANNING - {"planner.max_chunk_bytes"},
           colour="#999933", needs="lm_resiliency", extra="peers",
           toy={"has_links": False}),
    _entry("torchsnapshot", "baselines.torch_snapshot:TorchSnapshot",
           "TorchSnapshot 0.1.0: staged, then written beside", "files",
           settings="capricorn.baselines.file_settings:TorchSnapshotSettings", colour="#009e73",
           toy={"without": ("odd_bfloat16", "float8"), "environment": _SLABS}),
    _entry("dcp-async", "baselines.torch_dcp:DcpAsync", "torch.distributed.checkpoint, written beside training",
           "files", settings="capricorn.baselines.file_settings:DcpAsyncSettings", colour="#56b4e9"),
    _entry("dcp", "baselines.torch_dcp:Dcp", "torch.distributed.checkpoint, while training waits", "files",
           settings="capricorn.baselines.file_settings:DcpSettings", colour="#8073c4"),
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


_HANDLERS: Final = "torch.distributed.elastic.rendezvous.registry"
"""The logger of the part of torch that looks for plug-ins of torchrun."""
_found: Final[dict[str, SystemEntry]] = {}
"""Systems from outside that somebody has named in this process."""


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
    if name not in points and not is_own(name):
        raise unknown_name("system", name, [*SYSTEMS, *points])
    target = points[name].value if name in points else name
    check_path_part(short_name(name), "system")
    _found[name] = _describe(name, _load(name, target), target)
    return _found[name]


def recorded(name: str) -> SystemEntry | None:
    """Returns the facts of a system that a record names, if they are known already: a record runs no code."""
    return SYSTEMS.get(name) or _found.get(name)


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
    return {name: point for name, point in installed(ENTRY_POINTS).items() if name not in SYSTEMS}


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
    logging.getLogger(_HANDLERS).addFilter(_is_not_of_a_peer)
    loaded = load_own(target, _is_system)
    if not _is_system(loaded):
        raise ConfigError(f"system {name}: {target.rpartition(':')[2]} is no subclass of capricorn.CheckpointSystem")
    if missing := sorted(getattr(loaded, "__abstractmethods__", ())):
        raise ConfigError(f"system {name}: {loaded.__name__} does not define {', '.join(missing)}")
    checked: type[CheckpointSystem] = loaded
    return checked


def _is_not_of_a_peer(record: logging.LogRecord) -> bool:
    """Holds back what torch says, in six lines at import, of a plug-in of lm-resiliency that nothing here uses."""
    return "lm_resiliency" not in record.getMessage()


def _is_system(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, CheckpointSystem) and value is not CheckpointSystem


def _attribute(target: str) -> Any:
    where, _, attribute = target.partition(":")
    return getattr(import_module(where), attribute)
