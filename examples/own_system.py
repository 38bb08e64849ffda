"""A checkpointing system of one's own: every rank writes its state to a file, while training waits.

capricorn-bench check-system examples/own_system.py:RawFiles
capricorn-bench run --system examples/own_system.py:RawFiles
"""

import time
from pathlib import Path

import torch
import torch.distributed as dist

from capricorn import CheckpointSystem, FlatState, JobContext, NoCompleteCheckpointError, RestoreReport


class RawFiles(CheckpointSystem):
    """Keeps the two newest iterations, `N-R` being the bytes of rank R after iteration N."""

    name = "raw-files"
    kind = "files"

    def attach(self, job: JobContext, state: FlatState) -> None:
        self.job, self.state, self.latest = job, state, None
        assert job.files_dir is not None
        self.folder: Path = job.files_dir

    def after_update(self, iteration: int) -> None:
        self.state.capture()
        part, whole = self.folder / f"part-{self.job.rank}", self.folder / f"{iteration}-{self.job.rank}"
        with part.open("wb") as file:
            for tensor in self.state.tensors.values():
                file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        part.rename(whole)  # with its name it counts, and so it must be whole
        dist.barrier(self.job.control_group)
        self.latest = iteration  # now every rank has its file
        (self.folder / f"{iteration - 2}-{self.job.rank}").unlink(missing_ok=True)

    def latest_complete(self) -> int | None:
        return self.latest

    def drain(self, timeout_s: float) -> None:
        """Nothing is on its way."""

    def restore(self) -> RestoreReport:
        begin_s, ranks = time.perf_counter(), range(self.job.topology.world_size)
        dist.barrier(self.job.control_group)  # nobody writes any more
        found = {int(path.name.split("-")[0]) for path in self.folder.glob("[0-9]*-*")}
        whole = [each for each in found if all((self.folder / f"{each}-{rank}").exists() for rank in ranks)]
        if not whole:
            raise NoCompleteCheckpointError(f"{self.folder} holds no iteration of all ranks")
        self.latest = max(whole)
        agreed_s = time.perf_counter()
        data = bytearray((self.folder / f"{self.latest}-{self.job.rank}").read_bytes())
        for tensor in self.state.tensors.values():
            bytes_B, data = data[: tensor.nbytes], data[tensor.nbytes :]
            if bytes_B:
                tensor.copy_(torch.frombuffer(bytes_B, dtype=tensor.dtype).view(tensor.shape))
        self.state.publish()
        for later in (each for each in found if each > self.latest):
            (self.folder / f"{later}-{self.job.rank}").unlink(missing_ok=True)  # of a future that is given up
        dist.barrier(self.job.control_group)  # or a rank that goes on removes what another still has to find
        load_s = time.perf_counter() - agreed_s
        return RestoreReport(self.latest, ["persistent"] * len(ranks), agreed_s - begin_s, 0.0, load_s)

    def close(self) -> None:
        """Has nothing to end."""
