"""Settings of the systems that are compared, checked when they are made; those of `capricorn` are in `schedule`."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from capricorn.config.fields import ByteCount, FrozenModel, Option, check
from capricorn.units import KIB, MIB

AUTO: Final = "auto"
SWEEP: Final = "sweep"
MIN_PART_BYTES: Final = KIB


class GeminiConfig(FrozenModel):
    """How `gemini` and `gemini-staged` profile and partition. Source: Gemini, SOSP'23, sections 5.2 and 5.3."""

    mu: Literal["auto", "sweep"] | float = Field(
        default=AUTO, description="safety factor of a span; auto tries several on the scenario first, sweep is that try"
    )
    tuned_in: str = Field(default="", description="the run in which mu was found")
    sweep_rounds: int = Field(default=2, gt=0, description="times that each factor is tried there and back in a sweep")
    profile_iterations: int = Field(default=20, gt=0, description="first iterations, profiled and not checkpointed")
    buffer_bytes: ByteCount = Field(default=128 * MIB, ge=1024, description="of all sub-buffers together, R")
    num_buffers: int = Field(default=4, ge=2, description="sub-buffers, p")

    @model_validator(mode="after")
    def _check(self) -> Self:
        part_bytes = self.buffer_bytes // self.num_buffers
        check(
            part_bytes >= MIN_PART_BYTES,
            f"gemini.buffer_bytes = {self.buffer_bytes} leaves {part_bytes} bytes to each of {self.num_buffers} "
            f"sub-buffers; use {MIN_PART_BYTES * self.num_buffers} or more, or a smaller gemini.num_buffers",
        )
        is_named = isinstance(self.mu, str)
        check(is_named or 0 < float(self.mu) <= 1, f"gemini.mu = {self.mu}: a safety factor lies in (0, 1]")
        return self


class StorageConfig(FrozenModel):
    """Where the systems that write files put them, and how durably."""

    medium: Literal["disk", "tmpfs"] = Field(default="disk", description="disk: the run folder; tmpfs: memory")
    fsync: bool = Field(default=False, description="whether a checkpoint counts only once it is on the medium")
    keep: int = Field(default=2, ge=1, description="complete checkpoints that are kept")


class PersistConfig(FrozenModel):
    """The slow tier of the systems that replicate: which of their checkpoints go to disk, and where."""

    every: Annotated[int, Option("--persist-every", "Checkpoints", "N")] = Field(
        default=0, ge=0, description="Keep every N-th iteration on disk, too; 0 keeps none"
    )
    dir: Annotated[str, Option("--persist-dir", "Checkpoints", "PATH")] = Field(
        default="",
        description="Keep them in this folder, which all nodes reach, and resume from what it holds (default: "
        "persistent/ of the run)",
    )
    keep: int = Field(default=2, ge=2, description="Complete checkpoints that are kept on disk")
    timeout_s: float = Field(default=60.0, gt=0, description="Seconds to wait at most for the writers of other ranks")


class TorchSnapshotConfig(FrozenModel):
    """Settings of the torchsnapshot library."""

    budget_bytes: ByteCount = Field(default=0, ge=0, description="RAM for staging, a rank; 0 is twice its state")


class DcpConfig(FrozenModel):
    """Settings of torch.distributed.checkpoint."""

    mode: Literal["thread", "process"] = Field(default="thread", description="who writes in dcp-async")
    threads: int = Field(default=1, ge=1, description="threads that write, a rank, each a file of its own")
