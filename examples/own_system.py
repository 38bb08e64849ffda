"""Does all itself: every rank writes its state to a file, while training waits.

capricorn-bench run --model mixtral-tiny --system examples/own_system.py:OwnFiles
"""

import torch
import torch.distributed as dist

from capricorn import CheckpointSystem, FlatState, JobContext, NoCompleteCheckpointError, RestoreReport


class OwnFiles(CheckpointSystem):
    """Keeps the two newest checkpoints; the file `N-R` holds the tensors of rank R after iteration N."""

    kind = "files"
    latest: int | None = None

    def attach(self, job: JobContext, state: FlatState) -> None:
        self.job, self.state, self.ranks = job, state, range(job.topology.world_size)
        self.file = lambda iteration, rank=job.rank: job.files_dir / f"{iteration}-{rank}"

    def after_update(self, iteration: int) -> None:
        if (every := self.job.config.every) and iteration % every == 0:
            self.state.capture()
            torch.save(self.state.tensors, part := self.file("part"))
            part.rename(self.file(iteration))  # with its name it counts, and so it must be whole
            dist.barrier(self.job.control_group)
            self.latest = self.iteration_order.advance(iteration)  # now every rank has its file
            self.file(iteration - 2 * every).unlink(missing_ok=True)

    def restore(self) -> RestoreReport:
        dist.barrier(self.job.control_group)  # nobody writes any more
        found = {int(each.name.split("-")[0]) for each in self.job.files_dir.glob("[0-9]*-*")}
        whole = (each for each in found if all(self.file(each, rank).exists() for rank in self.ranks))
        if (latest := max(whole, default=None)) is None:
            raise NoCompleteCheckpointError(f"{self.job.files_dir} holds no iteration of all ranks")
        for key, value in torch.load(self.file(latest), weights_only=True).items():
            self.state.tensors[key].copy_(value)
        self.state.publish()
        for later in (each for each in found if each > latest):  # of a future that is given up
            self.file(later).unlink(missing_ok=True)
        dist.barrier(self.job.control_group)  # or a rank that goes on removes what another still has to find
        self.latest = self.iteration_order.advance(latest)
        return RestoreReport(latest, ["persistent"] * len(self.ranks), agree_s=0.0, fetch_s=0.0, load_s=0.0)

    def latest_complete(self) -> int | None:
        return self.latest

    def drain(self, timeout_s: float) -> None: ...
    def close(self) -> None: ...
