"""Settings of the libraries that write files. Knows no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from capricorn.config.fields import ByteCount
from capricorn.systems.settings import FileSettings


class TorchSnapshotSettings(FileSettings):
    """Settings of the torchsnapshot library."""

    budget_bytes: ByteCount = Field(
        default=0, ge=0, description="Memory in which a rank may stage; 0 is twice its state"
    )


class DcpSettings(FileSettings):
    """Settings of torch.distributed.checkpoint."""

    threads: int = Field(default=1, ge=1, description="Threads of a rank that write, each into a file of its own")


class DcpAsyncSettings(DcpSettings):
    """The same where it is written beside training."""

    mode: Literal["thread", "process"] = Field(default="thread", description="Who writes in dcp-async")
