"""Paced ops last as long as the modelled device takes for the tokens they got, and no work is hidden."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capricorn.config.cluster import BACKWARD, Pace
from capricorn.config.resolve import load_model
from capricorn.config.scenario import ModelConfig
from capricorn.emulation.pacer import Pacer
from capricorn.hooks import NO_LAYER, HookChain, OpKey, TrainerHook
from capricorn.topology import Topology

PACE = Pace(attention_s=0.08, gate_s=0.09, expert_s_per_row=0.001, shared_s=0.005, dense_s=0.04, head_s=0.03)
MODEL = load_model("mixtral-tiny")  # 8 experts
ATTENTION, EXPERT = OpKey(0, "forward", "attention"), OpKey(0, "forward", "expert")


class Machine:
    """A clock that moves only when something works or sleeps."""

    def __init__(self, model: ModelConfig = MODEL, pace: Pace = PACE, rank: int = 0, world_size: int = 2) -> None:
        self.now_s = 100.0
        self.pacer = Pacer(pace, model, rank, Topology(world_size, 1), clock=lambda: self.now_s, sleep=self.work)

    def work(self, duration_s: float) -> None:
        assert duration_s >= 0
        self.now_s += duration_s

    def run(self, op: OpKey, work_s: float) -> float:
        """How long the op lasts when its real work takes that long."""
        begin_s = self.now_s
        self.pacer.on_op_begin(op)
        self.work(work_s)
        self.pacer.on_op_end(op)
        return self.now_s - begin_s


@given(work_s=st.floats(0, 0.079))
def test_an_op_is_stretched_to_its_time_whatever_its_real_work_takes(work_s: float) -> None:
    assert Machine().run(ATTENTION, work_s) == pytest.approx(PACE.attention_s)


def test_backward_takes_twice_as_long() -> None:
    machine = Machine()
    assert machine.run(ATTENTION._replace(direction="backward"), 0.0) == pytest.approx(BACKWARD * PACE.attention_s)


@given(counts=st.lists(st.integers(0, 50), min_size=8, max_size=8))
def test_experts_take_time_for_the_rows_of_their_own_rank(counts: list[int]) -> None:
    for rank in range(2):
        machine = Machine(rank=rank)
        machine.pacer.on_routed(0, counts)
        mine = sum(counts[4 * rank : 4 * rank + 4])
        assert machine.run(EXPERT, 0.0) == pytest.approx(PACE.expert_s_per_row * mine + PACE.shared_s)


def test_the_backward_of_experts_has_the_loads_of_their_forward() -> None:
    machine = Machine()
    machine.pacer.on_routed(0, [10] * 8)
    machine.pacer.on_routed(1, [20] * 8)
    assert machine.run(OpKey(1, "backward", "expert"), 0.0) == pytest.approx(2 * 0.085)
    assert machine.run(OpKey(0, "backward", "expert"), 0.0) == pytest.approx(2 * 0.045)


def test_padded_experts_take_the_same_time_whatever_is_routed() -> None:
    model = load_model("gpt-moe-tiny")
    machine = Machine(model)
    layer = next(layer for layer in range(model.num_layers) if model.is_moe(layer))
    machine.pacer.on_routed(layer, [0] * model.num_experts)
    expected_s = PACE.expert_s_per_row * model.tokens_per_rank * model.top_k + PACE.shared_s
    assert machine.run(OpKey(layer, "forward", "expert"), 0.0) == pytest.approx(expected_s)


def test_attention_and_gate_together_take_their_modelled_time() -> None:
    light = PACE.model_copy(update={"gate_s": 0.0})
    for pace in (PACE, light):
        machine = Machine(pace=pace)
        lasted_s = machine.run(ATTENTION, 0.0) + machine.run(OpKey(0, "forward", "gate"), 0.0)
        assert lasted_s == pytest.approx(pace.attention_s + pace.gate_s)


def test_attention_of_a_layer_without_gate_takes_its_whole_time() -> None:
    model = load_model("gpt-moe-tiny")
    dense = next(layer for layer in range(model.num_layers) if not model.is_moe(layer))
    machine = Machine(model)
    assert machine.run(OpKey(dense, "forward", "attention"), 0.0) == pytest.approx(PACE.attention_s)
    assert machine.run(OpKey(dense, "forward", "expert"), 0.0) == pytest.approx(PACE.dense_s)


@pytest.mark.parametrize("kind", ["dispatch", "combine", "reduce", "update"])
def test_communication_and_the_update_take_the_time_they_take(kind: str) -> None:
    machine = Machine()
    layer = 0 if kind in ("dispatch", "combine") else NO_LAYER
    assert machine.run(OpKey(layer, "forward", kind), 0.25) == pytest.approx(0.25)  # type: ignore[arg-type]
    assert machine.pacer.take() == ([], {})


def test_an_op_slower_than_its_model_is_counted_and_the_next_one_gets_no_less() -> None:
    machine = Machine()
    assert machine.run(ATTENTION, 0.2) == pytest.approx(0.2)
    assert machine.run(OpKey(NO_LAYER, "forward", "head"), 0.0) == pytest.approx(PACE.head_s)
    errors_s, overruns_s = machine.pacer.take()
    assert overruns_s == {"attention.0.forward": pytest.approx(0.2 - PACE.attention_s)}
    assert errors_s == [pytest.approx(0, abs=1e-9)]
    assert machine.pacer.take() == ([], {})


def test_time_in_other_hooks_is_not_swallowed_by_a_paced_op() -> None:
    machine = Machine()

    class Slow(TrainerHook):
        def on_op_begin(self, op: OpKey) -> None:
            machine.work(0.5)

        def on_op_end(self, op: OpKey) -> None:
            machine.work(0.25)

    chain = HookChain([Slow(), machine.pacer])
    begin_s = machine.now_s
    chain.on_op_begin(ATTENTION)
    machine.work(0.01)
    chain.on_op_end(ATTENTION)
    assert machine.now_s - begin_s == pytest.approx(0.5 + PACE.attention_s + 0.25)


def test_a_late_wake_up_is_told_as_an_error() -> None:
    times: Iterator[float] = iter([0.0, 0.01, 0.085])
    pacer = Pacer(PACE, MODEL, 0, Topology(2, 1), clock=lambda: next(times), sleep=lambda _: None)
    pacer.on_op_begin(ATTENTION)
    pacer.on_op_end(ATTENTION)
    errors_s, overruns_s = pacer.take()
    assert errors_s == [pytest.approx(0.005)]
    assert overruns_s == {}
