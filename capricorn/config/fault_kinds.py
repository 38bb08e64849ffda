"""The kinds of faults: one entry for each with all its facts, and the door for kinds of one's own.

Facts only: how a built-in kind is injected and reverted is in `capricorn.faults`; knows no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

from capricorn.config.own_code import absolute, installed, is_own, load_own
from capricorn.errors import ConfigError, unknown_name
from capricorn.units import Seconds

GROUP: Final = "capricorn_bench.faults"
"""Entry points of this group are kinds of faults."""
DISK, PREVIOUS, BACK = "disk", "previous", "back"
"""Places: what lies on the persistent tier; the second-newest copy in memory; a clock that jumps backwards."""
LINK_FRAC: Final = 1 / 20
DISK_FRAC: Final = 1 / 100
"""What is left of the rate of a slow link, and of a slow persistent tier."""
NO_LINKS: Final = "nodes have no links of their own on --cluster local; name another --cluster"

Target: TypeAlias = Literal["rank", "node", ""]
Mount: TypeAlias = Literal["", "store", "disk", "records"]
"""What lies on a small file system of its own: nothing, the memory store, the persistent tier, or the records."""
Loss: TypeAlias = Literal["", "copy", "group"]
"""What a fault takes of a rank's copies in memory: nothing, one of them, or all."""
Need: TypeAlias = Literal[
    "memory copies", "replicas", "persistent tier", "stored state", "memory files", "one machine", "links", "an end",
    "storage clocks", "memory cgroup", "swap", "fork server",
]  # fmt: skip
"""What a run or this machine has to have: copies in the memory store, remote ones, files on the persistent tier,
anything whose change a kill can tear, anything in memory, no other machines, links of the nodes, a time after which
the fault is over, clocks of a modelled storage (which the launcher makes), a memory cgroup that can be made, swap, and
a fork server that starts the ranks."""


@dataclass(frozen=True, slots=True)
class FaultKind:
    """All facts about a kind of fault; one of one's own also says how it is injected and reverted."""

    what: str
    target: Target = ""
    """The key that says whom it is injected into; empty where that is everybody."""
    places: Mapping[str, tuple[Need, ...]] = field(default_factory=dict)
    """By value of `where`, the default one first: what else is needed there."""
    needs: tuple[Need, ...] = ()
    seconds: Seconds | None = None
    """How long it lasts by default, 0 for good; None where that means nothing."""
    lasts: tuple[Seconds, ...] = ()
    """How long one that is drawn may last; as by default if there are none."""
    takes_call: bool = False
    """Whether `call` says at which change of the store it is triggered, counted from the moment."""
    fills: Mount = ""
    """The file system that it fills up."""
    loses: Loss = ""
    hits_persistent_tier: bool = False
    """Whether it damages what lies on the persistent tier, or leaves nothing else."""
    stops_launcher: bool = False
    """Whether the launcher stands still, too, for as long as it lasts."""
    ends_fork_server: bool = False
    """Whether the fork server is of no use to runs that come after."""
    outlives_run: bool = False
    """Whether what it has done would stay after the run, and so is reverted at its end."""
    inject: Callable[[Any, Any], None] | None = None
    """Makes it happen, on the rank that acts, by `FaultSpec` and `FaultContext`; None for a built-in kind."""
    revert: Callable[[Any, Any], None] | None = None
    """Takes it back, in the launcher, by `FaultSpec` and `RevertContext`: after `seconds`, with a new node, or at the
    end if it outlives the run."""

    @property
    def defaults(self) -> dict[str, object]:
        """The values of those keys that may be left out."""
        keys: dict[str, object] = {"where": next(iter(self.places))} if self.places else {}
        keys |= {} if self.seconds is None else {"seconds": self.seconds}
        return keys | ({"call": 1} if self.takes_call else {})

    @property
    def takes_time(self) -> bool:
        """Whether it harms the persistent tier while training goes on, rather than taking everything else away."""
        return self.hits_persistent_tier and not self.loses

    def needs_of(self, place: str) -> tuple[Need, ...]:
        """Returns all that a fault in that place needs."""
        return (*self.needs, *self.places.get(place, ()))


_COPY: Final[tuple[Need, ...]] = ("memory copies",)
_REPLICA: Final[tuple[Need, ...]] = ("memory copies", "replicas")
_ELSEWHERE: Final[tuple[Need, ...]] = (*_REPLICA, "one machine")
_FILES: Final[tuple[Need, ...]] = ("persistent tier", "one machine")

