"""Timelines of sampled iterations: which lane each op and chunk belongs to, and which of them make up one iteration.
Knows no figure and no trace format.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from capricorn.records.samples import OpSample

COMPUTE, COMMUNICATION, CHECKPOINT = LANES = ("compute", "communication", "checkpoint")
ALL_TO_ALL = ("dispatch", "combine")
_COMMUNICATION = {*ALL_TO_ALL, "reduce", "update"}


def is_chunk(op: OpSample) -> bool:
    """Returns whether the op is a transfer of a checkpoint, which has no direction."""
    return not op.direction


def lane_of(op: OpSample) -> str:
    """Returns the lane, one of LANES, that the op belongs to."""
    if is_chunk(op):
        return CHECKPOINT
    return COMMUNICATION if op.kind in _COMMUNICATION else COMPUTE


def name_of(op: OpSample) -> str:
    """Returns the name that people read: `expert 3 backward`, `send`."""
    layer = "" if op.layer < 0 else str(op.layer)
    return " ".join(part for part in (op.kind, layer, op.direction) if part)


def timelines(ops: Iterable[OpSample]) -> Iterator[list[OpSample]]:
    """Yields what one rank did in one iteration, for each that was sampled; a redone iteration comes again.

    Reads on only as far as it has to, and holds no more than one iteration of each rank.
    """
    unfinished: dict[int, list[OpSample]] = {}
    for op in ops:
        timeline = unfinished.setdefault(op.rank, [])
        if timeline and _begins_anew(op, timeline[0]):
            yield timeline
            timeline = unfinished[op.rank] = []
        timeline.append(op)
    yield from unfinished.values()


def _begins_anew(op: OpSample, first: OpSample) -> bool:
    """Returns whether the op begins another iteration than `first` did: each op happens once in one."""
    same = (op.layer, op.direction, op.kind) == (first.layer, first.direction, first.kind)
    return op.iteration != first.iteration or (same and not is_chunk(op))
