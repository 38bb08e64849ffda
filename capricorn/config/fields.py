"""What settings are built from: frozen models, sizes and rates as people write them, one line for each error."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from capricorn.errors import ConfigError
from capricorn.units import parse_bytes, parse_rate


def check(condition: bool, message: str) -> None:
    """Raises ConfigError with the message unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def _read_bytes(value: Any) -> Any:
    return parse_bytes(value) if isinstance(value, str) else value


def _read_rate(value: Any) -> Any:
    return parse_rate(value) if isinstance(value, str) else value


ByteCount = Annotated[int, BeforeValidator(_read_bytes)]
"""Bytes, also as people write them: `256KiB`."""
ByteRate = Annotated[float, BeforeValidator(_read_rate)]
"""Bytes a second, also as people write them: `200Mbit`, `5GB/s`."""

MIN_TIMEOUT_S: Final = 0.05
"""A shorter wait is over before a healthy peer could answer, and some of those who wait round it to none at all."""
MAX_TIMEOUT_S: Final = 7 * 24 * 3600.0
Timeout = Annotated[float, Field(ge=MIN_TIMEOUT_S, le=MAX_TIMEOUT_S, allow_inf_nan=False)]
"""Seconds that somebody waits at most: never none, and never without end."""

MAX_NAME_BYTES: Final = 64
"""A run's folders bear the names of its system and its model, a time and more, and a file system takes 255 bytes."""


def why_no_path_part(text: str) -> str:
    """Returns why the text cannot be part of the name of a file; nothing if it can."""
    if not text:
        return "is empty"
    if "/" in text:
        return "has a slash"
    if text[0] in ".-":
        return f"begins with {text[0]!r}"
    if any("\ud800" <= char <= "\udfff" for char in text):
        return "is not UTF-8"
    if not text.isprintable():
        return "has characters that cannot be printed"
    if text != text.strip():
        return "begins or ends with a space"
    if len(text.encode()) > MAX_NAME_BYTES:
        return f"is longer than {MAX_NAME_BYTES} bytes"
    return ""


def check_path_part(text: str, what: str) -> None:
    """Raises ConfigError if the text, which is called `what`, cannot be part of the name of a file."""
    if reason := why_no_path_part(text):
        raise ConfigError(f"{what} {text!r} {reason}, and folders bear it: use letters, digits, dots and dashes")


def _path_part(text: str) -> str:
    if reason := why_no_path_part(text):
        raise ValueError(f"{reason}, and folders bear this name: use letters, digits, dots and dashes")
    return text


PathPart = Annotated[str, AfterValidator(_path_part)]
"""A name that becomes part of the names of files and folders."""


class FrozenModel(BaseModel):
    """A value that cannot be changed and accepts no unknown field; in JSON, numbers that are not finite are texts."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class SettingsModel(FrozenModel):
    """Settings that somebody chose, or what was computed from them: every number of them is finite."""

    model_config = ConfigDict(allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class Option:
    """Makes a field an option of the commands that train: `Annotated[int, Option("--seed", "Work", "S")]`.

    The field says the rest: its description is the help text, its type and limits are those of the value.
    """

    name: str
    group: str
    """The heading that it stands under in the help."""
    metavar: str = ""
    """The kind of its value, in capitals; what completes it in a shell goes by this word."""
    written: str | tuple[str, ...] | None = None
    """The default as people write it, where that is read into the value: a name, `every-iter`."""
    computed: bool = False
    """Whether the default depends on the machine or on other options, as the description then says."""
    parameter: str = ""
    """Its name in Python, where that is not the option's: `faults` of --fault."""

    @property
    def parameter_name(self) -> str:
        return self.parameter or self.name.removeprefix("--").replace("-", "_")


T = TypeVar("T", bound=BaseModel)


def validate(model: type[T], values: Mapping[str, Any], where: str, *, lax: bool = False) -> T:
    """Returns the values as that model.

    Raises:
        ConfigError: in one line: where, which field, what is wrong with its value.
    """
    try:
        return model.model_validate(dict(values), strict=False if lax else None)
    except ConfigError:
        raise
    except ValidationError as error:
        raise ConfigError(_describe(error, where, model)) from None


_WORDS = {
    "int_parsing": "should be a whole number",
    "float_parsing": "should be a number",
    "bool_parsing": "should be true or false",
}
"""By pydantic's type of an error: what it says of a parser, in words for people who write settings."""


def _message(fault: Mapping[str, Any]) -> str:
    said = str(fault["msg"]).removeprefix("Value error, ").replace("Input should", "should", 1)
    return _WORDS.get(fault["type"], said)


def _describe(error: ValidationError, where: str, model: type[BaseModel]) -> str:
    """Returns the first error in one line; an unknown key goes first, as it may be the one that is missed."""
    faults: Sequence[Mapping[str, Any]] = error.errors()
    first = next((fault for fault in faults if fault["type"] == "extra_forbidden"), faults[0])
    key = ".".join(str(part) for part in first["loc"])
    if isinstance(cause := first.get("ctx", {}).get("error"), ConfigError):
        return str(cause)
    if first["type"] == "extra_forbidden":
        nearest = difflib.get_close_matches(key, model.model_fields, n=1)
        return f"{where}: unknown key {key!r}" + (f"; did you mean {nearest[0]!r}?" if nearest else "")
    if first["type"] == "missing":
        return f"{where}: {key} is missing; it has no default"
    return f"{where}: {key} = {first.get('input')!r}: {_message(first)}"
