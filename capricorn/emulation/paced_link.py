"""A link paced in user space: a rate as a clock in a small file that all its users share.

Needs no privilege and no daemon. Knows bytes and time, but no node, no socket and no payload.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, Self

from capricorn.errors import TransportError
from capricorn.units import Bytes, BytesPerSecond, Seconds

BURST_S: Final = 0.002
"""How much of the rate an idle link saves up, so that a late wake-up does not cost throughput."""

_MAGIC: Final = b"CAPRLINK"
_RECORD: Final = struct.Struct("=8s6d")
_RATE, _BURST, _FREE_AT, _HIGH, _LOW, _NOW = range(1, 7)  # the doubles after the magic; counts are exact up to 2^53


class Link:
    """One direction of a node's uplink, or any other shared rate.

    The file holds when all bytes accepted so far will have left (GCRA, ITU-T I.371), by a clock that is common to all
    processes of the machine. Threads may share an instance; after a fork each process must open its own.
    """

    @classmethod
    def create(cls, path: Path, bytes_per_s: BytesPerSecond) -> Self:
        """Makes the file of an idle link, for its user alone.

        Raises:
            TransportError: it cannot be made, or is there already.
        """
        assert bytes_per_s > 0
        try:
            path.touch(mode=0o600, exist_ok=False)
            # Written, not mapped: where there is no room this is an error, and a store to a mapping ends the process.
            path.write_bytes(_RECORD.pack(_MAGIC, bytes_per_s, BURST_S, 0.0, 0.0, 0.0, bytes_per_s))
        except OSError as error:
            raise TransportError(f"cannot make the link {path}: {error.strerror}") from None
        return cls(path)

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], Seconds] = time.monotonic,
        sleep: Callable[[Seconds], object] = time.sleep,
    ) -> None:
        """Opens a link that `create` made.

        Raises:
            TransportError: there is none.
        """
        self.path = path
        self._clock, self._sleep = clock, sleep
        self._threads = threading.Lock()  # flock keeps processes apart, not the threads that share one open file
        try:
            self._file = path.open("r+b", buffering=0)
        except OSError as error:
            raise TransportError(f"cannot open the link {path}: {error.strerror}") from None
        record = self._file.read(_RECORD.size)
        if len(record) < _RECORD.size or not record.startswith(_MAGIC):
            self._file.close()
            raise TransportError(f"{path} is not a link")
        self._map = mmap.mmap(self._file.fileno(), _RECORD.size)
        # Each field is stored whole, by one instruction, so a writer that is killed leaves no half of one.
        self._fields = memoryview(self._map).cast("d")
        self.bytes_per_s: BytesPerSecond = self._fields[_RATE]
        """The rate of the link as it was made."""

    def reserve(self, num_bytes: Bytes, *, low: bool = False) -> Seconds:
        """Books these bytes; returns the time by the clock at which they will have left.

        The low class is accepted only when the link is idle, and sleeps until then.

        Raises:
            TransportError: the link was closed meanwhile.
        """
        while True:
            with self._locked():
                free_at, now = self._fields[_FREE_AT], self._clock()
                if free_at <= now or not low:
                    return self._book(num_bytes, max(now - self._fields[_BURST], free_at), _LOW if low else _HIGH)
            self._sleep(free_at - now)

    def sleep_until(self, moment: Seconds) -> None:
        """Returns at that time by the clock, or at once if it has passed."""
        while (remaining := moment - self._clock()) > 0:
            self._sleep(remaining)

    def slow_down(self, frac: float) -> None:
        """Lets the link carry that fraction of its rate from now on, for all users; 1 makes it good again.

        Raises:
            TransportError: the link was closed meanwhile.
        """
        with self._locked():
            self._fields[_NOW] = frac * self._fields[_RATE]

    def hold(self, seconds: Seconds) -> None:
        """Lets nothing more leave for that long, for all users; 0 ends it for what is not booked yet.

        Raises:
            TransportError: the link was closed meanwhile.
        """
        with self._locked():
            self._fields[_FREE_AT] = self._clock() + seconds

    def close(self) -> None:
        """Gives up the file, which stays; a thread that waits for its turn is told so when it wakes."""
        with self._threads:
            self._fields.release()
            self._map.close()
            self._file.close()

    def _book(self, num_bytes: Bytes, start: Seconds, counter: int) -> Seconds:
        finish = start + num_bytes / self._fields[_NOW]
        self._fields[_FREE_AT] = finish
        self._fields[counter] += num_bytes
        return finish

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._threads:
            if self._file.closed:
                raise TransportError(f"the link {self.path} is closed")
            # The kernel takes the lock from a holder that is killed, so nobody can leave it locked.
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)


def create_links(folder: Path, rates: Mapping[str, BytesPerSecond]) -> None:
    """Makes a folder and in it a link of each name and rate.

    Raises:
        TransportError: it cannot be made, or is there already.
    """
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise TransportError(f"cannot make the links {folder}: {error.strerror}") from None
    for name, bytes_per_s in rates.items():
        Link.create(folder / name, bytes_per_s).close()
