"""The errors a user may see, each with the exit code it ends a command with, and notes. Knows nothing else of the
project.
"""

from __future__ import annotations

import contextlib
import difflib
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from typing import ClassVar, Final

SHOWN: Final = 3
"""Of a list of differences in a message, how many are told."""


class CapricornError(Exception):
    """Something a user can act on; its message says what, the value, and what to do."""

    exit_code: ClassVar[int] = 1


class ConfigError(CapricornError, ValueError):
    """The user's mistake in an option, a file or a name."""

    exit_code: ClassVar[int] = 2


class StateError(ConfigError):
    """A state that cannot be kept exactly as it was given; the message names the key."""


class StateChangedError(StateError):
    """A live tensor that is no longer what was laid out."""


class LayoutMismatchError(ConfigError):
    """Copies that are of a state of other names, dtypes or shapes; they are left as they are."""


class StoreError(CapricornError):
    """A memory store that cannot be made, written or read."""


class RecordError(CapricornError):
    """What a run leaves cannot be written, so that to go on is of no use."""


class TransportError(CapricornError):
    """A peer that cannot be reached, was refused, or did not answer in time."""


class PeerLostError(TransportError):
    """A rank that is gone, or did not come in time to what all ranks do together."""


class OutOfStepError(CapricornError):
    """Ranks that save different iterations at the same moment, of which no checkpoint may be made."""


class OrderError(ConfigError):
    """An iteration that is no number or not above the last one, or a restore after training began."""


class NoCompleteCheckpointError(CapricornError):
    """No iteration survives on every owner, so nothing can be restored."""


def in_words(error: BaseException) -> str:
    """Returns what went wrong in one line; an error that is not ours is named by its type as well."""
    text = " ".join(str(error).partition("\n")[0].split())
    return text if isinstance(error, CapricornError) else f"{type(error).__name__}: {text}".removesuffix(": ")


def told(why: str, *, is_users_mistake: bool) -> CapricornError:
    """Returns the error for what another process says has failed, and whether by the user's mistake."""
    return ConfigError(why) if is_users_mistake else CapricornError(why)


@cache
def note_once(text: str) -> None:
    """Says on stderr, once in a process, what is no error and yet to be known."""
    with contextlib.suppress(OSError):  # nobody can be told where stderr is closed or full
        print(f"note: {text}", file=sys.stderr)


def shortened(found: Sequence[str]) -> str:
    """Returns the first differences, and how many more there are."""
    more = f", and {len(found) - SHOWN} more differ" if len(found) > SHOWN else ""
    return "; ".join(found[:SHOWN]) + more


def unknown_name(what: str, name: str, known: Iterable[str]) -> ConfigError:
    """The error for a name that is not among the known ones, with the nearest of them."""
    names = sorted(known)
    nearest = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return ConfigError(f"unknown {what} {name!r}; {hint}known: {', '.join(names)}")
