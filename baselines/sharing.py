"""Where Python hands shared memory over to a process that writes, and the end of that.

Python does it by a thread and a socket, in a folder below /tmp that stays if the trainer is killed.
"""

from __future__ import annotations

from multiprocessing import process, resource_sharer
from pathlib import Path
from typing import Final

from capricorn.units import Seconds

MAX_LENGTH: Final = 89
"""Of a folder for sockets: the kernel takes names of 107 bytes, and Python's are up to 18."""


def share_in(folder: Path) -> None:
    """Puts the socket into that folder, which others remove, unless it is made already or the name is too long."""
    config = process.current_process()._config  # type: ignore[attr-defined]
    if config.get("tempdir") is None and len(str(folder)) <= MAX_LENGTH:
        config["tempdir"] = str(folder)


def end_sharing(patience_s: Seconds) -> None:
    """Ends the thread, and removes the socket."""
    resource_sharer.stop(timeout=patience_s)
