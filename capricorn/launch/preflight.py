"""Looks at this machine before anything starts: the environment of a record, the checks of doctor, the refusals of run.

Imports no torch, and starts no process but git and the one that asks the driver for GPUs.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from tempfile import gettempdir

import psutil

import capricorn
from capricorn.config.scenario import Scenario
from capricorn.emulation.testbed import NAMESPACES, USER_NAMESPACES
from capricorn.errors import ConfigError
from capricorn.faults.applicability import why_not
from capricorn.faults.feasibility import why_not_here
from capricorn.launch.persist_folder import check_shared_dir
from capricorn.planner.placement import recovery_probability
from capricorn.records.samples import Environment
from capricorn.runtime.comm.addresses import LOOPBACK, check_endpoint, why_no_endpoint, why_no_loopback
from capricorn.runtime.store.populate import populate_rate
from capricorn.sizing.gpus import find_gpus
from capricorn.sizing.memory import NUM_SLOTS, Needs, needs_of
from capricorn.sizing.memory_limit import available_memory
from capricorn.sizing.written_folders import written_folders
from capricorn.systems.registry import SYSTEMS, find
from capricorn.units import KIB, MIB, Bytes, count_noun, format_bytes, format_seconds

MIN_PYTHON = (3, 11)
PACKAGES = ("torch", "capricorn-bench", "numpy", "fairscale", "torchsnapshot", "lm-resiliency", "torch_checkpointing")
BASE_FILES, FILES_PER_RANK = 64, 16
"""Descriptors of one process: libraries, pipes and logs, and per rank its gloo and checkpoint sockets and a slot."""
BASE_ADDRESS_BYTES: Bytes = 1400 * MIB
"""Address space of a rank: libraries, and what its threads reserve for stacks and heaps."""
BASE_FILE_BYTES: Bytes = 32 * MIB
"""Size of the largest file whatever the model: its tokens."""

CUDA_BYTES: Bytes = 2048 * MIB
"""Memory of a GPU that no formula counts: CUDA's context, workspaces of cuBLAS, buffers of NCCL, gaps of the allocator.
An allowance, not measured."""

NUM_LOST = 2

_CAP_NET_ADMIN = 12


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at: what there is, what is needed, and what to do when that does not suffice."""

    name: str
    ok: bool
    found: str
    needed: str
    advice: str = ""


# --- the environment of a record ---------------------------------------------------------------------------------


