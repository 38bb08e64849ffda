"""How checkpoint traffic is scheduled: the settings of the planner, checked when they are made."""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import Field, model_validator

from capricorn.config.fields import ByteCount, SettingsModel
from capricorn.errors import unknown_name
from capricorn.units import GIB, KIB

REPLANS = ("never", "every-K", "every-iter", "speculative", "oracle")
RHO_RANGE = (0.001, 1000.0)
"""Transfer time of a checkpoint / idle time, as far as a replay makes sense of it."""


class PlannerConfig(SettingsModel):
    """How the system `capricorn` plans what it sends when."""

    spans: Literal["load", "layer", "global", "none"] = Field(
        default="load",
        description="Predict idle spans from the expert loads of the iteration, by layer, or as one average; none "
        "sends as soon as staged",
    )
    replan: str = Field(
        default="speculative",
        description="Plan anew never, every-K, every-iter, or when the profile has drifted (speculative); oracle is "
        "for ablate --trace",
    )
    gate: bool = Field(default=True, description="Start a chunk only while the link is idle at both ends")
    risk: float = Field(
        default=0.5, gt=0, lt=1, description="Fill a span at most up to this quantile of its predicted duration"
    )
    max_chunk_bytes: ByteCount = Field(
        default=256 * KIB, ge=1024, le=GIB, description="Send at most this many bytes before looking at the link again"
    )
    profile_iterations: int = Field(default=4, gt=0, description="Measure this many iterations for one plan")

    @model_validator(mode="after")
    def _check(self) -> Self:
        parse_replan(self.replan)
        return self


def parse_replan(text: str, option: str = "planner.replan") -> int | None:
    """Returns the interval of `every-K` and `every-iter`; None for the policies that have none.

    `option` is where the text was given.

    Raises:
        ConfigError: it is no such policy.
    """
    if text == "every-iter":
        return 1
    if re.fullmatch("every-[1-9][0-9]{0,8}", text):
        return int(text.removeprefix("every-"))
    if text not in REPLANS or text == "every-K":
        raise unknown_name(option, text, REPLANS)
    return None
