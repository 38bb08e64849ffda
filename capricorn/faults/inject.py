"""What each kind of failure does to the processes, memory, links and files of a run, from within the rank that acts.

When they strike is the injector's affair; what of it is undone, and when, is that of `repairs`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

import psutil

from capricorn.config.fault_spec import FaultSpec
from capricorn.emulation.builder import run_batch
from capricorn.emulation.paced_link import Link
from capricorn.emulation.shaping import INTERFACE, cutting, slowing
from capricorn.emulation.testbed import PACED
from capricorn.faults import filler_file as ballast
from capricorn.faults import memory_cgroup as cgroup
from capricorn.faults.corrupt import Wire, damage_copies, damage_files
from capricorn.faults.kill_point import Countdown
from capricorn.faults.process_registry import ProcessName, registered
from capricorn.planner.placement import groups_of
from capricorn.records.job_file import Job
from capricorn.units import Seconds

STRANGERS: Final = "strangers"
"""Of a run folder: the strangers that were started."""
LINK_FRAC: Final = 1 / 20
DISK_FRAC: Final = 1 / 100
FOR_GOOD_S: Final[Seconds] = 1e7


@dataclass(frozen=True, slots=True)
class Scene:
    """Who acts, in which run, and what was prepared for failures that come later than their moment."""

    job: Job
    rank: int
    wire: Wire = field(default_factory=Wire)
    countdown: Countdown = field(default_factory=Countdown)


def strike(fault: FaultSpec, scene: Scene) -> None:
    """Makes it happen; many kinds do not return."""
    # Whoever hears of the first thing that dies may end this process before it has come to the last.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        STRIKES[fault.kind](fault, scene)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def slow_tier(job: Job) -> list[Path]:
    """The folders whose files outlive the memory of the nodes."""
    return [folder for folder in (job.persist_dir, job.files_dir) if folder is not None]


def cgroup_name(job: Job, rank: int) -> str:
    return f"capricorn-{job.run_id}-rank{rank}"


# --- processes ---------------------------------------------------------------------------------------------------


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill(fault: FaultSpec, scene: Scene) -> None:
    _kill_self()


def _kill_all(fault: FaultSpec, scene: Scene) -> None:
    for rank in range(scene.job.scenario.topology.world_size):
        names = registered(scene.job.run_dir, rank)
        if names is not None and names.worker.pid != os.getpid():
            names.worker.send(signal.SIGKILL)
    _kill_self()


def _lose_node(fault: FaultSpec, scene: Scene) -> None:
    assert fault.node is not None
    _lose({fault.node}, scene)


def _lose_group(fault: FaultSpec, scene: Scene) -> None:
    assert fault.node is not None
    groups = groups_of(scene.job.scenario.topology.num_nodes, scene.job.scenario.system.replicas)
    _lose(next(group for group in groups if fault.node in group), scene)


def _lose(nodes: Collection[int], scene: Scene) -> None:
    """Memory goes with the nodes. The death of an agent takes its workers along, our own last."""
    topology = scene.job.scenario.topology
    own = topology.node_of(scene.rank)
    own_last = sorted(nodes, key=lambda node: node == own)
    found = [registered(scene.job.run_dir, topology.ranks_of(node)[0]) for node in own_last]
    # All memory first: a node whose agent is gone is replaced at once, with a new store in the same place.
    for node in nodes:
        shutil.rmtree(scene.job.node_dir(node), ignore_errors=True)
    for names in filter(None, found):
        names.agent.send(signal.SIGKILL)
    if own in nodes:
        _kill_self()


def _stop(fault: FaultSpec, scene: Scene) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _tear_commit(fault: FaultSpec, scene: Scene) -> None:
    assert fault.call is not None
    scene.countdown.start(fault.call, slow_tier(scene.job))


def _jump_clock(fault: FaultSpec, scene: Scene) -> None:
    before, ahead_s = time.time, fault.seconds
    assert ahead_s is not None
    time.time = lambda: before() + ahead_s


def _run_out_of_memory(fault: FaultSpec, scene: Scene) -> None:
    cgroup.exhaust(cgroup.make(cgroup_name(scene.job, scene.rank)))


def _take_ports(fault: FaultSpec, scene: Scene) -> None:
    """A stranger stands ready for every port this process listens on, and then this process goes."""
    connections = psutil.Process().net_connections(kind="inet")
    ports = sorted({(each.laddr.ip, each.laddr.port) for each in connections if each.status == psutil.CONN_LISTEN})
    lock = scene.job.store_dir / "lock"
    stranger = subprocess.Popen(
        [sys.executable, "-m", "capricorn.faults.port_squatter", str(lock), json.dumps(ports)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    name = ProcessName.of(stranger.pid)
    (scene.job.run_dir / STRANGERS).open("a").write(f"{name.pid} {name.created_s}\n")
    assert stranger.stdout is not None
    stranger.stdout.readline()
    _kill_self()


# --- links -------------------------------------------------------------------------------------------------------


def _slow_link(fault: FaultSpec, scene: Scene) -> None:
    cluster = scene.job.scenario.cluster
    if cluster.links == PACED:
        _own_link(scene).slow_down(LINK_FRAC)
    else:
        run_batch("tc", slowing(INTERFACE, LINK_FRAC * cluster.rate, qos=cluster.qos))


def _partition(fault: FaultSpec, scene: Scene) -> None:
    if scene.job.scenario.cluster.links == PACED:
        _own_link(scene).hold(fault.seconds or FOR_GOOD_S)
    else:
        run_batch("tc", cutting(INTERFACE))


def _own_link(scene: Scene) -> Link:
    assert scene.job.links_dir is not None
    return Link(scene.job.links_dir / f"out{scene.job.scenario.topology.node_of(scene.rank)}")


# --- memory and files --------------------------------------------------------------------------------------------


def _damage(fault: FaultSpec, scene: Scene) -> None:
    if fault.where == "wire":
        scene.wire.damage_next(fault)
        return
    if fault.where != "disk":
        damage_copies(fault, scene.job, scene.rank)
        _kill_self()
    for folder in slow_tier(scene.job):
        damage_files(fault, folder)
    _lose(range(scene.job.scenario.topology.num_nodes), scene)


def _fill_memory(fault: FaultSpec, scene: Scene) -> None:
    ballast.fill(scene.job.store_dir)
    _kill_self()


def _fill_disk(fault: FaultSpec, scene: Scene) -> None:
    ballast.fill(slow_tier(scene.job)[0])


def _slow_disk(fault: FaultSpec, scene: Scene) -> None:
    assert scene.job.storage_dir is not None
    for path in scene.job.storage_dir.iterdir():
        Link(path).slow_down(DISK_FRAC)


STRIKES: Final[Mapping[str, Callable[[FaultSpec, Scene], None]]] = MappingProxyType({
    "kill": _kill, "kill-all": _kill_all, "node-loss": _lose_node, "group-loss": _lose_group, "stop": _stop,
    "slow-link": _slow_link, "partition": _partition, "corrupt": _damage, "truncate": _damage,
    "torn-commit": _tear_commit, "tmpfs-full": _fill_memory, "disk-full": _fill_disk, "disk-slow": _slow_disk,
    "port-taken": _take_ports, "clock-jump": _jump_clock, "oom": _run_out_of_memory,
})  # fmt: skip
