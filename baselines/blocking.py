"""Checkpoints that training waits for: what hiding the traffic is measured against."""

from __future__ import annotations

from typing import ClassVar

from capricorn.runtime.replicating_system import ReplicatingSystem


class Blocking(ReplicatingSystem):
    """Copies and replicates as `capricorn` does, but after each update, and training stands still until it is done.

    Source: Gemini, SOSP'23 (the blocking scheme of its ablation).
    """

    plans: ClassVar[bool] = False

    def after_update(self, iteration: int) -> None:
        super().after_update(iteration)
        self._finish(self._timeout_s)
