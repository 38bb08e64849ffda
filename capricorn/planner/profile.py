"""The profile of one iteration, measured on all ranks, and the idle spans that follow from it.

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
    """Returns the idle spans of an iteration whose ops begin in this order; a stretch without computing is none."""
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
    """Returns the layer whose experts alone compute in the span, as between dispatch and combine; else NO_LAYER."""
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
    """[W][O], by one clock for all ranks, since the iteration began on the first of them."""
    ends_s: tuple[tuple[Seconds, ...], ...]
    tokens: Mapping[int, tuple[int, ...]]
    """By MoE layer: token assignments [W] to the experts of each rank; empty where no router was heard."""
    starts_s: tuple[Seconds, ...] = ()
    """[W]: when the iteration began; all at 0 where left out."""

    def span_s(self) -> tuple[tuple[Seconds, ...], ...]:
        """Returns the lengths of the spans [W][spans].

        On each rank a span lasts from the end of the communication before until the last rank has come to the next: a
        rank that waits there for the last one has an idle link. It is never negative.
        """
        ranks = range(len(self.ends_s))
        closed_s = self._closed_s(ranks)
        return tuple(self._lengths_s(rank, closed_s) for rank in ranks)

    def own_span_s(self, rank: int) -> tuple[Seconds, ...]:
        """Returns the lengths of the spans [spans] as if that rank were alone.

        A span then lasts until this rank itself has come to the next communication.
        """
        return self._lengths_s(rank, self._closed_s((rank,)))

    def moving_s(self) -> tuple[dict[OpKey, Seconds], ...]:
        """Returns [W]: of each communication, how long that rank is in it once the last rank has come to it."""
        begins = {
            op: max(row[index] for row in self.begins_s)
            for index, op in enumerate(self.ops)
            if op.kind in COMMUNICATION
        }
        index_of, closed_s = self._index_of(), self._closed_s(range(len(self.ends_s)))
        begins |= {span.closes: closed for span, closed in zip(spans_of(self.ops), closed_s, strict=True)}
        return tuple({op: max(0.0, row[index_of[op]] - begin) for op, begin in begins.items()} for row in self.ends_s)

    def _lengths_s(self, rank: int, closed_s: Sequence[Seconds]) -> tuple[Seconds, ...]:
        """Returns the lengths of the spans [spans] on that rank, each until it closes."""
        index_of, ends_s = self._index_of(), self.ends_s[rank]
        start_s = self.starts_s[rank] if self.starts_s else 0.0
        return tuple(
            max(0.0, closed - (start_s if span.opens is None else ends_s[index_of[span.opens]]))
            for span, closed in zip(spans_of(self.ops), closed_s, strict=True)
        )

    def _closed_s(self, ranks: Sequence[int]) -> list[Seconds]:
        """Returns, by span, when the last of these ranks has come to what ends it."""
        index_of = self._index_of()
        return [
            max(
                self.begins_s[rank][index_of[span.closes]]
                if span.closes_after is None
                else self.ends_s[rank][index_of[span.closes_after]]
                for rank in ranks
            )
            for span in spans_of(self.ops)
        ]

    def _index_of(self) -> dict[OpKey, int]:
        return {op: index for index, op in enumerate(self.ops)}