def environment(device: str) -> Environment:
    """Returns the versions, commit and hardware this process runs on, by metadata; imports none of the packages."""
    versions = {name: version for name in PACKAGES if (version := _version(name))}
    return Environment(
        versions=versions | {"python": platform.python_version()},
        commit=_commit(),
        host=platform.node(),
        cpu=_cpu_model(),
        num_cpus=_num_cpus(),
        memory_bytes=psutil.virtual_memory().total,
        device=device,
        kernel=platform.release(),
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    """Returns the commit of the checkout this package runs from, `-dirty` when changed; empty for an installed one."""
    checkout = Path(capricorn.__file__).parents[1]
    if not (checkout / ".git").exists():
        return ""
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu_model() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    return match[1] if match else platform.processor() or platform.machine()


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# --- devices -----------------------------------------------------------------------------------------------------


def num_cuda_devices() -> int:
    """Returns how many CUDA devices the installed torch can use, by the driver and not by what a variable says."""
    return len(find_gpus().found)


def resolve_device(scenario: Scenario) -> Scenario:
    """Returns the scenario with device `auto` replaced: `cuda` when there is a device, else `cpu`."""
    if scenario.cluster.device != "auto":
        return scenario
    device = "cuda" if num_cuda_devices() else "cpu"
    return scenario.model_copy(update={"cluster": scenario.cluster.model_copy(update={"device": device})})


# --- checks ------------------------------------------------------------------------------------------------------


def require(scenario: Scenario) -> None:
    """Checks that this machine can run the scenario.

    One that follows another machine is checked when a run begins, by `require_machine`: then all hear why not.

    Raises:
        ConfigError: in one line: what is needed, what there is, what to do. The first thing missing is named.
    """
    check_shared_dir(scenario)
    if not scenario.launch.follows:
        check_endpoint(scenario.launch)
        require_machine(scenario)


def require_machine(scenario: Scenario) -> None:
    """Checks that this machine has what a run of the scenario needs of it; see `require`."""
    _refuse_first(_needed(resolve_device(scenario)))


def require_folders(scenario: Scenario, out: Path) -> None:
    """Checks that a run with its records below `out` can write all that it writes on disk.

    Raises:
        ConfigError: as for `require`.
    """
    if not scenario.launch.follows:  # its records go to machine 0
        _refuse_first(_check_folders(scenario, out))


def _refuse_first(found: Iterable[Check]) -> None:
    for check in found:
        if not check.ok:
            raise ConfigError(f"{check.name}: this run needs {check.needed}, found {check.found}; {check.advice}")


def checks(scenario: Scenario, out: Path) -> list[Check]:
    """Returns all there is to check before a run with its records below `out`: its needs, and what was asked of it."""
    scenario = resolve_device(scenario)
    asked = (
        *_check_folders(scenario, out),
        *_check_faults(scenario, out),
        *_foresee_losses(scenario),
        *_foresee_start(scenario),
    )
    return [*_needed(scenario), *asked]


def other_checks(scenario: Scenario) -> list[Check]:
    """Returns what this machine can do besides: the other systems, and privileges."""
    others = [_check_system(name, is_needed=False) for name in SYSTEMS if name != scenario.system.name]
    return [*others, _check_privileges()]


def _needed(scenario: Scenario) -> Iterator[Check]:
    cuda = scenario.cluster.device == "cuda"
    needs = needs_of(scenario, cuda=cuda)
    yield _check_python()
    yield _check_torch()
    yield _check_system(scenario.system.name, is_needed=True)
    if cuda:
        yield from _check_cuda(scenario, needs)
    yield from _check_folders_of_process()
    yield _check_files(scenario)
    yield from _check_limits(scenario, needs)
    yield from _check_network(scenario)
    yield _check_memory(scenario, needs)
    yield _check_tmpfs(scenario, needs)


def _check_python() -> Check:
    wanted = ".".join(map(str, MIN_PYTHON))
    return Check("python", sys.version_info >= MIN_PYTHON, platform.python_version(), f">= {wanted}", "install it")


def _check_torch() -> Check:
    found = _version("torch") if util.find_spec("torch") else ""
    return Check("torch", bool(found), found or "none", "installed", "pip install capricorn-bench")


def _check_system(name: str, *, is_needed: bool) -> Check:
    """Checks whether the module of a system is there, and its extra if that is needed; does not import it."""
    info = find(name)
    module = info.target.partition(":")[0]
    if not info.is_installed:
        return Check(f"system {name}", not is_needed, "not installed", f"module {info.needs}", info.install)
    ok = name not in SYSTEMS or util.find_spec(module) is not None  # one from outside was imported to be found
    return Check(f"system {name}", ok, "there" if ok else "missing", "its module", f"reinstall: no module {module}")


def _check_cuda(scenario: Scenario, needs: Needs) -> Iterator[Check]:
    """Checks whether each rank of this machine has a GPU of its own, and room on it."""
    gpus, ranks = find_gpus(), _ranks_here(scenario)
    found = f"{count_noun(len(gpus.found), 'GPU')}{f' ({gpus.why_none})' if gpus.why_none else ''}"
    advice = "use fewer --nodes or --ranks-per-node, or --device cpu" if gpus.found else "use --device cpu"
    needed = f"a GPU for each of {count_noun(ranks, 'rank')} on this machine"
    yield Check("cuda", len(gpus.found) >= ranks, found, needed, advice)
    if gpus.found:
        least = min(gpu.free_bytes for gpu in gpus.found[:ranks])
        needed_bytes = needs.device_bytes + CUDA_BYTES
        yield Check(
            "GPU memory", least >= needed_bytes, f"{format_bytes(least)} free", f"{format_bytes(needed_bytes)} a rank",
            "use a smaller --model or model.batch_size, or end what else is on the GPU",
        )  # fmt: skip


def _ranks_here(scenario: Scenario) -> int:
    """Returns how many ranks this machine runs: those of all nodes, unless they are real machines."""
    return scenario.cluster.ranks_per_node if scenario.launch.nnodes else scenario.topology.world_size


def _check_files(scenario: Scenario) -> Check:
    needed = BASE_FILES + FILES_PER_RANK * scenario.topology.world_size
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    ok = soft == resource.RLIM_INFINITY or soft >= needed
    found = "no limit" if soft == resource.RLIM_INFINITY else str(soft)
    return Check("open files", ok, found, f"{needed} per process", f"use ulimit -n {needed} or fewer ranks")


def _check_limits(scenario: Scenario, needs: Needs) -> Iterator[Check]:
    """Checks limits that few shells set; one that is not set is not told."""
    slots_bytes = NUM_SLOTS * scenario.system.replicas * needs.shard_bytes
    limits = (
        ("file size", resource.RLIMIT_FSIZE, max(BASE_FILE_BYTES, needs.shard_bytes * 101 // 100 + MIB), "-f"),
        ("address space", resource.RLIMIT_AS, BASE_ADDRESS_BYTES + needs.device_bytes + slots_bytes, "-v"),
    )
    for name, number, needed, option in limits:
        soft, _ = resource.getrlimit(number)
        if soft != resource.RLIM_INFINITY:
            advice = f"use ulimit {option} {-(-needed // KIB)} or a smaller --model"
            yield Check(name, soft >= needed, format_bytes(soft), f"{format_bytes(needed)} per process", advice)


def _check_folders_of_process() -> Iterator[Check]:
    """Checks folders that every process has, and that libraries take for granted; those that are there are not told."""
    folders = (
        ("working folder", os.getcwd, "one that is there", "change to another folder"),
        ("temporary folder", gettempdir, "one that may be written", "set TMPDIR"),
    )
    for name, find_it, needed, advice in folders:
        try:
            find_it()
        except OSError as error:
            yield Check(name, False, f"none: {error.strerror}", needed, advice)


def _check_tmpfs(scenario: Scenario, needs: Needs) -> Check:
    root = Path(scenario.store.root)
    name, needed = f"store {root}", f"{format_bytes(needs.store_bytes)} free"
    if not root.is_dir() or not os.access(root, os.W_OK | os.X_OK):
        return Check(name, False, "no writable folder", needed, "name a tmpfs with --set store.root=DIR")
    free = _free_bytes(root)
    kind = _filesystem(root)
    found = f"{format_bytes(free)} free on {kind}" + ("" if kind == "tmpfs" else ", which is not memory")
    return Check(name, free >= needs.store_bytes, found, needed, _less_store(scenario, root, needs))


def _check_memory(scenario: Scenario, needs: Needs) -> Check:
    found = available_memory()
    advice = "use a smaller --model" + _fewer_copies(scenario)
    return Check(
        "host memory", found >= needs.host_bytes, f"{format_bytes(found)} available",
        format_bytes(needs.host_bytes), advice,
    )  # fmt: skip


def _check_folders(scenario: Scenario, out: Path) -> Iterator[Check]:
    """Checks whether all that a run writes on disk finds room; makes no folder."""
    for each in written_folders(scenario, out):
        can_write, free_bytes = each.can_be_written, _free_bytes(each.there)
        found = f"{format_bytes(free_bytes)} free" if can_write else f"{each.there} is no writable folder"
        ok = can_write and free_bytes >= each.num_bytes
        yield Check(each.name, ok, found, f"{format_bytes(each.num_bytes)} free", each.advice)


def _check_network(scenario: Scenario) -> Iterator[Check]:
    """Checks whether the nodes can meet: over the loopback of this machine, or at the endpoint that was named."""
    if scenario.launch.nnodes:
        reason = why_no_endpoint(scenario.launch)
        yield Check("rendezvous", not reason, reason or "can be reached", scenario.launch.rdzv_endpoint, "name another")
    elif scenario.cluster.links not in (NAMESPACES, USER_NAMESPACES):
        reason = why_no_loopback()
        advice = "bring it up: ip link set lo up"
        yield Check("loopback", not reason, reason or "carries", f"{LOOPBACK} that carries", advice)


def _check_faults(scenario: Scenario, out: Path) -> Iterator[Check]:
    """Checks whether each failure can be injected here, into a run that is recorded below `out`."""
    for fault in scenario.faults:
        reason = why_not(fault, scenario) or why_not_here(fault, scenario, out)
        yield Check(f"fault {fault}", not reason, reason or "can be injected", "-", "leave it out")


def _foresee_losses(scenario: Scenario) -> Iterator[Check]:
    """Tells how likely memory still holds a copy of every shard when two nodes are lost at once."""
    system, num_nodes = scenario.system, scenario.cluster.nodes
    if num_nodes >= NUM_LOST and system.every and "peer" in find(system.name).tiers:
        probability = recovery_probability(num_nodes, system.replicas, NUM_LOST)
        yield Check("two nodes lost at once", True, f"recoverable with probability {probability:.1%}", "-")


def _foresee_start(scenario: Scenario) -> Iterator[Check]:
    """Tells how long taking the memory of the store keeps a run from starting, by a sample of it."""
    cuda, root = scenario.cluster.device == "cuda", Path(scenario.store.root)
    num_bytes = needs_of(scenario, cuda=cuda).store_bytes
    with contextlib.suppress(OSError):  # no such folder or no room in it is told by another check
        if num_bytes and find(scenario.system.name).replicates:
            rate = populate_rate(root)
            found = f"at most {format_seconds(num_bytes / rate)} for {format_bytes(num_bytes)}"
            sample = f"one thread took {format_bytes(rate)} a second of a sample; the threads of all ranks share it"
            yield Check("start of the store", True, f"{found}: {sample}", "-")


def _less_store(scenario: Scenario, root: Path, needs: Needs) -> str:
    enlarge = f"enlarge it (mount -o remount,size={-(-needs.store_bytes // 2**20)}M {root})"
    return f"use a smaller --model{_fewer_copies(scenario)}, {enlarge}, or --set store.root=DIR"


def _fewer_copies(scenario: Scenario) -> str:
    return ", --replicas 1" if scenario.system.replicas > 1 else ""


def _check_privileges() -> Check:
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)$", _read(Path("/proc/self/status")), re.MULTILINE)
    can = effective is not None and bool(int(effective[1], 16) >> _CAP_NET_ADMIN & 1)
    found = "CAP_NET_ADMIN" if can else "no CAP_NET_ADMIN"
    return Check("privileges", True, found, "none for --cluster local", "run as root to emulate a network")


# --- file systems ------------------------------------------------------------------------------------------------


def _free_bytes(folder: Path) -> Bytes:
    facts = os.statvfs(folder)
    return facts.f_bavail * facts.f_frsize if facts.f_blocks else sys.maxsize  # some have no limit, and say so by 0


def _filesystem(folder: Path) -> str:
    """Returns the type of the file system a folder lies on: `tmpfs`, `ext4`, ..."""
    path = folder.resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if path.is_relative_to(part.mountpoint)]
    # The last of equal mount points hides the earlier ones.
    return max(reversed(mounts), key=lambda part: len(part.mountpoint)).fstype if mounts else "unknown"
