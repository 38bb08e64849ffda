"""Gemini: its plan and its data path, on the store, transport and recovery that it shares with `capricorn`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar

from pydantic import BaseModel

from capricorn.errors import ConfigError
from capricorn.hooks import OpKey
from capricorn.planner.gemini_planner import AUTO, GeminiPlanner, GeminiSettings, GeminiStagedSettings
from capricorn.planner.plan import Planner
from capricorn.planner.profile import COMMUNICATION
from capricorn.runtime.replicating_system import ReplicatingSystem
from capricorn.runtime.save.live_source import CutStager, LiveSource
from capricorn.runtime.save.staging import Stager
from capricorn.runtime.store.slot import Layout
from capricorn.systems.flat_state import FlatState
from capricorn.systems.interface import JobContext
from capricorn.units import Bytes, Seconds


class GeminiStaged(ReplicatingSystem):
    """Gemini's plan alone: replicas are sent from the local copy, and the update waits for nothing else.

    Source: Gemini, SOSP'23, section 5.2 (profile and partition). Departs: the data path is that of `capricorn`.
    """

    profiles_first = True
    settings: ClassVar[type[BaseModel] | None] = GeminiStagedSettings

    def attach(self, job: JobContext, state: FlatState) -> None:
        self._settings = self.settings_in(job)
        if self._settings.mu == AUTO:
            raise ConfigError("system.options.mu=auto is settled before a job starts: give a number in (0, 1]")
        # Once there has been a checkpoint there is something to lose while the training is profiled again.
        self.first_iteration = 0 if job.attempt else self._settings.profile_iterations + 1
        super().attach(job, state)

    def make_planner(self, holders: Sequence[int], shard_bytes: Bytes) -> Planner:
        return GeminiPlanner(self._settings, rank=self.job.rank, num_remote=len(holders), shard_bytes=shard_bytes)

    def _is_reactive(self) -> bool:
        return False


class Gemini(GeminiStaged):
    """Peers are sent the live state in the idle spans, and the update waits until all of it is out.

    The local copy is cut up and made while training communicates. Source: Gemini, SOSP'23, section 5.3.
    """

    settings = GeminiSettings

    def on_op_begin(self, op: OpKey) -> None:
        super().on_op_begin(op)
        if op.kind in COMMUNICATION:
            self._local.open()

    def on_op_end(self, op: OpKey) -> None:
        if op.kind in COMMUNICATION:
            self._local.shut()
        super().on_op_end(op)

    def before_update(self, iteration: int) -> None:
        self._local.open()
        save = self._commit_tracker.pending
        if save is not None:
            assert self._executor is not None
            begin_s = time.perf_counter()
            self._executor.settle(save, self._timeout_s)
            self._scheduler.overflow(time.perf_counter() - begin_s)
        super().before_update(iteration)

    def drain(self, timeout_s: Seconds) -> None:
        self._local.open()
        super().drain(timeout_s)

    def close(self) -> None:
        if self._executor is not None:
            self._local.open()
        super().close()

    def _make_sources(self, stager: Stager, layout: Layout) -> tuple[Stager, LiveSource | None]:
        config = self._settings
        self._local = CutStager(stager, patience_s=self._timeout_s / 2)
        live = LiveSource(
            self._state, layout, self.job.device, buffer_bytes=config.buffer_bytes, num_buffers=config.num_buffers
        )
        return self._local, live
