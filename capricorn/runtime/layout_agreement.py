"""Do the copies that survive fit the state that is attached? All ranks agree on it before a slot is opened.

    what is found                                   what becomes of it
    no complete copy                                slots of another layout are made anew
    complete copies of the same layout              kept; if the small values had other room, all get the larger one
    complete copies of another layout, anywhere     LayoutMismatchError on all ranks, with the first keys that differ;
                                                    nothing is emptied

Collective, on the training thread. Knows no tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, Final

import torch.distributed as dist

from capricorn.errors import LayoutMismatchError, shortened
from capricorn.runtime.comm.collectives import gather_layouts, gather_long_texts, gather_texts, maxima, maximum
from capricorn.runtime.store.node_store import NodeStore
from capricorn.runtime.store.slot import Layout
from capricorn.systems.flat_state import VALUES, FlatState
from capricorn.units import Bytes, format_bytes

_TEXT_BYTES: Final = 2048


def agree_on_layouts(
    group: dist.ProcessGroup, store: NodeStore, state: FlatState, owners: Sequence[int], block_bytes: Bytes
) -> list[Layout]:
    """Returns, by rank, the layout of its state; gives this one's small values the room that they have in its copies.

    Args:
        group: of all ranks.
        store: of this node.
        state: of this rank.
        owners: those whose copies this node keeps, this rank first.
        block_bytes: size of the blocks of a copy.

    Raises:
        LayoutMismatchError: on all ranks, if a complete copy is of another layout.
    """
    layouts = gather_layouts(group, Layout(state.num_bytes, block_bytes, state.digest))
    found = {owner: [header.layout for header in store.complete_headers(owner)] for owner in owners}
    differing = [owner for owner in owners if any(not _is_alike(each, layouts[owner]) for each in found[owner])]
    if maximum(group, len(differing)):
        raise LayoutMismatchError(_explain(group, store, state, {owner: found[owner] for owner in differing}, layouts))
    sizes = [layout.payload_bytes for layout in layouts]
    for owner, copies in found.items():
        sizes[owner] = max(sizes[owner], *(copy.payload_bytes for copy in copies), 0)
    sizes = maxima(group, sizes)
    if sizes[owners[0]] > state.num_bytes:
        state.make_room(sizes[owners[0]])
    return [replace(layout, payload_bytes=size) for layout, size in zip(layouts, sizes, strict=True)]


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns in words how two layouts of a state differ, key by key, the room of its small values aside."""
    old, new = _words(was), _words(now)
    changed = [f"{key} was {old[key]} and is {new[key]}" for key in old if key in new and old[key] != new[key]]
    missing = [f"{key} ({old[key]}) is missing" for key in old if key not in new]
    added = [f"{key} ({new[key]}) is new" for key in new if key not in old]
    moved = [key for key, other in zip(old, new, strict=False) if key != other]
    order = [f"{key} is at another place in the order of tensors" for key in moved]
    paired = [text for pair in zip_longest(missing, added) for text in pair if text is not None]
    return [*changed, *paired] or order


def _is_alike(one: Layout, other: Layout) -> bool:
    return (one.digest, one.block_bytes) == (other.digest, other.block_bytes)


def _explain(
    group: dist.ProcessGroup,
    store: NodeStore,
    state: FlatState,
    differing: Mapping[int, Iterable[Layout]],
    layouts: Sequence[Layout],
) -> str:
    """Returns what differs, alike on all ranks."""
    manifests = gather_long_texts(group, json.dumps(state.manifest()))
    mine = ""
    if differing:
        owner, copies = next(iter(differing.items()))
        sizes = {copy.block_bytes for copy in copies} - {layouts[owner].block_bytes}
        cut = [f"they are cut into blocks of {format_bytes(size)}: set system.block_bytes={size}" for size in sizes]
        found = cut or differences(store.read_manifest(owner), json.loads(manifests[owner]))
        mine = f"the copies of rank {owner} in {store.folder} are of another state: {shortened(found)}"
    first = next(filter(None, gather_texts(group, mine, _TEXT_BYTES)))
    return f"{first}; nothing was touched: lay the state out as it was, or use another run id or 'clean'"


def _words(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Returns by name what a layout has under it; nothing of a manifest that does not read."""
    try:
        entries = {key: f"{dtype} {list(shape)}" for key, dtype, shape, *_ in manifest["entries"]}
        if VALUES in entries:
            entries[VALUES] = "small values"
        aliases = {key: f"another name of {target}" for key, target in manifest["aliases"].items()}
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}
    return entries | aliases
