"""JSON that every reader takes: numbers that are not finite, for which it has no spelling, are texts.

They are spelled `"NaN"`, `"Infinity"` and `"-Infinity"`, as pydantic spells them in `FrozenModel`: jq takes the texts
as they are, and pandas makes numbers of them in a column of numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

SPELLINGS: Final[Mapping[str, float]] = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def as_json(value: Any, *, indent: int | None = None) -> str:
    """Returns the value as JSON text."""
    return json.dumps(spelled(value), indent=indent, allow_nan=False)


def spelled(value: Any) -> Any:
    """Returns the value with numbers that are not finite spelled as texts."""
    if isinstance(value, float) and not math.isfinite(value):
        return next(text for text, number in SPELLINGS.items() if repr(number) == repr(float(value)))
    if isinstance(value, Mapping):
        return {key: spelled(each) for key, each in value.items()}
    return list(map(spelled, value)) if isinstance(value, list | tuple) else value


def numbers(value: Any) -> Any:
    """Returns the value with the texts that stand for numbers made numbers: what `spelled` was given."""
    if isinstance(value, str):
        return SPELLINGS.get(value, value)
    if isinstance(value, Mapping):
        return {key: numbers(each) for key, each in value.items()}
    return list(map(numbers, value)) if isinstance(value, list | tuple) else value
