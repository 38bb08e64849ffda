"""Reverts injected faults: after the time each lasts, when a node is replaced, or at the end of the run.

In the launcher, so that it also happens when the rank that injected it is dead.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final

from capricorn.config.fault_kinds import kind_of
from capricorn.config.fault_spec import FaultSpec
from capricorn.emulation.paced_link import Link
from capricorn.emulation.reshape import reshape
from capricorn.emulation.shaping import INTERFACE, mending, slowing
from capricorn.emulation.testbed import PACED, NetworkBackend
from capricorn.faults import filler_file
from capricorn.faults import memory_cgroup as cgroup
from capricorn.faults.context import RevertContext, cgroup_name
from capricorn.faults.helper_process import end_helpers
from capricorn.faults.persisted import persistent_folders
from capricorn.faults.process_registry import processes_below, registered
from capricorn.records.job_file import Job
from capricorn.records.samples import EventSample
from capricorn.units import Seconds


@dataclass(frozen=True, slots=True)
class PendingRevert:
    """A fault that was injected and is to be reverted."""

    fault: FaultSpec
    due_s: Seconds
    """By the monotonic clock."""


class Reverter:
    """Reverts what was injected and can be; called by the launcher's loop."""

    def __init__(self, job: Job, testbed: NetworkBackend) -> None:
        self._context = RevertContext(job, testbed)
        self._pending: list[PendingRevert] = []

    def on_event(self, event: EventSample) -> None:
        """Notes a fault that is injected now, if it can be reverted; stands still as long as one that stops us."""
        if event.event == "not-injected":
            self._pending = [each for each in self._pending if str(each.fault) != event.detail]
        if event.event == "fault" and _revert_of(fault := FaultSpec.parse(event.detail)) is not None:
            self._pending.append(PendingRevert(fault, time.monotonic() + (fault.seconds or math.inf)))
            if kind_of(fault.kind).stops_launcher:
                time.sleep(fault.seconds or 0.0)
                self.tick()

    def tick(self) -> None:
        """Reverts what has lasted long enough."""
        self._revert(lambda each: each.due_s <= time.monotonic())

    def node_replaced(self, node: int) -> None:
        """Reverts what was done to a node, as a new machine has a good link."""
        self._revert(lambda each: each.fault.node == node)

    def close(self) -> None:
        """Reverts what would outlive the run; its processes have ended."""
        self._revert(lambda each: kind_of(each.fault.kind).outlives_run)

    def _revert(self, is_over: Callable[[PendingRevert], bool]) -> None:
        for each in [each for each in self._pending if is_over(each)]:
            self._pending.remove(each)
            revert = _revert_of(each.fault)
            assert revert is not None
            revert(each.fault, self._context)


def _revert_of(fault: FaultSpec) -> Callable[[FaultSpec, RevertContext], None] | None:
    """Returns what reverts the fault; None if nothing does."""
    return kind_of(fault.kind).revert or _REVERTS.get(fault.kind)


def _go_on(fault: FaultSpec, context: RevertContext) -> None:
    assert fault.rank is not None
    names = registered(context.job.run_dir, fault.rank)
    if names is not None:
        names.worker.send(signal.SIGCONT)


def _go_on_together(fault: FaultSpec, context: RevertContext) -> None:
    for process in processes_below(os.getpid()):
        process.send(signal.SIGCONT)


def _mend_link(
    fault: FaultSpec, context: RevertContext, *, act: Callable[[Link], None], script: Callable[..., str]
) -> None:
    """Mends a link: by `act` where links are paced, else by what `script` says to tc."""
    cluster = context.job.scenario.cluster
    assert fault.node is not None
    if cluster.links == PACED:
        assert context.job.links_dir is not None
        with contextlib.closing(Link(context.job.links_dir / f"out{fault.node}")) as link:
            act(link)
    else:
        reshape(context.testbed.enter_node(fault.node), script(INTERFACE, cluster.rate, qos=cluster.qos))


def _make_room_in_memory(fault: FaultSpec, context: RevertContext) -> None:
    filler_file.empty(context.job.store_dir)


def _make_room_on_disk(fault: FaultSpec, context: RevertContext) -> None:
    filler_file.empty(persistent_folders(context.job)[0])


def _speed_up_disk(fault: FaultSpec, context: RevertContext) -> None:
    assert context.job.storage_dir is not None
    for path in context.job.storage_dir.iterdir():
        with contextlib.closing(Link(path)) as clock:
            clock.slow_down(1.0)


def _make_room_for_records(fault: FaultSpec, context: RevertContext) -> None:
    filler_file.empty(context.job.run_dir)


def _end_helpers(fault: FaultSpec, context: RevertContext) -> None:
    end_helpers(context.job)


def _remove_cgroup(fault: FaultSpec, context: RevertContext) -> None:
    assert fault.rank is not None
    cgroup.remove(cgroup_name(context.job, fault.rank))


_REVERTS: Final[Mapping[str, Callable[[FaultSpec, RevertContext], None]]] = MappingProxyType({
    "stop": _go_on, "tmpfs-full": _make_room_in_memory,
    "slow-link": partial(_mend_link, act=lambda link: link.slow_down(1.0), script=slowing),
    "partition": partial(_mend_link, act=lambda link: link.hold(0.0), script=mending),
    "disk-full": _make_room_on_disk, "disk-slow": _speed_up_disk, "port-taken": _end_helpers, "oom": _remove_cgroup,
    "swap": _remove_cgroup, "pause": _go_on_together, "fork-server": _go_on_together,
    "records-full": _make_room_for_records, "neighbour": _end_helpers,
})  # fmt: skip
