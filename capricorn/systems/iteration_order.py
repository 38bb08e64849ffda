"""The order of iterations that every system keeps to: whole numbers that rise. No torch at import."""

from __future__ import annotations

import numbers
import operator
from typing import Final

from capricorn.errors import OrderError

MAX_ITERATION: Final = (1 << 63) - 2
"""The largest that headers, frames and reductions of signed integers hold, and one more."""
_SHOWN_CHARACTERS: Final = 60


class IterationOrder:
    """Refuses an iteration that does not come after the last one.

    Copies are told apart by their iteration alone, and the largest is restored. A number that came before would make an
    older state pass for the newest.

    Attributes:
        last: the newest iteration that was updated or restored; None if there was none.
    """

    def __init__(self) -> None:
        self.last: int | None = None

    def check(self, iteration: object) -> int:
        """Returns the iteration as Python's integer.

        Raises:
            OrderError: it is no whole number, negative, too large, or not above the last one.
        """
        if isinstance(iteration, bool) or not isinstance(iteration, numbers.Integral):
            shown = " ".join(repr(iteration).split())[:_SHOWN_CHARACTERS]
            raise self._error(shown, f"is of type {type(iteration).__name__}; count with whole numbers")
        number = int(operator.index(iteration))
        if number < 0:
            raise self._error(str(number), "is negative; count from 0 or 1")
        if number > MAX_ITERATION:
            shown = f"of {number.bit_length()} bits"  # Python refuses to write out the largest ones
            raise self._error(shown, f"is too large; the largest is {MAX_ITERATION}")
        if self.last is not None and number <= self.last:
            raise self._error(str(number), "does not come after the last one; count on over epochs and restarts")
        return number

    def advance(self, iteration: object) -> int:
        """Returns the iteration as Python's integer, and takes it for the last one.

        Raises:
            OrderError: as `check` does.
        """
        self.last = self.check(iteration)
        return self.last

    def check_restore(self) -> None:
        """Tells that a restore begins.

        Raises:
            OrderError: training has begun, whose checkpoints a restore would take for those of an abandoned future.
        """
        if self.last is not None:
            raise OrderError(f"restore() comes before training: iteration {self.last} has been trained or restored")

    def _error(self, shown: str, what: str) -> OrderError:
        last = "there was none before" if self.last is None else f"the last one was {self.last}"
        return OrderError(f"iteration {shown} {what} ({last})")
