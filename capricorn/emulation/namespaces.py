"""The kernel's namespaces by their descriptors: makes and enters them. Knows nothing of what is put into them."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000


def new_user() -> int:
    """Returns the descriptor of a new user namespace, which the process is then in; in it we may do what root may.

    Raises:
        OSError: it is not allowed.
    """
    uid, gid = os.geteuid(), os.getegid()
    _check(_LIBC.unshare(_CLONE_NEWUSER), "a user namespace")
    this = Path("/proc/self")
    (this / "setgroups").write_text("deny", encoding="ascii")  # else the kernel lets nobody but root map a group
    (this / "uid_map").write_text(f"0 {uid} 1", encoding="ascii")
    (this / "gid_map").write_text(f"0 {gid} 1", encoding="ascii")
    return os.open("/proc/self/ns/user", os.O_RDONLY)


def new_net() -> int:
    """Returns the descriptor of a new network namespace, which the process is then in.

    Raises:
        OSError: it is not allowed.
    """
    _check(_LIBC.unshare(_CLONE_NEWNET), "a network namespace")
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def enter(fd: int) -> None:
    """Enters the namespace with that descriptor for good; the process must have one thread.

    Raises:
        OSError: it is not allowed.
    """
    _check(_LIBC.setns(fd, 0), f"entering namespace {fd}")


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
