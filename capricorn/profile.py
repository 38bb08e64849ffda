"""What was measured of one iteration's ops on all ranks, and the idle spans that follow from it.

Pure data: knows no clock and no trainer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from capricorn.hooks import NO_LAYER, OpKey
from capricorn.units import Seconds

COMMUNICATION = frozenset({"dispatch", "combine", "reduce", "update"})
"""Kinds of ops that own the link; all others compute, and leave it idle."""


@dataclass(frozen=True, slots=True)
class IdleSpan:
    """A stretch of an iteration in which a rank computes and its link is idle.

    It ends when the last rank has come to the communication that follows: a rank that waits there for a straggler has
    an idle link too.
    """

    opens: OpKey | None
    """The communication whose end opens it; None is the begin of the iteration."""
    closes: OpKey
    """The communication that ends it."""
    closes_after: OpKey | None
    """The gate whose end already ends it, since the exchange of counts follows; None when `closes` itself does."""
    load_layer: int
    """The layer whose expert load sets its length; NO_LAYER if none does."""


def spans_of(ops: Sequence[OpKey]) -> tuple[IdleSpan, ...]:
    """The idle spans of an iteration whose ops begin in this order; a stretch without computing is none."""
    spans: list[IdleSpan] = []
    opens: OpKey | None = None
    computing: list[OpKey] = []
    for op in ops:
        if op.kind not in COMMUNICATION:
            computing.append(op)
            continue
        if computing:
            spans.append(IdleSpan(opens, op, _gate_before(op, computing), _load_layer(op, computing)))
        opens, computing = op, []
    return tuple(spans)


def _gate_before(closes: OpKey, computing: Sequence[OpKey]) -> OpKey | None:
    last = computing[-1]
    return last if (last.kind, last.direction) == ("gate", "forward") and closes.kind == "dispatch" else None


def _load_layer(closes: OpKey, computing: Sequence[OpKey]) -> int:
    """Between dispatch and combine, in either direction, stand the experts alone."""
    is_expert = closes.kind in ("dispatch", "combine") and all(op.kind == "expert" for op in computing)
    return computing[0].layer if is_expert else NO_LAYER


@dataclass(frozen=True, slots=True)
class IterationProfile:
    """One iteration as all ranks measured it.

    Shapes: W ranks, O ops.
    """

    iteration: int
    ops: tuple[OpKey, ...]
    """In the order they began; the same on every rank."""
    begins_s: tuple[tuple[Seconds, ...], ...]
    """[W][O], each since the begin of the iteration on its rank: clocks of ranks are never compared."""
    ends_s: tuple[tuple[Seconds, ...], ...]
    tokens: Mapping[int, tuple[int, ...]]
    """By MoE layer: token assignments [W] to the experts of each rank; empty where no router was heard."""

    def moving_s(self) -> dict[OpKey, Seconds]:
        """Of each communication: how long it moves bytes, which is what it takes the rank that comes last."""
        return {op: min(self._lasted(index)) for index, op in enumerate(self.ops) if op.kind in COMMUNICATION}

    def span_s(self) -> tuple[tuple[Seconds, ...], ...]:
        """[W][spans]: from the end of the communication before, on that rank, until the last rank has come to the next.

        The last rank to come is the one whose communication is shortest; the others waited as much as theirs is longer.
        """
        index_of = {op: index for index, op in enumerate(self.ops)}
        rows: list[tuple[Seconds, ...]] = []
        spans = spans_of(self.ops)
        shortest = [min(self._busy_s(rank, span, index_of) for rank in range(len(self.begins_s))) for span in spans]
        for rank in range(len(self.begins_s)):
            ends_s = self.ends_s[rank]
            row = []
            for span, moving_s in zip(spans, shortest, strict=True):
                begin_s = 0.0 if span.opens is None else ends_s[index_of[span.opens]]
                row.append(max(0.0, ends_s[index_of[span.closes]] - moving_s - begin_s))
            rows.append(tuple(row))
        return tuple(rows)

    def _lasted(self, index: int) -> list[Seconds]:
        return [ends[index] - begins[index] for begins, ends in zip(self.begins_s, self.ends_s, strict=True)]

    def _busy_s(self, rank: int, span: IdleSpan, index_of: Mapping[OpKey, int]) -> Seconds:
        """From where the span is over on that rank at the latest to the end of the communication."""
        end_s = self.ends_s[rank][index_of[span.closes]]
        if span.closes_after is not None:
            return end_s - self.ends_s[rank][index_of[span.closes_after]]
        return end_s - self.begins_s[rank][index_of[span.closes]]
