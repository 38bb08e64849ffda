"""One deadline for several waits, and which timeouts can be one."""

from __future__ import annotations

import time
from typing import Final

from capricorn.errors import ConfigError
from capricorn.units import Seconds

MIN_S: Final[Seconds] = 0.001
"""What is shorter is none to sockets and collectives, which then wait for ever."""
MAX_S: Final[Seconds] = 1e8
"""Three years; what is longer overflows the clocks of some of them."""

OWN_FRAC: Final = 0.8
"""Part of a deadline that is for what a rank itself is busy with; in the rest it hears of the others."""


class Deadline:
    """A moment by which everything must have ended that is waited for."""

    def __init__(self, timeout_s: Seconds) -> None:
        """Starts to run.

        Raises:
            ConfigError: `timeout_s` is no time that can be waited for.
        """
        self.timeout_s = check_timeout("timeout_s", timeout_s)
        self._until_s = time.monotonic() + self.timeout_s

    @property
    def left_s(self) -> Seconds:
        """How long there is still time; 0 if it is over."""
        return max(0.0, self._until_s - time.monotonic())


def check_timeout(name: str, timeout_s: object) -> Seconds:
    """Returns a timeout as a number of seconds.

    Raises:
        ConfigError: it is not a number, or too short or too long to wait for, such as 0, inf and nan.
    """
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not is_number or not MIN_S <= timeout_s <= MAX_S:  # type: ignore[operator]
        raise ConfigError(f"{name}={timeout_s!r}: must be a number of seconds, at least {MIN_S} and at most {MAX_S:g}")
    return float(timeout_s)  # type: ignore[arg-type]
