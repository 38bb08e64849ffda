"""Systems that are broken in one way each, made from the example that is not."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path

import torch

from capricorn.hooks import OpKey
from capricorn.systems.interface import JobContext, RestoreReport
from examples.own_system import OwnFiles


class TornState(OwnFiles):
    """Writes the live tensors when the next update has already overwritten them."""

    due = 0

    def after_update(self, iteration: int) -> None:
        self.due = iteration

    def on_op_end(self, op: OpKey) -> None:
        if op.kind == "update":
            self.drain(0.0)

    def drain(self, timeout_s: float) -> None:
        if self.due:
            super().after_update(self.due)
        self.due = 0


class LostRank(OwnFiles):
    """Gives every rank the state of rank 0."""

    def restore(self) -> RestoreReport:
        report = super().restore()
        first = torch.load(self.file(report.iteration, 0), weights_only=True)
        for tensor, value in zip(self.state.tensors.values(), first.values(), strict=True):
            tensor.copy_(value)
        return report


class StateChanged(OwnFiles):
    """Changes a live tensor after it has saved it."""

    def after_update(self, iteration: int) -> None:
        super().after_update(iteration)
        next(iter(self.state.tensors.values())).add_(1)


class Leftovers(OwnFiles):
    """Ends neither its thread nor its process, and leaves a file where it happens to be."""

    def attach(self, job: JobContext, state) -> None:  # type: ignore[no-untyped-def]
        super().attach(job, state)
        threading.Thread(target=threading.Event().wait, name="forgotten", daemon=True).start()
        subprocess.Popen(["sleep", "600"])
        Path(f"forgotten{job.rank}").touch()


class NoDeadline(OwnFiles):
    """Waits for ever for a peer that is gone."""

    def after_update(self, iteration: int) -> None:
        try:
            super().after_update(iteration)
        except RuntimeError:
            time.sleep(3600)


class CountsTooEarly(OwnFiles):
    """Counts an iteration as complete that has only begun."""

    def latest_complete(self) -> int | None:
        return (self.latest or 0) + 1


class KeepsAll(OwnFiles):
    """Never removes an older checkpoint."""

    def after_update(self, iteration: int) -> None:
        kept = self.file(iteration - 2, self.job.rank)
        if kept.exists():
            kept.rename(kept.with_name("kept" + kept.name.replace("-", ".")))
        super().after_update(iteration)


class CloseFails(OwnFiles):
    """Cannot be closed twice."""

    def close(self) -> None:
        del self.job
