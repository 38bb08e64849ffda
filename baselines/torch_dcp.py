"""torch.distributed.checkpoint, the real library, as systems: written while training waits, or beside it."""

from __future__ import annotations

from typing import ClassVar

from capricorn.runtime.save.flat_state import FlatState
from capricorn.systems.interface import JobContext

from .dcp_async import DcpProcess, DcpThread
from .dcp_library import DcpLibrary
from .file_settings import DcpSettings
from .files import FileCheckpoints
from .library import Library


class Dcp(FileCheckpoints):
    """`dcp.save` of every checkpoint.

    Source: torch.distributed.checkpoint of the torch that is installed.
    """

    settings = DcpSettings
    library: ClassVar[type[Library]] = DcpLibrary
    notes: ClassVar[tuple[str, ...]] = ("a flipped bit loads without a word",)


class DcpAsync(FileCheckpoints):
    """`dcp.async_save` of every checkpoint, by a thread or a process.

    Source: torch.distributed.checkpoint of the torch that is installed.
    """

    settings = DcpSettings
    notes: ClassVar[tuple[str, ...]] = Dcp.notes

    def attach(self, job: JobContext, state: FlatState) -> None:
        self.library = DcpProcess if self.settings_in(job).mode == "process" else DcpThread  # type: ignore[misc]
        super().attach(job, state)
