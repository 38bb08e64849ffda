"""What each built-in kind of fault does to the processes, memory, links and files of a run, from within the rank that
acts; and what has to be there before, whose time is none of the recovery.

When it happens is the injector's affair; what of it is reverted, and when, is that of `revert`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import psutil

from capricorn.config.fault_kinds import BACK, DISK, DISK_FRAC, LINK_FRAC, kind_of
from capricorn.config.fault_spec import FaultSpec
from capricorn.emulation.builder import run_batch
from capricorn.emulation.paced_link import Link
from capricorn.emulation.shaping import INTERFACE, cutting, slowing
from capricorn.emulation.testbed import PACED
from capricorn.faults import filler_file, neighbour, port_squatter
from capricorn.faults import memory_cgroup as cgroup
from capricorn.faults.context import FaultContext, cgroup_name
from capricorn.faults.corrupt import damage_copies, damage_files
from capricorn.faults.helper_process import start_helper
from capricorn.faults.persisted import persistent_folders
from capricorn.faults.process_registry import processes_below, registered
from capricorn.planner.placement import groups_of
from capricorn.process import deferred_sigterm
from capricorn.units import Seconds

FOR_GOOD_S: Final[Seconds] = 1e7


def prepare(fault: FaultSpec, context: FaultContext) -> None:
    """Starts what the fault needs beside it, if anything, before it counts as injected."""
    if (make_ready := PREPARATIONS.get(fault.kind)) is not None:
        make_ready(fault, context)


def inject(fault: FaultSpec, context: FaultContext) -> None:
    """Makes the fault happen; many kinds do not return."""
    act = kind_of(fault.kind).inject or INJECTIONS[fault.kind]
    # Whoever hears of the first thing that dies may end this process before it has come to the last.
    with deferred_sigterm():
        act(fault, context)


# --- processes ---------------------------------------------------------------------------------------------------


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill(fault: FaultSpec, context: FaultContext) -> None:
    _kill_self()


def _kill_all(fault: FaultSpec, context: FaultContext) -> None:
    for rank in range(context.job.scenario.topology.world_size):
        names = registered(context.job.run_dir, rank)
        if names is not None and names.worker.pid != os.getpid():
            names.worker.send(signal.SIGKILL)
    _kill_self()


def _lose_node(fault: FaultSpec, context: FaultContext) -> None:
    assert fault.node is not None
    _lose({fault.node}, context)


def _lose_group(fault: FaultSpec, context: FaultContext) -> None:
    assert fault.node is not None
    groups = groups_of(context.job.scenario.topology.num_nodes, context.job.scenario.system.replicas)
    _lose(next(group for group in groups if fault.node in group), context)


def _lose(nodes: Collection[int], context: FaultContext) -> None:
    """Removes the memory of the nodes and kills their agents, whose death takes their workers along, our own last."""
    topology = context.job.scenario.topology
    own = topology.node_of(context.rank)
    own_last = sorted(nodes, key=lambda node: node == own)
    found = [registered(context.job.run_dir, topology.ranks_of(node)[0]) for node in own_last]
    # All memory first: a node whose agent is gone is replaced at once, with a new store in the same place.
    for node in nodes:
        shutil.rmtree(context.job.node_dir(node), ignore_errors=True)
    for names in filter(None, found):
        names.agent.send(signal.SIGKILL)
    if own in nodes:
        _kill_self()


def _stop(fault: FaultSpec, context: FaultContext) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _tear_commit(fault: FaultSpec, context: FaultContext) -> None:
    assert fault.call is not None
    context.kill_point.arm(fault.call, persistent_folders(context.job))


def _pause(fault: FaultSpec, context: FaultContext) -> None:
    """Stops all processes that come from the launcher, this one last; the launcher itself stands still by itself."""
    for process in processes_below(context.job.launcher):
        process.send(signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)


def _lose_fork_server(fault: FaultSpec, context: FaultContext) -> None:
    """Takes the fork server away and loses the node, whose replacement it should fork."""
    assert fault.node is not None
    own = registered(context.job.run_dir, context.rank)
    server = own and own.agent.parent()
    if server:
        server.send(signal.SIGKILL if fault.where == "killed" else signal.SIGSTOP)
    _lose({fault.node}, context)


def _jump_clock(fault: FaultSpec, context: FaultContext) -> None:
    assert fault.seconds is not None
    before, jump_s = time.time, -fault.seconds if fault.where == BACK else fault.seconds
    time.time = lambda: before() + jump_s


def _run_out_of_memory(fault: FaultSpec, context: FaultContext) -> None:
    cgroup.exhaust(cgroup.make(cgroup_name(context.job, context.rank)))


def _swap(fault: FaultSpec, context: FaultContext) -> None:
    cgroup.swap_out(cgroup.make(cgroup_name(context.job, context.rank)))


def _start_squatter(fault: FaultSpec, context: FaultContext) -> None:
    """Has a port squatter wait for every port this process listens on."""
    connections = psutil.Process().net_connections(kind="inet")
    ports = sorted({(each.laddr.ip, each.laddr.port) for each in connections if each.status == psutil.CONN_LISTEN})
    start_helper(context.job, port_squatter.__name__, json.dumps(ports))


def _start_neighbour(fault: FaultSpec, context: FaultContext) -> None:
    """Lets another run's stores come and go, or a second job train."""
    job = context.job
    start_helper(job, neighbour.__name__, fault.where, str(job.store_dir.parent), str(job.run_dir / neighbour.RUNS))


