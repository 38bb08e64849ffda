"""One fault as it is asked for: what kind, to whom, when, and how it is spelled.

Pure values. A record that names a kind of one's own is read without running anything: only `parse` and `make` do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Self

from pydantic import Field, model_validator

from capricorn.config.fault_kinds import DISK, KINDS, FaultKind, Target, kind_of
from capricorn.config.fields import SettingsModel, check, validate
from capricorn.config.own_code import absolute
from capricorn.errors import ConfigError
from capricorn.hooks import parse_moment
from capricorn.units import Seconds

MAX_SECONDS: Final[Seconds] = 1e9


class FaultSpec(SettingsModel):
    """One fault: what, to whom, in which iteration, at which moment."""

    kind: str
    iteration: int = Field(gt=0)
    rank: int | None = Field(default=None, ge=0)
    node: int | None = Field(default=None, ge=0)
    op: str = "before_update"
    where: str = ""
    seconds: Seconds | None = Field(default=None, ge=0, le=MAX_SECONDS)
    call: int | None = Field(default=None, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: dict[str, object]) -> dict[str, object]:
        """Fills in what is left out or empty, as the kind says: a record may be older than a key of its kind."""
        kind = KINDS.get(str(values.get("kind")))
        return values if kind is None else kind.defaults | {k: v for k, v in values.items() if v not in ("", None)}

    @model_validator(mode="after")
    def _check(self) -> Self:
        parse_moment(self.op)
        if kind := KINDS.get(self.kind):
            self._check_fits(kind)
        return self

    @classmethod
    def make(cls, values: Mapping[str, Any], where: str, *, lax: bool = False) -> Self:
        """Returns the fault of these fields, whose kind may be one's own; what is left out is as the kind says.

        Raises:
            ConfigError: the kind is unknown or cannot be loaded, or a field does not fit it.
        """
        kind = kind_of(values["kind"])
        made = validate(cls, kind.defaults | {**values}, where, lax=lax)
        made._check_fits(kind)
        return made

    @classmethod
    def parse(cls, text: str) -> Self:
        """`KIND@rank=R,iteration=I[,op=MOMENT][,where=PLACE][,seconds=S][,call=N]`; some kinds take `node=` or neither.

        Raises:
            ConfigError: it is spelled differently or names an unknown kind, key, place or moment.
        """
        name, _, rest = text.partition("@")
        name = absolute(name)
        pairs = dict(part.partition("=")[::2] for part in rest.split(",") if part)
        target = kind_of(name).target
        if target and target not in pairs:
            raise ConfigError(f"fault {text!r} needs {target}=, as in {name}@{target}=1,iteration=11")
        return cls.make({"kind": name} | pairs, f"fault {text!r}", lax=True)

    @property
    def hits_persistent_tier(self) -> bool:
        """Whether it damages what lies on the persistent tier, or leaves nothing else."""
        return kind_of(self.kind).hits_persistent_tier or self.where == DISK

    @property
    def num_persisted(self) -> int:
        """How many checkpoints must be persisted when it comes, so that one is left to be tried."""
        return 2 if self.where == DISK else int(self.hits_persistent_tier)

    def _check_fits(self, kind: FaultKind) -> None:
        """Raises ConfigError for a key or a place that the kind does not take."""
        for target in ("rank", "node"):
            is_given = getattr(self, target) is not None
            check(is_given == (kind.target == target), f"fault {self.kind} {_takes(kind.target)}")
        if kind.places:
            places = ", ".join(kind.places)
            check(self.where in kind.places, f"fault {self.kind}: where={self.where} is none of {places}")
        for key, taken in (("where", kind.places), ("seconds", kind.seconds is not None), ("call", kind.takes_call)):
            check(bool(taken) or getattr(self, key) in ("", None), f"fault {self.kind} takes no {key}=")

    def __str__(self) -> str:
        """The spelling that `parse` reads."""
        keys = ("rank", "node", "iteration", "op", "where", "seconds", "call")
        values = {key: getattr(self, key) for key in keys}
        fields = [f"{key}={_spell(value)}" for key, value in values.items() if value not in (None, "")]
        return f"{self.kind}@{','.join(fields)}"


def spelling(name: str) -> str:
    """Returns how a fault of that kind is written, with all it may take."""
    kind = kind_of(name)
    keys = [f"{kind.target}=K"] if kind.target else []
    keys.append("iteration=I[,op=MOMENT]")
    optional = {"where": "|".join(kind.places), "seconds": "S" if kind.seconds is not None else "",
                "call": "N" if kind.takes_call else ""}  # fmt: skip
    return f"{name}@{','.join(keys)}" + "".join(f"[,{key}={value}]" for key, value in optional.items() if value)


def _takes(target: Target) -> str:
    return f"takes {target}=" if target else "hits everybody and takes neither rank= nor node="


def _spell(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
