"""No checkpoint at all: the ground every slowdown is measured from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from capricorn.errors import NoCompleteCheckpointError
from capricorn.systems.interface import CheckpointSystem, JobContext, RestoreReport
from capricorn.units import Seconds

if TYPE_CHECKING:
    from capricorn.systems.flat_state import FlatState


class NoCheckpoint(CheckpointSystem):
    """Saves nothing; after a failure training starts from its first iteration."""

    kind = "nothing"

    def attach(self, job: JobContext, state: FlatState) -> None:
        """Nothing to make ready."""

    def latest_complete(self) -> int | None:
        return None

    def drain(self, timeout_s: Seconds) -> None:
        """Nothing to wait for."""

    def restore(self) -> RestoreReport:
        raise NoCompleteCheckpointError("system none keeps no checkpoint")

    def close(self) -> None:
        """Nothing to end."""
