"""Every setting of a scenario as one list: its key, type, default and description, and the option it may be given by.

The command line, the keys of `--set` and `list settings` are made from it. Knows no click, and no system.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from capricorn.config.fields import ByteCount, ByteRate, Option
from capricorn.config.scenario import Scenario
from capricorn.units import KIB, MIB

TYPES = {int: "int", float: "float", str: "text", bool: "true|false"}
SIZES = {get_args(ByteCount)[1]: "bytes", get_args(ByteRate)[1]: "bytes/s"}
"""By what reads a field: the word for values that people write as `256KiB` or `200Mbit`."""
LIMITS = {"ge": ">= ", "gt": "> ", "le": "<= ", "lt": "< "}


class Setting(NamedTuple):
    """One field of a section of the scenario, or a section that an option stands for as a whole."""

    key: str
    """As `--set` takes it: `system.every`."""
    info: FieldInfo

    @property
    def section(self) -> str:
        return self.key.partition(".")[0]

    @property
    def field(self) -> str:
        return self.key.partition(".")[2]

    @property
    def description(self) -> str:
        return self.info.description or ""

    @property
    def default(self) -> Any:
        """Returns the default value; None where there is none, or where the value is to be computed."""
        return None if self.info.is_required() or self.info.default_factory else self.info.default

    @property
    def option(self) -> Option | None:
        return next((each for each in self.info.metadata if isinstance(each, Option)), None)

    @property
    def choices(self) -> tuple[str, ...]:
        """Returns the words that the value may be; none where it may be anything else, too."""
        kinds = _kinds(self.info.annotation)
        if kinds == (bool,):
            return ("true", "false")
        return get_args(kinds[0]) if len(kinds) == 1 and get_origin(kinds[0]) is Literal else ()

    @property
    def least(self) -> int:
        """Returns the least whole number that the value may be; 0 where nothing is said."""
        above = self._limit("gt")
        return int(self._limit("ge") or 0) if above is None else int(above) + 1

    def _limit(self, name: str) -> float | None:
        return next((limit for each in self.info.metadata if (limit := getattr(each, name, None)) is not None), None)

    def describe_type(self) -> str:
        """Returns the type in a few words: `int > 0`, `bytes`, `auto|cpu|cuda`."""
        kinds = [kind for kind in _kinds(self.info.annotation) if kind is not type(None)]
        size = next((word for reader, word in SIZES.items() if reader in _metadata(self.info)), "")
        words = [size] if size else map(_word, kinds)
        limits = [f"{sign}{limit}" for name, sign in LIMITS.items() if (limit := self._limit(name)) is not None]
        return " ".join(["|".join(words), ", ".join(limits)]).strip()

    def describe_default(self) -> str:
        """Returns the default as it may be written: `256KiB`, `true`; `-` where there is none."""
        value = self.default
        if value in (None, ""):
            return "-"
        if isinstance(value, bool):
            return str(value).lower()
        if "_bytes" in self.key and isinstance(value, int) and value:
            unit = next(((name, size) for name, size in (("MiB", MIB), ("KiB", KIB)) if value % size == 0), ("", 1))
            return f"{value // unit[1]}{unit[0]}"
        return f"{value:g}" if isinstance(value, float) else str(value)


@cache
def all_settings() -> tuple[Setting, ...]:
    """Returns every setting that `--set` takes, by section; what is computed is no setting."""
    return tuple(setting for section in sections() for setting in settings_in(*section))


@cache
def options() -> tuple[Setting, ...]:
    """Returns the settings that have an option, and the sections that one stands for as a whole."""
    whole = [Setting(name, info) for name, info in Scenario.model_fields.items()]
    return tuple(setting for setting in (*whole, *all_settings()) if setting.option)


def sections() -> Iterator[tuple[str, type[BaseModel]]]:
    """Yields the sections of a scenario by name, each with the model of its settings."""
    for name, info in Scenario.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield name, info.annotation


def settings_in(section: str, model: type[BaseModel]) -> Iterator[Setting]:
    """Yields the settings of one section; a table is none, but its keys are."""
    for name, info in model.model_fields.items():
        if get_origin(info.annotation) is not dict:
            yield Setting(f"{section}.{name}", info)


def _kinds(annotation: Any) -> tuple[Any, ...]:
    """Returns the types that a value may have, without what Annotated adds to them."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kinds(inner[0])
    if origin in (Union, UnionType):
        return tuple(kind for member in inner for kind in _kinds(member))
    return (annotation,)


def _word(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    return TYPES.get(kind, getattr(kind, "__name__", "value"))


def _metadata(info: FieldInfo) -> list[Any]:
    """Returns what the field's type is annotated with, also that of `Annotated[...] | None`."""
    inner = [each for member in get_args(info.annotation) for each in getattr(member, "__metadata__", ())]
    return [*info.metadata, *inner]
