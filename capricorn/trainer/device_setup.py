"""The device of a rank: which one it is, that it computes the same sums again, and which cores are near it.

On the CPU nothing is set here. What asks CUDA or the machine is a parameter, so that all of it runs without a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any, Final

import torch

from capricorn.errors import ConfigError

SYS: Final = Path("/sys")
CUBLAS_WORKSPACE: Final = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""Without it products of matrices may sum in another order in each run. Source: cuBLAS, results reproducibility."""
ASYNC_ERRORS: Final = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
"""Its own handling of a lost peer ends the process, which may go on in the next attempt."""


def set_up_device(kind: str, local_rank: int, cuda: Any = torch.cuda) -> torch.device:
    """Returns the device of a rank, made current; to be called before anything uses CUDA or starts a thread.

    Args:
        kind: cpu or cuda.
        local_rank: among the ranks of this machine.
        cuda: what is asked for devices, torch.cuda or what stands in for it.

    Raises:
        ConfigError: there is no GPU for this rank.
    """
    if kind != "cuda":
        return torch.device("cpu")
    device = torch.device("cuda", gpu_of(local_rank, cuda.device_count()))
    os.environ.update((CUBLAS_WORKSPACE, ASYNC_ERRORS))
    # Some ops have no such way on CUDA: they warn, and a run goes on.
    torch.use_deterministic_algorithms(True, warn_only=True)
    # With it every new tensor would be filled, also those that are written next.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    cuda.set_device(device)
    bind_near(pci_address(cuda.get_device_properties(device)))
    return device


def gpu_of(local_rank: int, num_gpus: int) -> int:
    """Returns the number of the GPU of a rank.

    Raises:
        ConfigError: there are fewer GPUs than that.
    """
    if local_rank >= num_gpus:
        raise ConfigError(
            f"rank {local_rank} of this machine has no GPU, there are {num_gpus}; use fewer --nodes or "
            "--ranks-per-node, or --device cpu"
        )
    return local_rank


def pci_address(properties: Any) -> str:
    """Returns where a GPU is on the bus, as /sys names it: `0000:3b:00.0`; empty if torch does not tell."""
    try:
        place = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
    except AttributeError:
        return ""
    return "{:04x}:{:02x}:{:02x}.0".format(*place)


def bind_near(
    address: str, sys: Path = SYS, bind: Callable[[int, Set[int]], None] = os.sched_setaffinity
) -> frozenset[int]:
    """Binds this thread, and those it starts, to the cores of its GPU's NUMA node; returns them, none if it does not.

    It does not where the machine has one node or does not tell, and where none of the cores that we may use are there.

    Args:
        address: of the GPU on the PCI bus.
        sys: what /sys is.
        bind: sets the cores of a thread, 0 being the calling one.
    """
    ours = os.sched_getaffinity(0)
    near = ours & cores_near(address, sys)
    if not near or near == ours:
        return frozenset()
    bind(0, near)
    return frozenset(near)


def cores_near(address: str, sys: Path = SYS) -> frozenset[int]:
    """Returns the cores of the NUMA node of a device on the PCI bus, none if that is not told."""
    try:
        node = int((sys / "bus/pci/devices" / address / "numa_node").read_text())
        text = (sys / f"devices/system/node/node{node}/cpulist").read_text().strip()
    except (OSError, ValueError):
        return frozenset()
    spans = [span.partition("-") for span in text.split(",") if span]
    return frozenset(core for first, _, last in spans for core in range(int(first), int(last or first) + 1))
