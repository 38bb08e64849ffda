"""The memory of a file on tmpfs, all of it taken before it is used: claimed, in huge pages where they are to be had.

The first copy into pages that are not there costs 3-4 times a later one. Knows nothing of what lies in the file.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from capricorn.units import MIB, Bytes, BytesPerSecond

MOUNTS: Final = Path("/proc/self/mounts")
SAMPLE_BYTES: Final[Bytes] = 64 * MIB
_POPULATED_BYTES: Final[Bytes] = 64 * MIB
"""At a time, so that a signal is heard in between."""
_MADV_POPULATE_WRITE: Final = 23  # not named by the mmap module of Python 3.11
_NOT_KNOWN: Final = (errno.EINVAL, errno.ENOSYS)
"""What a kernel older than 5.14 answers."""


def make_mapping(fd: int, num_bytes: Bytes, *, advised: bool) -> mmap.mmap:
    """Returns a mapping of an open file on tmpfs, which gets that size and all its memory.

    Args:
        fd: the file; what it holds stays.
        num_bytes: its size.
        advised: whether it gets huge pages if it asks for them, see `takes_advice`.

    Raises:
        OSError: with ENOSPC if the tmpfs is full.
    """
    # What is claimed before it is mapped can not be advised, and is in small pages; otherwise the claim is the faster
    # way. Without either, a full tmpfs would end the process by SIGBUS in the middle of training.
    if advised:
        os.ftruncate(fd, num_bytes)
    elif os.fstat(fd).st_size != num_bytes:
        os.posix_fallocate(fd, 0, num_bytes)
    mapping = mmap.mmap(fd, num_bytes)
    try:
        if advised:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        populate(mapping)
    except BaseException:
        mapping.close()
        raise
    return mapping


def populate(mapping: mmap.mmap) -> None:
    """Takes the memory of a mapping; other threads run meanwhile, since the GIL is released.

    Raises:
        OSError: with ENOSPC if the tmpfs is full.
    """
    first = ctypes.c_char.from_buffer(mapping)
    address = ctypes.addressof(first)
    del first  # or the mapping could not be closed
    for start in range(0, len(mapping), _POPULATED_BYTES):
        error = _madvise(address + start, min(_POPULATED_BYTES, len(mapping) - start), _MADV_POPULATE_WRITE)
        if error in _NOT_KNOWN:
            _touch(mapping)
            return
        if error:  # EFAULT stands for the SIGBUS that a write would get
            number = errno.ENOSPC if error == errno.EFAULT else error
            raise OSError(number, os.strerror(number))


def takes_advice(folder: Path, mounts: Iterable[str] | None = None) -> bool:
    """Tells whether a file in the folder gets huge pages if it asks for them: `huge=advise` of its mount.

    With `huge=always` and `huge=within_size` it gets them unasked, and without an option it does not.

    Args:
        folder: in which it is made.
        mounts: the lines of /proc/self/mounts, which are read if they are not given.
    """
    lines = _read_mounts() if mounts is None else mounts
    found, options = Path("/"), ""
    for line in lines:
        _, point, _, text, *_ = line.split()
        place = Path(point)
        if folder.is_relative_to(place) and len(place.parts) >= len(found.parts):
            found, options = place, text  # of equal places the last hides the others
    return "huge=advise" in options.split(",")


def populate_rate(folder: Path, num_bytes: Bytes = SAMPLE_BYTES) -> BytesPerSecond:
    """Returns how fast one thread takes memory in the folder now, by a sample that has no name and leaves nothing.

    Raises:
        OSError: the folder cannot be written, or the sample finds no room.
    """
    fd = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        begin_s = time.perf_counter()
        mapping = make_mapping(fd, num_bytes, advised=takes_advice(folder.resolve()))
        duration_s = time.perf_counter() - begin_s
        mapping.close()
    finally:
        os.close(fd)
    return num_bytes / duration_s


def _read_mounts() -> list[str]:
    try:
        return MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _madvise(address: int, num_bytes: Bytes, advice: int) -> int:
    """Returns the errno of the call, 0 if it succeeds. The method of mmap does the same, but keeps the GIL."""
    call = ctypes.CDLL(None, use_errno=True).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return ctypes.get_errno() if call(address, num_bytes, advice) else 0


def _touch(mapping: mmap.mmap) -> None:
    for offset in range(0, len(mapping), mmap.PAGESIZE):
        mapping[offset] = mapping[offset]
