"""The partition of a checkpoint into chunks that fill the idle spans. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from capricorn.planner.estimate import SpanEstimate, deviations_at
from capricorn.planner.link_model import LinkModel
from capricorn.planner.plan import Chunk, Limit, Plan
from capricorn.units import Bytes

LEAST_RISK = 1e-6
RESERVE = 1.5
"""The spans in use must have room for so many times the bytes of a checkpoint, or all are used."""
SHORT = 0.25
"""A span below this part of the longest is short; the earliest of the others are used first, to be soon complete."""
_HALVINGS = 24
SLACK = 1.02
"""So many times the bytes of a checkpoint are to fit, for what is lost where a transfer begins and ends."""
UNUSED = SpanEstimate(0.0, 0.0)


def partition(
    spans: Sequence[SpanEstimate],
    link: LinkModel,
    shard_bytes: Bytes,
    num_replicas: int,
    max_chunk_bytes: Bytes,
    max_risk: float,
    ends: Sequence[SpanEstimate] | None = None,
) -> Plan:
    """Returns the plan that fills all spans to one quantile of their durations: the lowest at which everything fits.

    A byte more in a span costs in expectation the probability that the span is over before it is sent. Where these
    marginal costs differ, moving a byte from the dearer span to the cheaper one gains; so at the optimum they are equal
    in all spans, which is to fill them to one quantile. Beyond `max_risk`, the critical ratio of the newsvendor, a byte
    is cheaper left over. As long as the others have room in reserve at the lowest risk, short spans are left alone:
    they gain little, and each span in use is one more communication to run into.

    Args:
        spans: how long both ends of the link are idle, in the order of the iteration.
        link: to the holders.
        shard_bytes: of one replica.
        num_replicas: how many are sent, one after the other.
        max_chunk_bytes: of any chunk; positive.
        max_risk: in (0, 1).
        ends: how long the spans last on this rank; as long as `spans` if left out.

    Source: Capricorn, CLUSTER 2025; the rule is ours.
    """
    num_bytes = shard_bytes * num_replicas
    used = _without_short(spans, link, RESERVE * num_bytes, min(LEAST_RISK, max_risk))
    risk = _least_risk(used, link, SLACK * num_bytes, max_risk)
    deviations = deviations_at(risk)
    room = _capacities(used, link, deviations)
    limits = tuple(
        Limit(end.at_s(deviations), capacity)
        for end, capacity in zip(spans if ends is None else ends, room, strict=True)
    )
    return Plan(tuple(_fill(room, shard_bytes, num_replicas, max_chunk_bytes)), limits, risk)


def _without_short(
    spans: Sequence[SpanEstimate], link: LinkModel, num_bytes: float, risk: float
) -> Sequence[SpanEstimate]:
    """Returns the spans, the short ones replaced by `UNUSED` if the others have room for so many bytes at that risk."""
    shortest_s = SHORT * max((span.median_s for span in spans), default=0.0)
    long = [span if span.median_s >= shortest_s else UNUSED for span in spans]
    return long if sum(_capacities(long, link, deviations_at(risk))) >= num_bytes else spans


def _capacities(spans: Sequence[SpanEstimate], link: LinkModel, deviations: float) -> list[Bytes]:
    return [link.capacity_bytes(span.at_s(deviations)) for span in spans]


def _least_risk(spans: Sequence[SpanEstimate], link: LinkModel, num_bytes: float, max_risk: float) -> float:
    """Returns the lowest risk at which so many bytes fit; `max_risk` if they never do."""

    def fits(risk: float) -> bool:
        return sum(_capacities(spans, link, deviations_at(risk))) >= num_bytes

    low, high = min(LEAST_RISK, max_risk), max_risk
    if not fits(high):
        return high
    if fits(low):
        return low
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _fill(room: Sequence[Bytes], shard_bytes: Bytes, num_replicas: int, max_chunk_bytes: Bytes) -> Iterator[Chunk]:
    """Yields the chunks in sending order, the spans filled one after the other; the rest goes into the overflow."""
    span, left = -1, 0
    for replica in range(num_replicas):
        offset = 0
        while offset < shard_bytes:
            while not left:
                span += 1
                left = room[span] if span < len(room) else shard_bytes * num_replicas
            num_bytes = min(left, max_chunk_bytes, shard_bytes - offset)
            yield Chunk(offset, num_bytes, span, replica)
            offset += num_bytes
            left -= num_bytes
