"""The failures that can be injected: what each kind does, whom it strikes, and how one is spelled.

Pure values; how they are made to happen is in `harness`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, Self

from pydantic import Field, model_validator

from capricorn.config.fields import FrozenModel, check, validate
from capricorn.errors import ConfigError, unknown_name
from capricorn.hooks import parse_moment
from capricorn.units import Seconds

Target = Literal["rank", "node", ""]


@dataclass(frozen=True, slots=True)
class FaultKind:
    """What a kind of failure is, as far as it can be told without injecting one."""

    what: str
    target: Target
    """The key that says whom it strikes; empty where it strikes all."""
    places: tuple[str, ...] = ()
    """Values that `where` may take, the first by default."""
    seconds: Seconds | None = None
    """How long it lasts by default, 0 for good; None where that means nothing."""
    takes_call: bool = False
    """Whether `call` says at which of the store's calls it strikes, counted from the moment."""


KINDS: Final[Mapping[str, FaultKind]] = MappingProxyType({
    "kill": FaultKind("a worker is killed", "rank"),
    "kill-all": FaultKind("all workers are killed, the memory of the nodes stays", ""),
    "node-loss": FaultKind("a node's processes are killed and its memory is lost", "node"),
    "group-loss": FaultKind("all nodes that keep each other's replicas are lost at once", "node"),
    "stop": FaultKind("a worker is stopped and hangs", "rank", seconds=0.0),
    "slow-link": FaultKind("what leaves a node has a twentieth of its link", "node", seconds=2.0),
    "partition": FaultKind("nothing leaves a node", "node", seconds=2.0),
    "corrupt": FaultKind(
        "a bit is flipped where it is needed next: in a worker's local copy or in its replica, then it is killed; on "
        "the wire to a peer; on disk, then all memory is lost", "rank", places=("slot", "replica", "wire", "disk"),
    ),
    "truncate": FaultKind(
        "a file is cut short where it is needed next: a worker's local copy or its replica, then it is killed; one on "
        "disk, then all memory is lost", "rank", places=("slot", "replica", "disk"),
    ),
    "torn-commit": FaultKind("a worker is killed before that call which changes its store", "rank", takes_call=True),
    "tmpfs-full": FaultKind("the memory store's file system is filled up, then a worker is killed", "rank"),
    "disk-full": FaultKind("the file system of the slow tier is filled up", "", seconds=0.0),
    "disk-slow": FaultKind("the slow tier takes a hundredth", "", seconds=2.0),
    "port-taken": FaultKind("a worker is killed and a stranger listens on its ports", "rank"),
    "clock-jump": FaultKind("a worker's wall clock jumps ahead", "rank", seconds=3600.0),
    "oom": FaultKind("a worker runs into the limit of a memory cgroup and is killed by the kernel", "rank"),
})  # fmt: skip
FAULT_KINDS: Final = tuple(KINDS)
LINK_KINDS: Final = frozenset({"slow-link", "partition"})
"""Kinds that strike a link, which only an emulated network has."""
NO_LINKS: Final = "nodes have no links of their own on --cluster local; name another --cluster"


class FaultSpec(FrozenModel):
    """One injected failure: what, to whom, in which iteration, at which moment."""

    kind: str
    iteration: int = Field(gt=0)
    rank: int | None = Field(default=None, ge=0)
    node: int | None = Field(default=None, ge=0)
    op: str = "before_update"
    where: str = ""
    seconds: Seconds | None = Field(default=None, ge=0)
    call: int | None = Field(default=None, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: dict[str, object]) -> dict[str, object]:
        kind = KINDS.get(str(values.get("kind")))
        if kind is None:
            return values
        defaults: dict[str, object] = {}
        if kind.places:
            defaults["where"] = kind.places[0]
        if kind.seconds is not None:
            defaults["seconds"] = kind.seconds
        if kind.takes_call:
            defaults["call"] = 1
        return {**defaults, **values}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind not in KINDS:
            raise unknown_name("fault", self.kind, KINDS)
        kind = KINDS[self.kind]
        parse_moment(self.op)
        for target in ("rank", "node"):
            given = getattr(self, target) is not None
            check(given == (kind.target == target), f"fault {self.kind} {_takes(kind.target)}")
        if kind.places:
            check(self.where in kind.places, f"fault {self.kind}: where={self.where} is none of {_words(kind.places)}")
        for key, taken in (("where", kind.places), ("seconds", kind.seconds is not None), ("call", kind.takes_call)):
            check(bool(taken) or getattr(self, key) in ("", None), f"fault {self.kind} takes no {key}=")
        return self

    @classmethod
    def parse(cls, text: str) -> Self:
        """`KIND@rank=R,iteration=I[,op=MOMENT][,where=PLACE][,seconds=S][,call=N]`; some kinds take `node=` or neither.

        Raises:
            ConfigError: it is spelled differently or names an unknown kind, key, place or moment.
        """
        kind, _, rest = text.partition("@")
        if kind not in KINDS:
            raise unknown_name("fault", kind, KINDS)
        pairs = dict(part.partition("=")[::2] for part in rest.split(",") if part)
        target = KINDS[kind].target
        if target and target not in pairs:
            raise ConfigError(f"fault {text!r} needs {target}=, as in {kind}@{target}=1,iteration=11")
        return validate(cls, {"kind": kind} | pairs, f"fault {text!r}", lax=True)

    def __str__(self) -> str:
        """The spelling that `parse` reads."""
        keys = ("rank", "node", "iteration", "op", "where", "seconds", "call")
        values = {key: getattr(self, key) for key in keys}
        fields = [f"{key}={_spell(value)}" for key, value in values.items() if value not in (None, "")]
        return f"{self.kind}@{','.join(fields)}"


def spelling(kind: str) -> str:
    """How a fault of that kind is written, with all it may take."""
    facts = KINDS[kind]
    keys = [f"{facts.target}=K"] if facts.target else []
    keys.append("iteration=I[,op=MOMENT]")
    optional = {"where": "|".join(facts.places), "seconds": "S" if facts.seconds is not None else "",
                "call": "N" if facts.takes_call else ""}  # fmt: skip
    return f"{kind}@{','.join(keys)}" + "".join(f"[,{key}={value}]" for key, value in optional.items() if value)


def _takes(target: Target) -> str:
    return f"takes {target}=" if target else "strikes all and takes neither rank= nor node="


def _words(places: tuple[str, ...]) -> str:
    return ", ".join(places)


def _spell(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
