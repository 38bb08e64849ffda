"""Per-iteration, in-memory checkpoints for MoE training: the runtime, the planner, the trainer harness, the report.

Public names are loaded on first use, so that `import capricorn` stays free of torch.
"""

from __future__ import annotations

import sys

# Python runs `-m capricorn...` and has put the working folder first, where a file of the user's may be named like a
# module of Python's own. What a user names by MODULE:NAME is found there all the same, after all else.
if sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)].removeprefix("-m").partition(".")[0] == __name__:
    del sys.path[: not sys.flags.safe_path]

from importlib import import_module
from typing import Any

__version__ = "0.2.0"

_PUBLIC = {
    "CapricornError": "capricorn.errors",
    "ConfigError": "capricorn.errors",
    "NoCompleteCheckpointError": "capricorn.errors",
    "LayoutMismatchError": "capricorn.errors",
    "OrderError": "capricorn.errors",
    "OutOfStepError": "capricorn.errors",
    "PeerLostError": "capricorn.errors",
    "StateChangedError": "capricorn.errors",
    "StateError": "capricorn.errors",
    "StoreError": "capricorn.errors",
    "TransportError": "capricorn.errors",
    "OpKey": "capricorn.hooks",
    "TrainerHook": "capricorn.hooks",
    "HookChain": "capricorn.hooks",
    "Topology": "capricorn.topology",
    "ModelConfig": "capricorn.config.scenario",
    "Scenario": "capricorn.config.scenario",
    "SystemConfig": "capricorn.config.scenario",
    "CheckpointSystem": "capricorn.systems.interface",
    "FileSettings": "capricorn.systems.settings",
    "SystemSettings": "capricorn.systems.settings",
    "FileCheckpoints": "capricorn.baselines.file_checkpoints",
    "Library": "capricorn.baselines.file_checkpoints",
    "ReplicatingSystem": "capricorn.runtime.replicating_system",
    "Planner": "capricorn.planner.plan",
    "StreamPlanner": "capricorn.planner.plan",
    "Plan": "capricorn.planner.plan",
    "Chunk": "capricorn.planner.plan",
    "Limit": "capricorn.planner.plan",
    "LinkModel": "capricorn.planner.link_model",
    "IterationProfile": "capricorn.planner.profile",
    "JobContext": "capricorn.systems.interface",
    "RestoreReport": "capricorn.systems.interface",
    "load_system": "capricorn.systems.registry",
    "FlatState": "capricorn.systems.flat_state",
    "join_job": "capricorn.runtime.torchrun_job",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'capricorn' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
