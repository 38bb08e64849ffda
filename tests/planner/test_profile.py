"""The idle spans of an iteration, and what was measured of them."""

from __future__ import annotations

import pytest

from capricorn.hooks import NO_LAYER, OpKey
from capricorn.planner.profile import IdleSpan, IterationProfile, spans_of

HEAD = [OpKey(NO_LAYER, "forward", "head"), OpKey(NO_LAYER, "backward", "head")]
LAST = [OpKey(NO_LAYER, "backward", "reduce"), OpKey(NO_LAYER, "forward", "update")]


def forward(layer: int) -> list[OpKey]:
    return [OpKey(layer, "forward", kind) for kind in ("attention", "gate", "dispatch", "expert", "combine")]


def backward(layer: int) -> list[OpKey]:
    return [OpKey(op.layer, "backward", op.kind) for op in reversed(forward(layer))]


OPS = (*forward(0), *forward(1), *HEAD, *backward(1), *backward(0), *LAST)


def op(text: str) -> OpKey:
    return next(op for op in OPS if str(op) == text)


def profile(lasts_s: dict[str, tuple[float, float]]) -> IterationProfile:
    """Of ops that follow each other at once, one second each unless said; all leave a communication together."""
    clocks, begins, ends = [0.0, 0.0], ([], []), ([], [])
    for key in OPS:
        seconds = lasts_s.get(str(key), (1.0, 1.0))
        for rank in range(2):
            begins[rank].append(clocks[rank])
            clocks[rank] += seconds[rank]
        if key.kind in ("dispatch", "combine", "reduce", "update"):
            clocks = [max(clocks)] * 2
        for rank in range(2):
            ends[rank].append(clocks[rank])
    return IterationProfile(1, OPS, tuple(map(tuple, begins)), tuple(map(tuple, ends)), {})


def test_the_spans_of_a_small_transformer_follow_its_ops() -> None:
    assert [(span.opens and str(span.opens), str(span.closes)) for span in spans_of(OPS)] == [
        (None, "dispatch.0.forward"),
        ("dispatch.0.forward", "combine.0.forward"),
        ("combine.0.forward", "dispatch.1.forward"),
        ("dispatch.1.forward", "combine.1.forward"),
        ("combine.1.forward", "combine.1.backward"),
        ("combine.1.backward", "dispatch.1.backward"),
        ("dispatch.1.backward", "combine.0.backward"),
        ("combine.0.backward", "dispatch.0.backward"),
        ("dispatch.0.backward", "reduce.backward"),
    ]


def test_the_experts_alone_follow_their_load_in_both_directions() -> None:
    assert [span.load_layer for span in spans_of(OPS)] == [-1, 0, -1, 1, -1, 1, -1, 0, -1]


def test_a_gate_closes_the_span_before_the_exchange_of_counts_in_forward_alone() -> None:
    gates = {str(span.closes): span.closes_after for span in spans_of(OPS) if span.closes_after}
    assert gates == {"dispatch.0.forward": op("gate.0.forward"), "dispatch.1.forward": op("gate.1.forward")}


def test_a_dense_layer_joins_the_span_around_it() -> None:
    dense = [OpKey(0, "forward", "attention"), OpKey(0, "forward", "expert")]
    assert spans_of([*dense, *forward(1)])[0] == IdleSpan(
        None, op("dispatch.1.forward"), op("gate.1.forward"), NO_LAYER
    )


def test_without_communication_there_is_no_span() -> None:
    assert spans_of([]) == ()
    assert spans_of(HEAD) == ()
    assert spans_of(LAST) == ()


def test_a_span_lasts_as_long_as_both_ranks_compute() -> None:
    for row in profile({}).span_s():
        assert row == pytest.approx([2, 1, 2, 1, 2, 1, 2, 1, 2])


def test_waiting_for_a_straggler_is_idle_too() -> None:
    rows = profile({"expert.0.forward": (1.0, 5.0)}).span_s()
    assert rows[0][1] == rows[1][1] == pytest.approx(5)


def test_a_communication_moves_from_when_the_last_rank_has_come() -> None:
    for moving_s in profile({"expert.0.forward": (1.0, 5.0)}).moving_s():
        assert moving_s[op("combine.0.forward")] == pytest.approx(1)
        assert set(moving_s) == {op for op in OPS if op.kind in ("dispatch", "combine", "reduce", "update")}


def test_a_rank_that_leaves_a_communication_early_is_idle_from_then_on() -> None:
    measured = profile({})
    ends = [list(row) for row in measured.ends_s]
    ends[1][OPS.index(op("dispatch.0.forward"))] -= 0.75
    early = IterationProfile(1, OPS, measured.begins_s, tuple(map(tuple, ends)), {})
    assert [row[1] for row in early.span_s()] == pytest.approx([1, 1.75])
    assert [row[op("dispatch.0.forward")] for row in early.moving_s()] == pytest.approx([1, 0.25])


def test_the_exchange_of_counts_after_a_gate_is_not_idle() -> None:
    measured = profile({})
    begins = [list(row) for row in measured.begins_s]
    for row in begins:
        row[OPS.index(op("dispatch.0.forward"))] += 0.5  # the counts go first, then the op begins
    late = IterationProfile(1, OPS, tuple(map(tuple, begins)), measured.ends_s, {})
    assert late.span_s()[0][0] == measured.span_s()[0][0] == pytest.approx(2)


def test_the_first_span_begins_when_its_rank_begins() -> None:
    measured = profile({})
    late = IterationProfile(1, OPS, measured.begins_s, measured.ends_s, {}, starts_s=(0.0, 0.25))
    assert [row[0] for row in late.span_s()] == pytest.approx([2, 1.75])
