"""How `torch.save` is made as quick as it can be, for this thread and as long as it is wanted."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import cast

from torch.utils.serialization import config


def without_crc32() -> AbstractContextManager[None]:
    """Inside, `torch.save` computes no checksums, which cost most of its time and which `torch.load` never looks at."""
    return cast(AbstractContextManager[None], config.patch({"save.compute_crc32": False}))  # type: ignore[attr-defined]
