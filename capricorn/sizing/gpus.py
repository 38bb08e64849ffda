"""The GPUs that a process started here would have, as the CUDA driver says; imports no torch.

The driver is asked in a child process: whoever has initialised it can fork no rank that uses it, and a driver that
hangs takes only the child along. It heeds CUDA_VISIBLE_DEVICES, whatever words schedulers put there.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Final

from capricorn.process import PYTHON
from capricorn.units import Bytes, Seconds

DRIVER_TIMEOUT_S: Final[Seconds] = 60.0
_DEVICES: Final = ("nvidiactl", "dxg")
"""In /dev where there is a driver: of Linux, and of Linux in Windows."""
_NO_DEVICE: Final = "cuInit: error 100"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, by what the driver says of it."""

    total_bytes: Bytes
    free_bytes: Bytes
    """What other processes leave of its memory; all of it where that is not told."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """Those that there are, in the order of their numbers, and why there is none."""

    found: tuple[Gpu, ...] = ()
    why_none: str = ""


@functools.cache
def find_gpus() -> Gpus:
    """Returns the GPUs that torch would have here; asked once."""
    if not _built_for_cuda():
        return Gpus(why_none="this torch is not built for CUDA")
    if not any((Path("/dev") / name).exists() for name in _DEVICES):
        return Gpus(why_none="no driver in /dev")
    return ask_driver((*PYTHON, "capricorn.sizing.driver_query"))


def ask_driver(command: Sequence[str], timeout_s: Seconds = DRIVER_TIMEOUT_S) -> Gpus:
    """Returns what a command prints of the GPUs, as `driver_query` does."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Gpus(why_none=f"the CUDA driver does not answer: {type(error).__name__}")
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Gpus(why_none="no device is visible" if why == _NO_DEVICE else f"the CUDA driver fails: {why}")
    found = tuple(Gpu(**facts) for facts in json.loads(done.stdout))
    return Gpus(found, "" if found else "no device is visible")


def _built_for_cuda() -> bool:
    spec = util.find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    text = file.read_text(encoding="utf-8") if file and file.exists() else ""
    return re.search(r"^cuda\b.*=\s*['\"]\d", text, re.MULTILINE) is not None
