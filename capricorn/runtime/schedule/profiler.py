"""Measures the ops of an iteration, on demand, and tells all ranks what each of them measured.

On the training thread only; the times come from its clock, which on a GPU is read by events.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from capricorn.hooks import OpKey
from capricorn.planner.profile import IterationProfile
from capricorn.runtime.comm.collectives import finish, waiting_for
from capricorn.runtime.schedule.op_clock import Clock
from capricorn.units import Seconds


class Profiler:
    """Stamps begin and end of each op of the iterations that are asked for."""

    def __init__(self, clock: Clock, group: dist.ProcessGroup, offset_s: Callable[[], Seconds | None]) -> None:
        """`offset_s` returns what to add to the time here to get that on rank 0, if it is known."""
        self._clock, self._group, self._offset_s = clock, group, offset_s
        self._world_size = dist.get_world_size(group)
        self._iteration: int | None = None
        self._start_s: Seconds = 0.0
        self._begins_s: dict[OpKey, Seconds] = {}
        self._ends_s: dict[OpKey, Seconds] = {}
        self._ops: list[OpKey] = []
        self._shared: tuple[int, list[OpKey], dist.Work, list[torch.Tensor]] | None = None

    @property
    def is_on(self) -> bool:
        return self._iteration is not None

    def start(self, iteration: int) -> None:
        """Starts to measure an iteration, until `share`."""
        self._iteration = iteration
        self._ops, self._begins_s, self._ends_s = [], {}, {}
        self._clock.at(self._start)

    def begin(self, op: OpKey) -> None:
        """Stamps the begin of an op."""
        begins_s = self._begins_s
        self._ops.append(op)
        self._clock.at(lambda now_s: begins_s.__setitem__(op, now_s))

    def end(self, op: OpKey) -> None:
        """Stamps the end of an op."""
        ends_s = self._ends_s
        self._clock.at(lambda now_s: ends_s.__setitem__(op, now_s))

    def share(self) -> tuple[OpKey, ...]:
        """Starts to tell the others of the measured iteration; returns its ops in the order they began. Collective."""
        assert self._iteration is not None
        self._clock.settle()
        ops = self._ops
        offset_s = self._offset_s()
        times = [self._start_s, *(times[op] for times in (self._begins_s, self._ends_s) for op in ops)]
        shift_s = -self._start_s if offset_s is None else offset_s
        mine = torch.tensor([offset_s is not None, *(time_s + shift_s for time_s in times)], dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(self._world_size)]
        with waiting_for(self._group, self._what(self._iteration)):
            work = dist.all_gather(rows, mine, group=self._group, async_op=True)
        assert work is not None
        self._shared, self._iteration = (self._iteration, ops, work, rows), None
        return tuple(ops)

    def take(self, tokens: Mapping[int, tuple[int, ...]]) -> IterationProfile | None:
        """Returns the iteration that was shared last, once; `tokens` are its loads."""
        if self._shared is None:
            return None
        (iteration, ops, work, rows), self._shared = self._shared, None
        finish(self._group, work, self._what(iteration))
        zero_s = _zeros(rows)
        starts_s = tuple(float(row[1]) - zero for row, zero in zip(rows, zero_s, strict=True))
        begins_s, ends_s = (
            tuple(tuple((row[part] - zero).tolist()) for row, zero in zip(rows, zero_s, strict=True))
            for part in (slice(2, 2 + len(ops)), slice(2 + len(ops), None))
        )
        return IterationProfile(iteration, tuple(ops), begins_s, ends_s, tokens, starts_s)

    def _what(self, iteration: int) -> str:
        return f"the others' profiles of iteration {iteration}"

    def _start(self, now_s: Seconds) -> None:
        self._start_s = now_s


def _zeros(rows: Sequence[torch.Tensor]) -> list[Seconds]:
    """Returns, by rank, the time from which its times count.

    That is the earliest begin of the iteration; if some clock is unknown, the begin on that rank itself.
    """
    starts_s = [float(row[1]) for row in rows]
    return [min(starts_s)] * len(rows) if all(row[0] for row in rows) else starts_s
