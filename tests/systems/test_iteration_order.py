"""The numbers of iterations: what rises is taken, and everything else is refused in one line that names it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from capricorn.errors import ConfigError, OrderError
from capricorn.systems.iteration_order import MAX_ITERATION, IterationOrder

NO_ITERATIONS = [
    1.0, 5.5, float("nan"), float("inf"), True, False, "5", b"5", None, [5], (5,), 5j,
    np.float64(5), np.bool_(True), np.array([5]), torch.tensor(5), torch.tensor([5, 6]), torch.zeros(1000),
    -1, -(1 << 70), MAX_ITERATION + 1, 1 << 64, 10**5000, np.uint64((1 << 64) - 1), np.int8(-1),
]  # fmt: skip


@pytest.mark.parametrize("iteration", NO_ITERATIONS, ids=lambda value: f"{type(value).__name__} {str(type(value))[:3]}")
@pytest.mark.parametrize("last", [None, 3])
def test_what_is_no_iteration_is_refused_in_one_line_that_names_the_last_one(
    iteration: object, last: int | None
) -> None:
    order = IterationOrder()
    order.last = last
    with pytest.raises(OrderError) as caught:
        order.advance(iteration)
    message = str(caught.value)
    assert message.startswith("iteration ")
    assert "\n" not in message
    assert len(message) < 250
    assert ("the last one was 3" in message) == (last == 3)
    assert order.last == last
    assert isinstance(caught.value, ConfigError)


@pytest.mark.parametrize("iteration", [7, 6, 0])
def test_an_iteration_that_repeats_or_falls_is_refused_with_the_last_one(iteration: int) -> None:
    order = IterationOrder()
    order.advance(7)
    with pytest.raises(OrderError, match=rf"^iteration {iteration} does not come after .*the last one was 7"):
        order.check(iteration)


@pytest.mark.parametrize("kind", [int, np.int8, np.int64, np.uint8, np.uint64])
def test_whole_numbers_of_any_kind_are_taken_as_pythons(kind: type) -> None:
    order = IterationOrder()
    for iteration in range(3):
        taken = order.advance(kind(iteration))
        assert (taken, type(taken)) == (iteration, int)
    assert order.advance(MAX_ITERATION) == MAX_ITERATION


def test_a_restore_after_training_began_is_refused() -> None:
    order = IterationOrder()
    order.check_restore()
    order.advance(0)
    with pytest.raises(OrderError, match="iteration 0 has been trained or restored"):
        order.check_restore()
