"""Asks the CUDA driver for the GPUs that this process would have, and prints them as JSON; a process of its own.

Total memory is that which the driver tells, free memory that which NVML does, in bytes.
"""

from __future__ import annotations

import ctypes
import json
from typing import Any

ADDRESS_BYTES = 32
"""Of a PCI bus id, with its end."""


def main() -> None:
    """Prints a list of `{"total_bytes", "free_bytes"}`, in the order of the devices' numbers."""
    cuda = ctypes.CDLL("libcuda.so.1")
    _ask(cuda, "cuInit", 0)
    count = ctypes.c_int()
    _ask(cuda, "cuDeviceGetCount", ctypes.byref(count))
    print(json.dumps([_device(cuda, number) for number in range(count.value)]))


def _device(cuda: ctypes.CDLL, number: int) -> dict[str, int]:
    device, total = ctypes.c_int(), ctypes.c_size_t()
    address = ctypes.create_string_buffer(ADDRESS_BYTES)
    _ask(cuda, "cuDeviceGet", ctypes.byref(device), number)
    _ask(cuda, "cuDeviceTotalMem_v2", ctypes.byref(total), device)
    _ask(cuda, "cuDeviceGetPCIBusId", address, ADDRESS_BYTES, device)
    free = _free_bytes(address.value)  # of a part of a GPU (MIG) it is that of the whole
    return {"total_bytes": total.value, "free_bytes": total.value if free is None else min(total.value, free)}


def _free_bytes(address: bytes) -> int | None:
    """Returns the free memory of the GPU at that PCI address; None where nobody tells it."""
    handle, memory = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        calls = (
            nvml.nvmlInit_v2(),
            nvml.nvmlDeviceGetHandleByPciBusId_v2(address, ctypes.byref(handle)),
            nvml.nvmlDeviceGetMemoryInfo(handle, memory),
        )
    except (OSError, AttributeError):
        return None
    return None if any(calls) else memory[1]


def _ask(cuda: ctypes.CDLL, name: str, *arguments: Any) -> None:
    if error := getattr(cuda, name)(*arguments):
        raise SystemExit(f"{name}: error {error}")


if __name__ == "__main__":
    main()
