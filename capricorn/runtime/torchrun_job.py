"""Joins a rank to a torchrun job, for training loops of one's own: no launcher of this project is needed."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from capricorn.config.endpoint import Endpoint
from capricorn.config.fields import check_path_part
from capricorn.config.planner import PlannerConfig
from capricorn.config.scenario import PersistConfig, SystemConfig
from capricorn.errors import ConfigError, StoreError
from capricorn.runtime.comm.addresses import listening_address
from capricorn.runtime.comm.collectives import gather_texts, maximum, waiting_for
from capricorn.runtime.deadline import check_timeout
from capricorn.runtime.store.node_store import RUN_PREFIX, NodeStore, lock_folder
from capricorn.systems.interface import JobContext
from capricorn.topology import Topology
from capricorn.units import Seconds

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
NETWORK: Final = Path("/proc/self/ns/net")
_TEXT_BYTES: Final = 128


def join_job(
    run_id: str,
    config: SystemConfig,
    *,
    planner: PlannerConfig | None = None,
    persist: PersistConfig | None = None,
    device: torch.device | str = "cpu",
    address: str = "127.0.0.1",
    root: str | Path = "/dev/shm",
    timeout_s: Seconds = 120.0,
) -> JobContext:
    """Returns who and where this rank is, from torchrun's environment; makes this node's store if it is not there.

    Collective; `init_process_group` has been called. The store outlives the workers, so that the next attempt finds it.
    While one of them lives, `capricorn-bench clean` leaves it alone.

    Args:
        run_id: names the job; the same on all ranks and in all its attempts.
        config: `replicas` may not exceed the number of nodes.
        planner: how system `capricorn` plans; by default as well as it can.
        persist: which checkpoints are persisted as well, and where: `dir` is then needed, a folder that all nodes
            reach.
        device: where the state of this rank lives.
        address: of this node's own interface, by which its peers reach it: IPv4, IPv6, or a host name.
        root: a tmpfs.
        timeout_s: deadline of the control group's collectives.

    Raises:
        ConfigError: this is not a torchrun worker, `run_id` cannot be part of a file's name, there are more replicas
            than nodes, `persist` names no folder, no such timeout can be waited for, or `address` is not of this
            machine, or one that peers on other machines do not reach.
        StoreError: the store cannot be made.
        PeerLostError: a peer is gone, or did not come in time.
    """
    check_timeout("timeout_s", timeout_s)
    check_path_part(run_id, "run_id")
    persist = persist or PersistConfig()
    if persist.every and not persist.dir:
        raise ConfigError("persist.every needs persist.dir, a folder that all nodes reach")
    try:
        rank, local_size = int(os.environ["RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    except KeyError as error:
        raise ConfigError(f"{error.args[0]} is not set; start the job with torchrun") from None
    if (world := dist.group.WORLD) is None:
        raise ConfigError("there is no process group; call init_process_group before join_job")
    with waiting_for(world, "a group of all ranks for checkpoints"):
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    topology = Topology(dist.get_world_size() // local_size, local_size)
    if config.replicas > topology.num_nodes:
        raise ConfigError(f"replicas={config.replicas} needs as many nodes, there are {topology.num_nodes}")
    attempt = maximum(group, restarts, "the others to tell how often the job has started")
    _refuse_loopback(gather_texts(group, f"{_network()} {address}", _TEXT_BYTES, "the others' addresses"))
    return JobContext(
        run_id=run_id,
        attempt=attempt,
        topology=topology,
        rank=rank,
        device=torch.device(device),
        control_group=group,
        config=config,
        planner=planner or PlannerConfig(),
        persist=persist,
        persist_dir=_make_persistent_tier(Path(persist.dir)) if persist.dir else None,
        store_dir=_make_store(Path(root) / (RUN_PREFIX + run_id), run_id, topology.node_of(rank), topology, timeout_s),
        address=listening_address(Endpoint(address, 0), f"address={address!r}"),
    )


def _make_persistent_tier(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"persist.dir {folder}: cannot make the folder: {error.strerror}") from None
    return folder.resolve()


def _network() -> str:
    """Returns what tells the network of this process from others: a loopback address leads nowhere out of it."""
    try:
        return f"{BOOT_ID.read_text().strip()}/{NETWORK.readlink()}"
    except OSError:  # no Linux, or no /proc
        return socket.gethostname()


def _refuse_loopback(ends: Sequence[str]) -> None:
    """Refuses, on all ranks alike, a loopback address where there are several machines.

    Args:
        ends: by rank, its network and its address.

    Raises:
        ConfigError: a rank has one.
    """
    networks, _, addresses = zip(*(end.partition(" ") for end in ends), strict=True)
    loopback = [rank for rank, address in enumerate(addresses) if _is_loopback(address)]
    if len(set(networks)) > 1 and loopback:
        raise ConfigError(
            f"address={addresses[loopback[0]]!r} of rank {loopback[0]} is a loopback address, and the ranks are on "
            f"{len(set(networks))} machines: give each rank the address of its own node's interface"
        )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _make_store(folder: Path, run_id: str, node: int, topology: Topology, timeout_s: Seconds) -> Path:
    try:
        lock_folder(folder, fcntl.LOCK_SH, timeout_s)  # held, with its descriptor, until this process ends
        NodeStore.create(folder / f"node{node}", run_id, node, topology)
    except OSError as error:
        raise StoreError(f"cannot make the store {folder}: {error.strerror}") from None
    return folder / f"node{node}"
