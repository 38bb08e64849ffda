"""Small facts that all ranks of a job tell each other, as fixed-size tensors: nothing is pickled.

Every function is collective, and is called by the training thread.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

from capricorn.runtime.store.slot import Layout

_TEXT_BYTES = 64
_SECRET_BYTES = 32
_SIGN = 1 << 63


def gather_layouts(group: dist.ProcessGroup, mine: Layout) -> list[Layout]:
    """Returns, by rank, the layout of its state; the block size is the same for all."""
    signed_digest = (mine.digest ^ _SIGN) - _SIGN
    rows = gather(group, torch.tensor([mine.payload_bytes, signed_digest], dtype=torch.int64))
    return [Layout(int(row[0]), mine.block_bytes, int(row[1]) % (1 << 64)) for row in rows]


def share_text(group: dist.ProcessGroup, mine: str) -> str:
    """Returns the text of rank 0, of at most 64 bytes, on all ranks."""
    text = torch.frombuffer(bytearray(mine.encode().ljust(_TEXT_BYTES)), dtype=torch.uint8)
    dist.broadcast(text, group=group, group_src=0)
    return bytes(text.tolist()).decode().rstrip()


def gather_texts(group: dist.ProcessGroup, mine: str, num_bytes: int) -> list[str]:
    """Returns, by rank, its text; of a longer text the first `num_bytes` of UTF-8."""
    text = mine.encode()[:num_bytes].ljust(num_bytes)
    rows = gather(group, torch.frombuffer(bytearray(text), dtype=torch.uint8))
    return [bytes(row.tolist()).decode(errors="replace").rstrip() for row in rows]


def gather_long_texts(group: dist.ProcessGroup, mine: str) -> list[str]:
    """Returns, by rank, its text of any length."""
    return gather_texts(group, mine, maximum(group, len(mine.encode())))


def total(group: dist.ProcessGroup, mine: int) -> int:
    """Returns the sum of the values of all ranks."""
    value = torch.tensor(mine)
    dist.all_reduce(value, group=group)
    return int(value)


def maximum(group: dist.ProcessGroup, mine: int) -> int:
    """Returns the largest of the values of all ranks."""
    value = torch.tensor(mine)
    dist.all_reduce(value, dist.ReduceOp.MAX, group=group)
    return int(value)


def maxima(group: dist.ProcessGroup, mine: Sequence[int]) -> list[int]:
    """Returns, by place, the largest of the values that the ranks have there; of as many on all of them."""
    if not mine:
        return []
    values = torch.tensor(mine, dtype=torch.int64)
    dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
    return [int(value) for value in values]


def gather_addresses(group: dist.ProcessGroup, mine: tuple[str, int]) -> list[tuple[str, int]]:
    """Returns, by rank, the host name and port given by it."""
    pairs = [text.split() for text in gather_texts(group, f"{mine[0]} {mine[1]}", _TEXT_BYTES)]
    return [(hostname, int(port)) for hostname, port in pairs]


def share_secret(group: dist.ProcessGroup) -> bytes:
    """Returns a secret that rank 0 draws anew each time, known to the ranks of this attempt alone."""
    secret = torch.frombuffer(bytearray(os.urandom(_SECRET_BYTES)), dtype=torch.uint8)
    dist.broadcast(secret, group=group, group_src=0)
    return bytes(secret.tolist())


def barrier(group: dist.ProcessGroup) -> None:
    """Returns when all ranks have come here."""
    dist.all_reduce(torch.zeros(1), group=group)


def gather(group: dist.ProcessGroup, mine: torch.Tensor) -> list[torch.Tensor]:
    """Returns, by rank, its tensor, of the same shape and dtype on all."""
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    return rows
