"""A thread beside training whose end is not missed: the training thread hears why it ended."""

from __future__ import annotations

import threading

from capricorn.errors import CapricornError, in_words


class WatchedThread(threading.Thread):
    """A daemon thread that keeps the error which ended it, until the training thread asks."""

    _error: BaseException | None = None

    def run(self) -> None:
        try:
            super().run()
        except BaseException as error:  # noqa: BLE001 - whatever it is, `check` raises it
            self._error = error

    def check(self) -> None:
        """Tells whether it has ended by an error.

        Raises:
            CapricornError: it has, and why.
        """
        if self._error is not None:
            raise CapricornError(f"thread {self.name} has ended: {in_words(self._error)}") from self._error
