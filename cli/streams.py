"""Stdout and stderr of the command: an error of writing to them in one line, and nothing on them that is not ours."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, TextIO

from capricorn.errors import CapricornError
from capricorn.files import memory_file

STDIN, STDOUT, STDERR = 0, 1, 2
NAMES: Final = {STDOUT: "stdout", STDERR: "stderr"}
NOTE: Final = "note: "
"""The begin of a line on stderr that is ours, by `note_once`."""


class _Output(io.FileIO):
    """A descriptor that says in one line why it cannot be written to; a broken pipe is left to click and rich."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise CapricornError(f"cannot write to {NAMES[self.fileno()]}: {error.strerror}") from None


def own_streams() -> None:
    """Makes stdout and stderr ours, unless a caller has put something in their place.

    A descriptor that is closed is opened to nowhere, before a file gets its number and is written to by mistake. A
    character that the encoding of a terminal or a path lacks is no reason to end a run: it becomes a `?`.
    """
    for number in (STDIN, STDOUT, STDERR):
        try:
            os.fstat(number)
        except OSError:  # the lowest that is free is this one
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is sys.__stdout__:
        sys.stdout = _opened(STDOUT, sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _opened(STDERR, sys.stderr)


def _opened(number: int, before: TextIO | None) -> io.TextIOWrapper:
    output = _Output(number, "w", closefd=False)
    encoding = getattr(before, "encoding", None) or "utf-8"
    is_by_line = number == STDERR or output.isatty()
    return io.TextIOWrapper(io.BufferedWriter(output), encoding, "replace", line_buffering=is_by_line)


def end_streams() -> None:
    """Writes what is left; where that fails it has been told, and the interpreter is not to tell it again."""
    for number, stream in ((STDOUT, sys.stdout), (STDERR, sys.stderr)):
        try:
            stream.flush()
        except (OSError, CapricornError):
            _redirect(os.open(os.devnull, os.O_WRONLY), number)


def hush_libraries() -> None:
    """Keeps warnings and log lines of libraries away from users, who can do nothing about them.

    `python -W` still asks for warnings.
    """
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    logging.getLogger().addHandler(logging.NullHandler())


@contextmanager
def hushed() -> Iterator[None]:
    """Keeps away what libraries print within, notes of ours excepted; after an error that it may explain it is shown.

    It works on descriptors, as extensions and processes that are started within write to them, too.
    """
    with memory_file() as said:
        _flush()
        kept = [(os.dup(number), number) for number in NAMES]
        for number in NAMES:
            os.dup2(said.fileno(), number)
        is_all_shown = False
        text = io.TextIOWrapper(said, errors="replace", write_through=True)  # also where stdout is no descriptor
        try:
            with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
                yield
        except CapricornError:  # says by itself what is wrong
            raise
        except Exception:
            is_all_shown = True
            raise
        finally:
            _flush()
            for copy, number in kept:
                _redirect(copy, number)
            text.seek(0)
            sys.stderr.writelines(line for line in text if is_all_shown or line.startswith(NOTE))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, CapricornError):  # told when something is printed
            stream.flush()


def _redirect(descriptor: int, number: int) -> None:
    """Makes a number stand for what the descriptor does, and closes that."""
    os.dup2(descriptor, number)
    os.close(descriptor)
