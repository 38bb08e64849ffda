"""`torch.save`, as most training loops call it: every rank writes one file while training waits."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar, cast

import torch
from torch.utils.serialization import config

from .file_checkpoints import FileCheckpoints, Library


class OneFileEach(Library):
    """A file a rank, read with `weights_only=True`."""

    def write(self, folder: Path) -> list[Path]:
        file = self._file_in(folder)
        with without_crc32():
            torch.save(self.tensors, file)
        self.charge(file.stat().st_size)
        return [file]

    def load(self, folder: Path) -> None:
        file = self._file_in(folder)
        self.charge(file.stat().st_size)
        saved = torch.load(file, map_location="cpu", weights_only=True)
        for key, tensor in self.tensors.items():
            tensor.copy_(saved[key])

    def _file_in(self, folder: Path) -> Path:
        return folder / f"rank{self.job.rank}.pt"


class TorchSave(FileCheckpoints):
    """`torch.save` of every checkpoint, complete once all ranks have written.

    What stays wrong: a flipped bit loads without a word.
    Source: `torch.save` of the torch that is installed.
    """

    library: ClassVar[type[Library]] = OneFileEach


def without_crc32() -> AbstractContextManager[None]:
    """Makes `torch.save` quick, on this thread and inside this context.

    It then computes no checksums, which cost most of its time and which `torch.load` never looks at.
    """
    return cast(AbstractContextManager[None], config.patch({"save.compute_crc32": False}))  # type: ignore[attr-defined]
