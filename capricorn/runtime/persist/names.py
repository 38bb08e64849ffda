"""Each name in a checkpoint stands for one thing: what several ranks have under it must be the same on all of them.

Collective, once, when a system with a persistent tier is attached; contents are read of names alone that several ranks
have.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import torch
import torch.distributed as dist
from xxhash import xxh3_64, xxh3_64_intdigest

from capricorn.errors import StateError
from capricorn.runtime.comm.collectives import gather, gather_texts, maximum
from capricorn.systems.flat_state import FlatState
from capricorn.systems.tensor_bytes import content_of, describe

_TEXT_BYTES: Final = 1024


def refuse_shared_names(group: dist.ProcessGroup, state: FlatState) -> None:
    """Compares what ranks have under equal names.

    Raises:
        StateError: on all ranks, if two of them have other contents under one name; it and the ranks are named.
    """
    names = {_id_of(name.encode()): name for name in _names_of(state)}
    holders = _gather_ids(group, list(names))
    counts = Counter(each for ids in holders for each in ids)
    shared = sorted(each for each, count in counts.items() if count > 1)
    if not shared:
        return
    mine = torch.tensor([_content_of(state, names[each]) if each in names else 0 for each in shared])
    by_rank = gather(group, mine)
    differing = [
        index for index in range(len(shared)) if len({int(row[index]) for row in by_rank if int(row[index])}) > 1
    ]
    if not differing:
        return
    first = shared[differing[0]]
    text = next(filter(None, gather_texts(group, names.get(first, ""), _TEXT_BYTES)))
    ranks = [rank for rank, ids in enumerate(holders) if first in ids]
    more = f" (so are {len(differing) - 1} further names)" if len(differing) > 1 else ""
    raise StateError(
        f"{text} is on ranks {', '.join(map(str, ranks))} with other contents{more}, of which the persistent tier "
        f"could keep one: give each its own name, as rank{ranks[-1]}/{text}"
    )


def _names_of(state: FlatState) -> list[str]:
    return [*(entry.key for entry in state.entries if not entry.is_values), *state.aliases]


def _id_of(data: bytes) -> int:
    """Returns a number for bytes that fits a signed integer and is not 0."""
    return xxh3_64_intdigest(data) >> 1 or 1


def _content_of(state: FlatState, name: str) -> int:
    if name in state.aliases:
        return _id_of(f"another name of {state.aliases[name]}".encode())
    tensor, hasher = state.tensors[name], xxh3_64()
    hasher.update(describe(tensor.cpu()).encode())
    hasher.update(content_of(tensor))
    return hasher.intdigest() >> 1 or 1


def _gather_ids(group: dist.ProcessGroup, mine: list[int]) -> list[set[int]]:
    size = max(1, maximum(group, len(mine)))
    rows = gather(group, torch.tensor(mine + [0] * (size - len(mine)), dtype=torch.int64))
    return [set(row.tolist()) - {0} for row in rows]