KINDS: Final[Mapping[str, FaultKind]] = MappingProxyType({
    "kill": FaultKind("a worker is killed", "rank"),
    "kill-all": FaultKind("all workers are killed, the memory of the nodes stays", needs=("one machine",)),
    "node-loss": FaultKind("a node's processes are killed and its memory is lost", "node", loses="copy"),
    "group-loss": FaultKind(
        "all nodes that keep each other's replicas are lost at once", "node", needs=("one machine",), loses="group",
        hits_persistent_tier=True,
    ),
    "stop": FaultKind("a worker is stopped and hangs", "rank", seconds=0.0, lasts=(0.0, 1.0)),
    "slow-link": FaultKind(
        "what leaves a node has a twentieth of its link", "node", needs=("links",), seconds=2.0, lasts=(1.0, 2.0)
    ),
    "partition": FaultKind(
        "nothing leaves a node", "node", needs=("links", "an end"), seconds=2.0, lasts=(1.0, 2.0)
    ),
    "corrupt": FaultKind(
        "a bit is flipped where it is needed next: in a worker's local copy or in its replica, then it is killed; in "
        "its second-newest local copy, whose newer one is lost; on the wire to a peer; on disk, then all memory is "
        "lost", "rank",
        places={"slot": _COPY, "replica": _ELSEWHERE, PREVIOUS: _ELSEWHERE, "wire": _REPLICA, DISK: _FILES},
        loses="copy",
    ),
    "truncate": FaultKind(
        "a file is cut short where it is needed next: a worker's local copy or its replica, then it is killed; its "
        "second-newest local copy, whose newer one is lost; one on disk, then all memory is lost", "rank",
        places={"slot": _COPY, "replica": _ELSEWHERE, PREVIOUS: _ELSEWHERE, DISK: _FILES}, loses="copy",
    ),
    "torn-commit": FaultKind(
        "a worker is killed before that call which changes its store", "rank", needs=("stored state",), takes_call=True
    ),
    "tmpfs-full": FaultKind(
        "the memory store's file system is filled up, then a worker is killed", "rank",
        needs=("memory files", "one machine"),
        fills="store", outlives_run=True,
    ),
    "disk-full": FaultKind(
        "the file system of the persistent tier is filled up", needs=("persistent tier", "one machine"), seconds=0.0,
        lasts=(0.0, 1.0), fills="disk", hits_persistent_tier=True, outlives_run=True,
    ),
    "disk-slow": FaultKind(
        "the persistent tier takes a hundredth", needs=("persistent tier", "storage clocks", "one machine"),
        seconds=2.0,
        lasts=(1.0, 2.0), hits_persistent_tier=True,
    ),
    "port-taken": FaultKind(
        "a worker is killed and a port squatter listens on its ports", "rank", needs=("one machine",),
        outlives_run=True,
    ),
    "clock-jump": FaultKind(
        "a worker's wall clock jumps ahead or back by these seconds", "rank", places={"ahead": (), BACK: ()},
        seconds=3600.0, lasts=(60.0, 3600.0, 1e8),
    ),
    "oom": FaultKind(
        "a worker runs into the limit of a memory cgroup and is killed by the kernel", "rank",
        needs=("memory cgroup", "one machine"),
        outlives_run=True,
    ),
    "swap": FaultKind(
        "a worker runs into the limit of a memory cgroup, and the kernel swaps", "rank",
        needs=("memory cgroup", "swap", "one machine"), outlives_run=True,
    ),
    "pause": FaultKind(
        "all processes of the run stand still, as in a machine that is suspended, and go on together",
        needs=("one machine", "an end"), seconds=1.0, lasts=(1.0, 4.0, 8.0), stops_launcher=True,
    ),
    "fork-server": FaultKind(
        "the process that forks the nodes is killed, or stopped for these seconds, and a node is lost", "node",
        places={"killed": (), "stopped": ()}, needs=("fork server", "one machine"),
        seconds=0.0, lasts=(0.0, 1.0), loses="copy",
        ends_fork_server=True, outlives_run=True,
    ),
    "records-full": FaultKind(
        "the file system of the run's records is filled up", needs=("one machine",), seconds=1.0, lasts=(0.2, 1.0),
        fills="records",
        outlives_run=True,
    ),
    "neighbour": FaultKind(
        "other runs' stores come and go beside this one's, or a second job trains, and a worker is killed", "rank",
        places={"stores": (), "job": ()}, needs=("one machine",), outlives_run=True,
    ),
})  # fmt: skip
"""The built-in kinds by name."""


def known_kinds() -> tuple[str, ...]:
    """Returns the names of all built-in and installed kinds."""
    return tuple(dict.fromkeys([*KINDS, *sorted(installed(GROUP))]))


def kind_of(name: str) -> FaultKind:
    """Returns the kind of that name: built in, installed, or spelled `PACKAGE.MODULE:NAME` or `FILE.py:NAME`.

    Raises:
        ConfigError: there is none, or what there is cannot be loaded or is no kind of fault.
    """
    if name in KINDS:
        return KINDS[name]
    if is_own(name):
        return _checked(name, load_own(absolute(name)))
    if (entry := installed(GROUP).get(name)) is None:
        raise unknown_name("fault", name, known_kinds())
    return _checked(name, load_own(entry.value))


def check_kinds(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the kinds, each once; all that are built in if none is named.

    Raises:
        ConfigError: one is unknown, or cannot be loaded.
    """
    for name in names:
        kind_of(name)
    return tuple(dict.fromkeys(map(absolute, names))) or tuple(KINDS)


def _checked(name: str, found: Any) -> FaultKind:
    if not isinstance(found, FaultKind) or found.inject is None:
        raise ConfigError(f"fault {name!r} is no FaultKind with an inject=; see examples/own_fault.py")
    return found
