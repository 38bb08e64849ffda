"""What can be asked of other processes, which may end at any moment, also between two questions."""

from __future__ import annotations

import contextlib

import psutil


def command_of(process: psutil.Process) -> str:
    """Returns the command line; empty for a process that has ended, also if nobody has waited for it yet."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # a zombie is a NoSuchProcess
        return " ".join(process.cmdline())
    return ""


def name_of(process: psutil.Process) -> str:
    """Returns the short name, which a process may give itself; empty for one that has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name() if command_of(process) else ""
    return ""


def children_of(pid: int, *, recursive: bool = True) -> list[psutil.Process]:
    """Returns the living processes that one has started; Python's tracker of shared memory is none, as it ends too."""
    try:
        children = psutil.Process(pid).children(recursive=recursive)
    except psutil.NoSuchProcess:
        return []
    return [child for child in children if (command := command_of(child)) and "resource_tracker" not in command]


def commands() -> list[str]:
    """Returns the command lines of all living processes."""
    return [command for process in psutil.process_iter() if (command := command_of(process))]
