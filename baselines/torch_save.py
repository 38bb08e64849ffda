"""`torch.save`, as most training loops call it: every rank writes one file while training waits."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import ClassVar

import torch

from .files import FileCheckpoints
from .folders import sync
from .library import Library, Write
from .quick_save import without_crc32


class _OneFileEach(Library):
    is_async: ClassVar[bool] = False
    talks: ClassVar[bool] = False

    def begin(self, folder: Path) -> Write:
        return partial(self._write, folder)

    def is_whole(self, folder: Path, num_ranks: int) -> bool:
        return all(_file_of(folder, rank).exists() for rank in range(num_ranks))

    def load(self, folder: Path) -> None:
        file = _file_of(folder, self.job.rank)
        self.charge(file.stat().st_size)
        saved = torch.load(file, map_location="cpu", weights_only=True)
        for key, tensor in self.tensors.items():
            tensor.copy_(saved[key])

    def _write(self, folder: Path) -> list[Path]:
        file = _file_of(folder, self.job.rank)
        folder.mkdir(exist_ok=True)
        temporary = file.with_suffix(".tmp")
        with without_crc32():
            torch.save(self.tensors, temporary)
        self.charge(temporary.stat().st_size)
        if self.job.settings.fsync:
            sync([temporary], folder)  # before it has the name that makes it count
        return [temporary.rename(file)]


class TorchSave(FileCheckpoints):
    """Complete once all ranks have written; read with `weights_only=True`.

    Source: `torch.save` of the torch that is installed.
    """

    library: ClassVar[type[Library]] = _OneFileEach
    notes: ClassVar[tuple[str, ...]] = ("a flipped bit loads without a word",)


def _file_of(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.pt"
