"""How all ranks take the same checkpoint from files, and hear of it if one of them cannot.

Collective; knows folders and a library, but no save.
"""

from __future__ import annotations

from pathlib import Path

from torch.distributed import ProcessGroup

from capricorn.errors import NoCompleteCheckpointError, StoreError
from capricorn.runtime.comm.collectives import maximum

from .file_writer import in_words
from .folders import Commit, Folders
from .library import Library


def agree(folders: Folders, commit: Commit, rank: int, group: ProcessGroup) -> int:
    """The newest complete iteration, as rank 0 sees it.

    Raises:
        NoCompleteCheckpointError: there is none.
        ConfigError: it is of other ranks or another state than `commit` has.
    """
    complete = folders.complete() if rank == 0 else []
    iteration = maximum(group, max(complete, default=0))
    if iteration == 0:
        raise NoCompleteCheckpointError(f"{folders.root} holds no complete checkpoint")
    folder = folders.of(iteration)
    written = Commit.read(folder)
    if written is None:
        raise StoreError(f"rank {rank} cannot read {folder}, which rank 0 takes for complete; do both see one folder?")
    commit.check(written, folder)
    return iteration


def load_together(library: Library, folder: Path, rank: int, group: ProcessGroup) -> None:
    """Reads every rank's part of a checkpoint into its live tensors.

    Raises:
        StoreError: on all ranks, if one could not.
    """
    failure = ""
    try:
        library.load(folder)
    except Exception as error:  # noqa: BLE001 - a library raises what it likes, and the others wait to hear of it
        failure = f": {in_words(error)}"
    failed = maximum(group, rank + 1 if failure else 0) - 1
    if failed >= 0:
        raise StoreError(f"rank {rank if failure else failed} cannot load {folder}{failure}")
