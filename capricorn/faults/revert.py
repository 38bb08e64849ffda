"""Undoes injected failures: after the time each lasts, when a node is replaced, or at the end of the run.

In the launcher, so that it also happens when the rank that struck is dead.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final

import psutil

from capricorn.config.fault_spec import FaultSpec
from capricorn.emulation.paced_link import Link
from capricorn.emulation.reshape import reshape
from capricorn.emulation.shaping import INTERFACE, mending, slowing
from capricorn.emulation.testbed import PACED, NetworkBackend
from capricorn.faults import filler_file as ballast
from capricorn.faults import memory_cgroup as cgroup
from capricorn.faults.inject import STRANGERS, cgroup_name, slow_tier
from capricorn.faults.process_registry import ProcessName, registered
from capricorn.records.job_file import Job
from capricorn.records.samples import EventSample
from capricorn.units import Seconds

STRANGER_TIMEOUT_S: Final[Seconds] = 5.0


@dataclass(frozen=True, slots=True)
class _Site:
    """Where failures are undone."""

    job: Job
    network: NetworkBackend


@dataclass(frozen=True, slots=True)
class _Pending:
    """A failure that struck and is to be undone."""

    fault: FaultSpec
    due_s: Seconds
    """By the monotonic clock."""


class Repairs:
    """What struck and is not undone yet; called by the launcher's loop."""

    def __init__(self, job: Job, network: NetworkBackend) -> None:
        self._site = _Site(job, network)
        self._pending: list[_Pending] = []

    def on_event(self, event: EventSample) -> None:
        """Notes a failure that strikes now, if it can be undone."""
        if event.event == "fault" and (fault := FaultSpec.parse(event.detail)).kind in _REPAIRS:
            self._pending.append(_Pending(fault, time.monotonic() + (fault.seconds or math.inf)))

    def tick(self) -> None:
        """Undoes what has lasted long enough."""
        self._undo(lambda each: each.due_s <= time.monotonic())

    def node_replaced(self, node: int) -> None:
        """A new machine has a good link."""
        self._undo(lambda each: each.fault.node == node)

    def close(self) -> None:
        """Undoes what would outlive the run; its processes have ended."""
        self._undo(lambda each: each.fault.kind in _OUTLIVING)

    def _undo(self, is_over: Callable[[_Pending], bool]) -> None:
        for each in [each for each in self._pending if is_over(each)]:
            self._pending.remove(each)
            _REPAIRS[each.fault.kind](each.fault, self._site)


def _go_on(fault: FaultSpec, site: _Site) -> None:
    assert fault.rank is not None
    names = registered(site.job.run_dir, fault.rank)
    if names is not None:
        names.worker.send(signal.SIGCONT)


def _mend_link(fault: FaultSpec, site: _Site, *, act: Callable[[Link], None], script: Callable[..., str]) -> None:
    """By `act` where links are paced, else by what `script` says to tc."""
    cluster = site.job.scenario.cluster
    assert fault.node is not None
    if cluster.links == PACED:
        assert site.job.links_dir is not None
        with contextlib.closing(Link(site.job.links_dir / f"out{fault.node}")) as link:
            act(link)
    else:
        reshape(site.network.enter_node(fault.node), script(INTERFACE, cluster.rate, qos=cluster.qos))


def _make_room_in_memory(fault: FaultSpec, site: _Site) -> None:
    ballast.empty(site.job.store_dir)


def _make_room_on_disk(fault: FaultSpec, site: _Site) -> None:
    ballast.empty(slow_tier(site.job)[0])


def _speed_up_disk(fault: FaultSpec, site: _Site) -> None:
    assert site.job.storage_dir is not None
    for path in site.job.storage_dir.iterdir():
        with contextlib.closing(Link(path)) as clock:
            clock.slow_down(1.0)


def _end_strangers(fault: FaultSpec, site: _Site) -> None:
    with contextlib.suppress(FileNotFoundError):
        for line in (site.job.run_dir / STRANGERS).read_text().splitlines():
            pid, created_s = line.split()
            if (stranger := ProcessName(int(pid), float(created_s)).find()) is not None:
                stranger.kill()
                with contextlib.suppress(psutil.TimeoutExpired):
                    stranger.wait(STRANGER_TIMEOUT_S)


def _remove_cgroup(fault: FaultSpec, site: _Site) -> None:
    assert fault.rank is not None
    cgroup.remove(cgroup_name(site.job, fault.rank))


_REPAIRS: Final[Mapping[str, Callable[[FaultSpec, _Site], None]]] = MappingProxyType({
    "stop": _go_on, "tmpfs-full": _make_room_in_memory,
    "slow-link": partial(_mend_link, act=lambda link: link.slow_down(1.0), script=slowing),
    "partition": partial(_mend_link, act=lambda link: link.hold(0.0), script=mending),
    "disk-full": _make_room_on_disk, "disk-slow": _speed_up_disk, "port-taken": _end_strangers, "oom": _remove_cgroup,
})  # fmt: skip
_OUTLIVING: Final = frozenset({"tmpfs-full", "disk-full", "port-taken", "oom"})
