"""Writes files: each rank puts the raw bytes of its tensors into one file, while training waits.

capricorn-bench run --model mixtral-tiny --system examples/own_files.py:RawFiles
"""

from pathlib import Path

import torch

from capricorn import FileCheckpoints, Library


class OneFile(Library):
    """One file a rank; `self.tensors` are the live tensors that the rank owns."""

    def write(self, folder: Path) -> list[Path]:
        file = folder / f"rank{self.job.rank}.raw"
        with file.open("wb") as out:
            for tensor in self.tensors.values():
                out.write(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())
        self.charge(file.stat().st_size)
        return [file]

    def load(self, folder: Path) -> None:
        saved = torch.frombuffer(bytearray((folder / f"rank{self.job.rank}.raw").read_bytes()), dtype=torch.uint8)
        self.charge(saved.nbytes)
        sizes = [tensor.nbytes for tensor in self.tensors.values()]
        for tensor, part in zip(self.tensors.values(), saved.split(sizes), strict=True):
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


class RawFiles(FileCheckpoints):
    """Raw bytes, a file a rank, while training waits."""

    library = OneFile
