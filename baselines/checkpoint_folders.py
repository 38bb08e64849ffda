"""Checkpoints as folders on a file system: which are whole, and which may go. Knows no library, tensor or save."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from capricorn.config.fields import FrozenModel
from capricorn.errors import ConfigError

COMMIT: Final = "commit.json"
PREFIX: Final = "iteration-"
REMOVED: Final = "removed-"


class Commit(FrozenModel):
    """Says whose states lie in a folder. Rank 0 writes it last, and a folder without it is no checkpoint."""

    digests: tuple[int, ...]
    """By rank: the digest of the layout of its state."""

    def write(self, folder: Path) -> Path:
        return write_whole(folder / COMMIT, self.model_dump_json())

    @classmethod
    def read(cls, folder: Path) -> Commit | None:
        """Returns the commit of a checkpoint, or None where there is none or only a part of one."""
        try:
            return cls.model_validate_json((folder / COMMIT).read_bytes())
        except (OSError, ValidationError):
            return None

    def check(self, written: Commit, folder: Path) -> None:
        """Refuses a checkpoint from which a job like this one cannot go on.

        Raises:
            ConfigError: `written`, the commit in that folder, is of other ranks or another layout than this one.
        """
        before, now = len(written.digests), len(self.digests)
        if before != now:
            raise ConfigError(f"{folder} was written by {before} ranks, now there are {now}; start {before}")
        for rank, (then, mine) in enumerate(zip(written.digests, self.digests, strict=True)):
            if then != mine:
                raise ConfigError(f"{folder} has another layout for rank {rank}; start the model it was written by")


class CheckpointFolders:
    """The folders of a run's checkpoints. All ranks look, rank 0 alone removes."""

    def __init__(self, root: Path, is_whole: Callable[[Path, int], bool]) -> None:
        """`is_whole` tells, by the library's own sign, whether all that so many ranks wrote is in a folder."""
        self.root, self._is_whole = root, is_whole

    def of(self, iteration: int) -> Path:
        return self.root / f"{PREFIX}{iteration:08}"

    def complete(self) -> list[int]:
        """Returns the iterations that can be restored, ascending."""
        return sorted(iteration for iteration, folder in self._known().items() if self._is_complete(folder))

    def prune(self, newest: int, keep: int) -> None:
        """Removes all up to `newest` but the `keep` newest complete ones; later ones may be on their way."""
        kept = [iteration for iteration in self.complete() if iteration <= newest][-keep:]
        self._remove(iteration for iteration in self._known() if iteration <= newest and iteration not in kept)

    def forget_after(self, iteration: int | None) -> None:
        """Removes later ones, None for all, and what an abandoned attempt has left half written."""
        kept = [known for known in self.complete() if iteration is not None and known <= iteration]
        self._remove(known for known in self._known() if known not in kept)

    def _known(self) -> dict[int, Path]:
        folders = (path for path in self.root.glob(f"{PREFIX}*") if path.is_dir())
        return {int(path.name.removeprefix(PREFIX)): path for path in folders}

    def _is_complete(self, folder: Path) -> bool:
        commit = Commit.read(folder)
        return commit is not None and self._is_whole(folder, len(commit.digests))

    def _remove(self, iterations: Iterable[int]) -> None:
        for iteration in iterations:
            # At once under a name that nobody trusts: a death halfway would leave a folder that looks whole.
            self.of(iteration).rename(self.root / f"{REMOVED}{iteration:08}")
        for folder in self.root.glob(f"{REMOVED}*"):
            shutil.rmtree(folder)


def write_whole(file: Path, text: str) -> Path:
    """Writes a file that has its name only once all of it is there; returns the file."""
    temporary = file.with_name(f"{file.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    return temporary.rename(file)


def sync(files: Iterable[Path], root: Path) -> None:
    """Returns when these files, and the folders down from `root` that name them, are on the medium."""
    files = list(files)
    folders = {folder for file in files for folder in file.parents if folder == root or root in folder.parents}
    for path in (*files, *folders):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