# --- links -------------------------------------------------------------------------------------------------------


def _slow_link(fault: FaultSpec, context: FaultContext) -> None:
    cluster = context.job.scenario.cluster
    if cluster.links == PACED:
        _own_link(context).slow_down(LINK_FRAC)
    else:
        run_batch("tc", slowing(INTERFACE, LINK_FRAC * cluster.rate, qos=cluster.qos))


def _partition(fault: FaultSpec, context: FaultContext) -> None:
    if context.job.scenario.cluster.links == PACED:
        _own_link(context).hold(fault.seconds or FOR_GOOD_S)
    else:
        run_batch("tc", cutting(INTERFACE))


def _own_link(context: FaultContext) -> Link:
    assert context.job.links_dir is not None
    return Link(context.job.links_dir / f"out{context.job.scenario.topology.node_of(context.rank)}")


# --- memory and files --------------------------------------------------------------------------------------------


def _damage(fault: FaultSpec, context: FaultContext) -> None:
    if fault.where == "wire":
        context.lossy_routes.damage_next(fault)
        return
    if fault.where != DISK:
        damage_copies(fault, context.job, context.rank)
        _kill_self()
    for folder in persistent_folders(context.job):
        damage_files(fault, folder)
    _lose(range(context.job.scenario.topology.num_nodes), context)


def _fill_memory(fault: FaultSpec, context: FaultContext) -> None:
    filler_file.fill(context.job.store_dir)
    _kill_self()


def _fill_disk(fault: FaultSpec, context: FaultContext) -> None:
    _fill(persistent_folders(context.job)[0], context)


def _fill_records(fault: FaultSpec, context: FaultContext) -> None:
    _fill(context.job.run_dir, context)


def _fill(folder: Path, context: FaultContext) -> None:
    """Fills the file system of a folder outside of the store, which notes it for `clean`."""
    filler_file.note(context.job.store_dir, folder)
    filler_file.fill(folder)


def _slow_disk(fault: FaultSpec, context: FaultContext) -> None:
    assert context.job.storage_dir is not None
    for path in context.job.storage_dir.iterdir():
        Link(path).slow_down(DISK_FRAC)


INJECTIONS: Final[Mapping[str, Callable[[FaultSpec, FaultContext], None]]] = MappingProxyType({
    "kill": _kill, "kill-all": _kill_all, "node-loss": _lose_node, "group-loss": _lose_group, "stop": _stop,
    "slow-link": _slow_link, "partition": _partition, "corrupt": _damage, "truncate": _damage,
    "torn-commit": _tear_commit, "tmpfs-full": _fill_memory, "disk-full": _fill_disk, "disk-slow": _slow_disk,
    "port-taken": _kill, "clock-jump": _jump_clock, "oom": _run_out_of_memory,
    "swap": _swap, "pause": _pause, "fork-server": _lose_fork_server, "records-full": _fill_records,
    "neighbour": _kill,
})  # fmt: skip
PREPARATIONS: Final[Mapping[str, Callable[[FaultSpec, FaultContext], None]]] = MappingProxyType({
    "port-taken": _start_squatter, "neighbour": _start_neighbour,
})  # fmt: skip
