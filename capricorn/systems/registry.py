"""Systems by name: what each is, and its class, imported only when asked for."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module, util

from capricorn.errors import ConfigError, unknown_name
from capricorn.systems.interface import CheckpointSystem

PROJECT = "capricorn-bench"
MEMORY, FILES = ("local", "peer"), ("persistent",)
"""Tiers that a system restores from."""


@dataclass(frozen=True, slots=True)
class SystemInfo:
    """A system as far as it can be told without importing it."""

    target: str
    """`module:Class`."""
    what: str
    tiers: tuple[str, ...] = ()
    needs: str = ""
    """A module that is there only if `extra` is installed."""
    extra: str = ""

    @property
    def is_installed(self) -> bool:
        return not self.needs or util.find_spec(self.needs) is not None

    @property
    def install(self) -> str:
        """The command that installs what is missing."""
        return f"pip install '{PROJECT}[{self.extra}]'" if self.extra else f"pip install {PROJECT}"


SYSTEMS: dict[str, SystemInfo] = {
    "none": SystemInfo("capricorn.baselines.none:NoCheckpoint", "no checkpoints: what a slowdown is measured from"),
    "blocking": SystemInfo(
        "capricorn.baselines.blocking:Blocking", "replicates as capricorn does, while training waits", MEMORY
    ),
    "gemini": SystemInfo(
        "capricorn.baselines.gemini:Gemini", "spans profiled once, peers sent the live state, the update waits", MEMORY
    ),
    "gemini-staged": SystemInfo(
        "capricorn.baselines.gemini:GeminiStaged", "Gemini's plan, sent from the local copy as capricorn does", MEMORY
    ),
    "lm-resiliency": SystemInfo(
        "capricorn.baselines.lm_resiliency:LmResiliency",
        "lm-resiliency, by Gemini's first author: copied after the update, then exchanged with a peer",
        MEMORY,
        needs="lm_resiliency",
        extra="peers",
    ),
    "torchsnapshot": SystemInfo(
        "capricorn.baselines.torch_snapshot:TorchSnapshot", "TorchSnapshot 0.1.0: staged, then written beside", FILES
    ),
    "dcp-async": SystemInfo(
        "capricorn.baselines.torch_dcp:DcpAsync", "torch.distributed.checkpoint, written beside training", FILES
    ),
    "dcp": SystemInfo("capricorn.baselines.torch_dcp:Dcp", "torch.distributed.checkpoint, while training waits", FILES),
    "torch-save": SystemInfo(
        "capricorn.baselines.torch_save:TorchSave", "torch.save, a file a rank, while training waits", FILES
    ),
    "torch-checkpointing": SystemInfo(
        "capricorn.baselines.torch_checkpointing:TorchCheckpointing",
        "Meta's torch_checkpointing: written by a process beside training",
        FILES,
        needs="torch_checkpointing",
        extra="peers",
    ),
    "capricorn": SystemInfo(
        "capricorn.runtime.replicating_system:ReplicatingSystem",
        "chunks planned into the idle spans of each layer",
        MEMORY,
    ),
}


def check_system(name: str) -> None:
    """Raises ConfigError for a system that is not registered, with the known ones, or whose extra is not installed."""
    if name not in SYSTEMS:
        raise unknown_name("system", name, SYSTEMS)
    info = SYSTEMS[name]
    if not info.is_installed:
        raise ConfigError(f"system {name} needs the module {info.needs}; {info.install}")


def load_system(name: str) -> type[CheckpointSystem]:
    """The class of that system.

    Raises:
        ConfigError: no system has that name, or what it needs is not installed.
    """
    check_system(name)
    module, _, attribute = SYSTEMS[name].target.partition(":")
    loaded: type[CheckpointSystem] = getattr(import_module(module), attribute)
    return loaded
