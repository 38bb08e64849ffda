"""Are all machines told to run the same? The ranks compare it at each start, before anything is made of it.

A run of several machines is started by a command on each of them, and nobody sees them all. What differs would train
something that nobody has asked for, and go unnoticed. Collective. Knows no model and no system.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, Final

import torch
import torch.distributed as dist
from xxhash import xxh3_64_intdigest

from capricorn import __version__
from capricorn.config.scenario import Scenario
from capricorn.errors import ConfigError
from capricorn.runtime.comm.collectives import gather_long_texts, maxima
from capricorn.runtime.layout_agreement import shortened
from capricorn.systems.settings import flat_settings

OF_A_MACHINE: Final = frozenset({
    "launch.node_rank", "launch.rdzv_endpoint", "store.root", "store.keep", "data.path", "persist.dir",
})  # fmt: skip
"""Settings that each machine may have of its own; of the data, the content is compared."""


def check_agreement(group: dist.ProcessGroup, scenario: Scenario) -> None:
    """Compares what the ranks of all machines are to run; collective.

    Raises:
        ConfigError: they are to run something else; with the same words on all ranks.
    """
    mine = facts(scenario)
    text = json.dumps(mine, sort_keys=True)
    digest = xxh3_64_intdigest(text.encode()) >> 1  # fits a signed integer
    largest, negated_smallest = maxima(group, [digest, -digest], "what all ranks are to run")
    if largest == -negated_smallest:
        return
    texts = gather_long_texts(group, json.dumps([scenario.launch.node_rank, mine]), "what the others are to run")
    # torchrun gives out ranks as machines come, so rank 0 may be on any of them.
    raise ConfigError(explain(sorted((json.loads(each) for each in texts), key=itemgetter(0))))


def facts(scenario: Scenario) -> dict[str, Any]:
    """Returns what must be the same on all machines, by the name under which a user knows it."""
    settings = {key: value for key, value in flat_settings(scenario).items() if key not in OF_A_MACHINE}
    versions = {"python": platform.python_version(), "torch": torch.__version__, "capricorn-bench": __version__}
    return settings | versions | {"--fault": [str(fault) for fault in scenario.faults]}


def explain(by_machine: Sequence[tuple[int, Mapping[str, Any]]]) -> str:
    """Returns what differs between the first machine and the first other one that differs, of all ranks' facts."""
    here, first = by_machine[0]
    there, other = next(each for each in by_machine if each[1] != first)
    differing = [key for key in {**first, **other} if first.get(key) != other.get(key)]
    shown = [
        f"{key} is {_word(first, key)} on machine {here} and {_word(other, key)} on machine {there}"
        for key in differing
    ]
    return f"{shortened(shown)}; give the same command on all machines"


def _word(known: Mapping[str, Any], key: str) -> str:
    value = known.get(key)
    return "not set" if value in (None, [], "") else str(value)
