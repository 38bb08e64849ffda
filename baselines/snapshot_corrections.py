"""What would make TorchSnapshot's checkpoints wrong, or its failures endless, and is corrected while it is used.

Knows the inside of version 0.1.0 of the library, which is no longer maintained, but no system.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import torchsnapshot.snapshot
from torchsnapshot.io_preparers.tensor import TensorBufferStager
from torchsnapshot.knobs import get_slab_size_threshold_bytes, is_batching_disabled
from torchsnapshot.manifest import Entry
from torchsnapshot.serialization import Serializer

from capricorn.units import Bytes, Seconds


@contextmanager
def corrected(budget_bytes: Bytes, timeout_s: Seconds) -> Iterator[None]:
    """Inside, the library copies what it must, and waits for no peer longer than that.

    The RAM budget is set here too, since the library takes it from the environment, which is everybody's.
    """
    with (
        patch.object(torchsnapshot.snapshot, "get_process_memory_budget_bytes", lambda pg: budget_bytes),
        patch.object(torchsnapshot.snapshot, "PendingSnapshot", partial(Pending, timeout_s)),
        patch.object(TensorBufferStager, "_should_copy_cpu_tensor", _is_live),
    ):
        yield


class Pending(torchsnapshot.snapshot.PendingSnapshot):
    """With our deadline for peers (the library's is 1800 s), and failed if its thread is, however that ended."""

    def __init__(self, timeout_s: Seconds, **parts: Any) -> None:
        self.DEFAULT_BARRIER_TIMEOUT = timedelta(seconds=timeout_s)
        self.manifest: dict[str, Entry] = parts["metadata"].manifest
        self.storage = parts["storage"]
        super().__init__(**parts)

    def _complete_snapshot(self, *arguments: Any, **parts: Any) -> None:
        try:
            super()._complete_snapshot(*arguments, **parts)
        except Exception:  # noqa: BLE001 - a store that is gone raises in the library's own handler
            self.exc_info = sys.exc_info()


def _is_live(stager: TensorBufferStager) -> bool:
    """Whether the memory that will be written is the live tensor's own, so that it has to be copied.

    The library means to ask that, but compares a string with an enum and never copies. What goes into a slab is copied
    there, and what is not contiguous on the way.
    """
    is_raw = stager.entry.serializer == Serializer.BUFFER_PROTOCOL.value
    has_slab = not is_batching_disabled() and stager.tensor.nbytes < get_slab_size_threshold_bytes()
    return is_raw and stager.tensor.is_contiguous() and not has_slab
