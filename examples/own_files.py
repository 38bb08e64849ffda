"""A system of one's own that writes files: each rank puts the raw bytes of its tensors into one file.

capricorn-bench run --model mixtral-tiny --system examples/own_files.py:RawFiles
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from capricorn import FileCheckpoints, Library


def bytes_of(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


class OneFile(Library):
    """Called by the training thread, which waits; `self.tensors` are the live tensors of this rank."""

    def write(self, folder: Path) -> list[Path]:
        file = folder / f"rank{self.job.rank}.raw"
        with file.open("wb") as out:
            for tensor in self.tensors.values():
                out.write(bytes_of(tensor))
        self.charge(file.stat().st_size)
        return [file]

    def load(self, folder: Path) -> None:
        data = bytearray((folder / f"rank{self.job.rank}.raw").read_bytes())
        self.charge(len(data))
        offset = 0
        for tensor in self.tensors.values():
            saved = torch.frombuffer(data, dtype=torch.uint8, count=tensor.nbytes, offset=offset)
            tensor.copy_(saved.view(tensor.dtype).view(tensor.shape))
            offset += tensor.nbytes


class RawFiles(FileCheckpoints):
    """Raw bytes, a file a rank, while training waits."""

    library = OneFile
