"""What a fault acts on: the run it is injected into, and what was made ready for those that come later.

The life of a fault; each is claimed once in a run, however often its ranks start again:

| state    | who                    | when                                                                           |
|----------|------------------------|--------------------------------------------------------------------------------|
| armed    | `FaultInjector`, ranks | at each start, by the rank that acts                                           |
| claimed  | `FaultInjector`, ranks | at its moment; a file of the run folder, so that no later start claims it again |
| prepared | `prepare`, ranks       | what goes on beside it is started, if anything                                 |
| injected | `inject`, ranks        | right after its event was recorded; many kinds end the rank here               |
| reverted | `Reverter`, launcher   | after `seconds`, when its node is replaced, or at the end if it outlives a run |
"""

from __future__ import annotations

from dataclasses import dataclass, field

from capricorn.emulation.testbed import NetworkBackend
from capricorn.faults.corrupt import LossyRoutes
from capricorn.faults.kill_point import KillPoint
from capricorn.records.job_file import Job


@dataclass(frozen=True, slots=True)
class FaultContext:
    """Where a fault is injected: by which rank, in which run."""

    job: Job
    rank: int
    lossy_routes: LossyRoutes = field(default_factory=LossyRoutes)
    kill_point: KillPoint = field(default_factory=KillPoint)


@dataclass(frozen=True, slots=True)
class RevertContext:
    """Where a fault is reverted: in the launcher, outside of the nodes."""

    job: Job
    testbed: NetworkBackend


def cgroup_name(job: Job, rank: int) -> str:
    """Returns what the memory cgroup of a rank is called."""
    return f"capricorn-{job.run_id}-rank{rank}"
