"""Small facts that all ranks of a job tell each other, as fixed-size tensors: nothing is pickled.

Every function is collective, and is called by the training thread. Each says what it waits for, so that a peer that is
lost meanwhile is one error that names it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from capricorn.errors import PeerLostError
from capricorn.runtime.deadline import MIN_S
from capricorn.runtime.store.slot import Layout
from capricorn.units import Seconds

_TEXT_BYTES = 64
_SECRET_BYTES = 32
_SIGN = 1 << 63
_NO_ITERATION: Final = -1
_SOURCE_PLACE = re.compile(r"^\[[^]]*\] *")
"""The source file and line that gloo puts in front of what it says."""


@contextmanager
def waiting_for(group: dist.ProcessGroup, what: str) -> Iterator[None]:
    """Turns the error of a collective into one that names this rank and what it waited for.

    Raises:
        PeerLostError: a peer is gone, or did not come in time.
    """
    try:
        yield
    except RuntimeError as error:
        said = _SOURCE_PLACE.sub("", str(error).partition("\n")[0])
        raise PeerLostError(f"rank {dist.get_rank(group)} lost a peer while it waited for {what}: {said}") from error


def finish(group: dist.ProcessGroup, work: dist.Work, what: str, timeout_s: Seconds | None = None) -> None:
    """Returns when a collective that is under way has ended; by default the deadline is that of its group.

    Args:
        group: of the ranks that take part.
        work: the collective; it goes on if the time is over first.
        what: says what is waited for, in words.
        timeout_s: for how long at most.

    Raises:
        PeerLostError: a peer is gone, or did not come in time.
    """
    with waiting_for(group, what):
        if timeout_s is None:
            work.wait()
        else:
            work.wait(timedelta(seconds=max(MIN_S, timeout_s)))


def gather_layouts(group: dist.ProcessGroup, mine: Layout) -> list[Layout]:
    """Returns, by rank, the layout of its state; the block size is the same for all."""
    signed_digest = (mine.digest ^ _SIGN) - _SIGN
    rows = gather(group, torch.tensor([mine.payload_bytes, signed_digest], dtype=torch.int64), "the others' layouts")
    return [Layout(int(row[0]), mine.block_bytes, int(row[1]) % (1 << 64)) for row in rows]


def share_text(group: dist.ProcessGroup, mine: str) -> str:
    """Returns the text of rank 0, of at most 64 bytes, on all ranks."""
    text = torch.frombuffer(bytearray(mine.encode().ljust(_TEXT_BYTES)), dtype=torch.uint8)
    with waiting_for(group, "a text of rank 0"):
        dist.broadcast(text, group=group, group_src=0)
    return bytes(text.tolist()).decode().rstrip()


def gather_texts(group: dist.ProcessGroup, mine: str, num_bytes: int, what: str = "the others' texts") -> list[str]:
    """Returns, by rank, its text; of a longer text the first `num_bytes` of UTF-8.

    Args:
        group: of the ranks.
        mine: the text of this rank.
        num_bytes: of the longest text.
        what: says what is waited for, in words.
    """
    text = mine.encode()[:num_bytes].ljust(num_bytes)
    rows = gather(group, torch.frombuffer(bytearray(text), dtype=torch.uint8), what)
    return [bytes(row.tolist()).decode(errors="replace").rstrip() for row in rows]


def gather_long_texts(group: dist.ProcessGroup, mine: str, what: str = "the others' texts") -> list[str]:
    """Returns, by rank, its text of any length; `what` says what is waited for."""
    return gather_texts(group, mine, maximum(group, len(mine.encode()), what), what)


def maximum(group: dist.ProcessGroup, mine: int, what: str = "the largest number of all ranks") -> int:
    """Returns the largest of the values of all ranks; `what` says what is waited for."""
    return maxima(group, [mine], what)[0]


def newest(group: dist.ProcessGroup, mine: int | None) -> int | None:
    """Returns the largest iteration of all ranks, None if no rank has one."""
    found = maximum(group, _NO_ITERATION if mine is None else mine, "the newest iteration of the others")
    return None if found == _NO_ITERATION else found


def maxima(group: dist.ProcessGroup, mine: Sequence[int], what: str = "the largest numbers of all ranks") -> list[int]:
    """Returns, by place, the largest of the values that the ranks have there; of as many on all of them."""
    if not mine:
        return []
    values = torch.tensor(mine, dtype=torch.int64)
    with waiting_for(group, what):
        dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
    return [int(value) for value in values]


def gather_addresses(group: dist.ProcessGroup, mine: tuple[str, int]) -> list[tuple[str, int]]:
    """Returns, by rank, the host name and port given by it."""
    texts = gather_texts(group, f"{mine[0]} {mine[1]}", _TEXT_BYTES, "the others' addresses")
    pairs = [text.split() for text in texts]
    return [(hostname, int(port)) for hostname, port in pairs]


def share_secret(group: dist.ProcessGroup) -> bytes:
    """Returns a secret that rank 0 draws anew each time, known to the ranks of this attempt alone."""
    secret = torch.frombuffer(bytearray(os.urandom(_SECRET_BYTES)), dtype=torch.uint8)
    with waiting_for(group, "the secret of rank 0"):
        dist.broadcast(secret, group=group, group_src=0)
    return bytes(secret.tolist())


def barrier(group: dist.ProcessGroup, what: str = "all ranks to come to the same point") -> None:
    """Returns when all ranks have come here; `what` says what is waited for."""
    with waiting_for(group, what):
        dist.all_reduce(torch.zeros(1), group=group)


def gather(group: dist.ProcessGroup, mine: torch.Tensor, what: str = "the others' numbers") -> list[torch.Tensor]:
    """Returns, by rank, its tensor, of the same shape and dtype on all; `what` says what is waited for."""
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    with waiting_for(group, what):
        dist.all_gather(rows, mine, group=group)
    return rows
