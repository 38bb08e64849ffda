"""Shares of expert load from a recipe and from a trace, and the tokens chosen to match them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capricorn.errors import ConfigError
from capricorn.loads import forced_routing as loads
from capricorn.loads.forced_routing import ForcedRouting
from capricorn.loads.load_trace import Shares, cap_shares, trace_shares
from capricorn.loads.synthetic import PHASES, synthetic_shares

TRACE = Path(__file__).parents[3] / "shared/data/moe_load_trace.npz"

LOAD = st.one_of(st.sampled_from([0.0, 1.0, 1.0, 3.0]), st.floats(1e-9, 1.0))
ROWS = st.integers(1, 12).flatmap(
    lambda n: st.tuples(st.lists(LOAD, min_size=n, max_size=n).filter(any), st.integers(1, n))
)


def hook(shares_E: npt.ArrayLike, top_k: int, rank: int = 0) -> ForcedRouting:
    """A model of one MoE layer, 5, in its first iteration."""
    made = ForcedRouting(np.array([[shares_E]], dtype=np.float64), layers=[5], top_k=top_k, seed=3, rank=rank)
    made.on_iteration_begin(1)
    return made


def counts_of(experts_TK: torch.Tensor, num_experts: int) -> npt.NDArray[np.int64]:
    return torch.bincount(experts_TK.flatten(), minlength=num_experts).numpy()


@given(ROWS)
def test_capped_shares_sum_to_one_and_stay_under_the_cap(row: tuple[list[float], int]) -> None:
    load, top_k = row
    shares = cap_shares(load, top_k)
    assert shares.sum() == pytest.approx(1, abs=1e-12)
    assert shares.min() >= 0
    assert shares.max() <= 1 / top_k


@given(ROWS)
def test_the_cap_keeps_the_ratios_of_those_below_it(row: tuple[list[float], int]) -> None:
    load, top_k = row
    shares = cap_shares(load, top_k)
    below = [i for i, share in enumerate(shares) if 0 < share < 1 / top_k * (1 - 1e-9) and load[i] > 0]
    for one, other in pairwise(below):
        assert shares[one] * load[other] == pytest.approx(shares[other] * load[one], rel=1e-6)


def test_what_is_cut_off_goes_to_the_others_alike_if_they_have_no_load() -> None:
    assert cap_shares([[8, 0, 0], [6, 3, 1]], 2).tolist() == [[0.5, 0.25, 0.25], [0.5, 0.375, 0.125]]


@settings(deadline=None)
@given(ROWS, st.integers(0, 7))
def test_each_token_gets_distinct_experts_as_often_as_their_shares_say(row: tuple[list[float], int], rank: int) -> None:
    load, top_k = row
    shares, num_tokens = cap_shares(load, top_k), 2000
    experts_TK = hook(shares, top_k, rank).assign_experts(5, num_tokens)
    assert experts_TK.shape == (num_tokens, top_k)
    assert experts_TK.dtype == torch.int64
    assert all(len(set(experts)) == top_k for experts in experts_TK.tolist())

    counts = counts_of(experts_TK, len(load))
    assert len(counts) == len(load)
    frac = top_k * shares
    # Seven standard deviations of the sum of as many independent choices.
    bound = 7 * np.sqrt(num_tokens * frac * np.maximum(1 - frac, 0)) + 1e-3 + 7 * (frac > 0)
    assert (abs(counts - num_tokens * frac) <= bound).all()


def test_an_expert_with_all_it_can_get_is_chosen_by_each_token_and_one_without_share_by_none() -> None:
    counts = counts_of(hook([0.25, 0, 0.25, 0.1, 0.15, 0.25], 4).assign_experts(5, 3000), 6)
    assert counts[[0, 1, 2, 5]].tolist() == [3000, 0, 3000, 3000]
    assert counts[3] + counts[4] == 3000


@pytest.mark.parametrize(
    ("lengths", "top_k"), [([8, 8, 0, 3, 5], 3), ([8, 8], 2), ([7, 7, 1, 1], 2), ([1] * 8, 1), ([5, 0, 6, 6, 7], 3)]
)
def test_the_ends_of_an_experts_part_of_the_line_belong_to_it_alone(
    lengths: list[int], top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a line of so few points every token falls on an end sooner or later.
    monkeypatch.setattr(loads, "UNIT", 8)
    made = ForcedRouting(
        np.array([[[n / sum(lengths) for n in lengths]]] * 20), layers=[0], top_k=top_k, seed=0, rank=0
    )
    for iteration in range(1, 21):
        made.on_iteration_begin(iteration)
        experts_TK = made.assign_experts(0, 200)
        assert all(len(set(experts)) == top_k for experts in experts_TK.tolist())
        assert {lengths[expert] for expert in experts_TK.flatten()}.isdisjoint({0})


def test_experts_are_not_always_chosen_with_the_same_others() -> None:
    made = ForcedRouting(np.full((60, 1, 8), 1 / 8), layers=[0], top_k=2, seed=0, rank=0)
    pairs = set()
    for iteration in range(1, 61):
        made.on_iteration_begin(iteration)
        pairs |= {frozenset(pair) for pair in made.assign_experts(0, 100).tolist()}
    assert len(pairs) == 8 * 7 / 2


def test_no_tokens_are_no_experts() -> None:
    assert hook([0.5, 0.5], 2).assign_experts(5, 0).shape == (0, 2)


def loads_of(**changes: Any) -> ForcedRouting:
    shares = synthetic_shares(
        "settling", num_layers=2, num_experts=8, top_k=2, first=1, num_iterations=9, seed=changes.get("seed", 0)
    )
    return ForcedRouting(shares, **{"layers": (1, 3), "top_k": 2, "seed": 0, "rank": 0, **changes})


def test_a_restarted_training_sees_the_same_experts_again() -> None:
    through, restarted = loads_of(), loads_of()
    chosen = {}
    for iteration in range(1, 10):
        through.on_iteration_begin(iteration)
        for layer in (1, 3):
            chosen[iteration, layer] = through.assign_experts(layer, 50)
    for iteration, layer in [(6, 3), (6, 1), (7, 1), (2, 3)]:
        restarted.on_iteration_begin(iteration)
        assert torch.equal(restarted.assign_experts(layer, 50), chosen[iteration, layer])
        assert torch.equal(restarted.assign_experts(layer, 50), chosen[iteration, layer])


def test_the_experts_differ_by_iteration_layer_rank_and_seed() -> None:
    made = [loads_of(), loads_of(), loads_of(rank=1), loads_of(seed=1), loads_of()]
    layers = [1, 1, 1, 1, 3]
    for index, one in enumerate(made):
        one.on_iteration_begin(4 if index == 1 else 5)
    chosen = [one.assign_experts(layer, 50) for one, layer in zip(made, layers, strict=True)]
    assert not any(torch.equal(one, other) for i, one in enumerate(chosen) for other in chosen[:i])


def test_the_global_random_states_are_left_alone() -> None:
    numpy_state, torch_state = np.random.get_state(legacy=False), torch.get_rng_state()
    made = loads_of()
    made.on_iteration_begin(1)
    made.assign_experts(1, 50)
    assert str(np.random.get_state(legacy=False)) == str(numpy_state)
    assert torch.equal(torch.get_rng_state(), torch_state)


def assert_shares(shares_IME: Shares, shape: tuple[int, ...], top_k: int) -> None:
    assert shares_IME.shape == shape
    assert shares_IME.sum(-1) == pytest.approx(1, abs=1e-12)
    assert shares_IME.min() >= 0
    assert shares_IME.max() <= 1 / top_k


@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (2, 2), (4, 2), (8, 2), (60, 4), (128, 8)])
@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_has_valid_shares_for_every_size(phase: str, num_experts: int, top_k: int) -> None:
    shares = synthetic_shares(
        phase, num_layers=3, num_experts=num_experts, top_k=top_k, first=1, num_iterations=70, seed=1
    )
    assert_shares(shares, (70, 3, num_experts), top_k)


@pytest.mark.parametrize("phase", PHASES)
def test_synthetic_shares_do_not_depend_on_what_else_is_asked_for(phase: str) -> None:
    def made(num_layers: int, first: int, num_iterations: int, seed: int = 5) -> Shares:
        return synthetic_shares(
            phase, num_layers=num_layers, num_experts=8, top_k=2, first=first, num_iterations=num_iterations, seed=seed
        )

    whole = made(3, 1, 70)
    assert np.array_equal(made(3, 1, 70), whole)
    assert np.array_equal(made(2, 1, 20), whole[:20, :2])
    assert np.array_equal(made(3, 41, 30), whole[40:])
    assert not np.array_equal(made(3, 1, 70, seed=6), whole)
    assert not np.array_equal(whole[:, 0], whole[:, 1])


def test_an_unknown_phase_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown phase 'stabel'; did you mean 'stable'"):
        synthetic_shares("stabel", num_layers=1, num_experts=4, top_k=2, first=1, num_iterations=1, seed=0)


def series_of(phase: str, num_iterations: int) -> Shares:
    return synthetic_shares(
        phase, num_layers=48, num_experts=32, top_k=2, first=1, num_iterations=num_iterations, seed=0
    )


def max_over_mean(shares_IME: Shares) -> Shares:
    """Its quantiles .05, .5 and .95."""
    return np.quantile(shares_IME.max(-1) * shares_IME.shape[-1], [0.05, 0.5, 0.95])


def total_variation(shares_IME: Shares, lag: int) -> float:
    """The mean part of the load that moved to other experts within `lag` iterations."""
    return float(abs(shares_IME[lag:] - shares_IME[:-lag]).sum(-1).mean() / 2)


@pytest.mark.parametrize(
    ("phase", "num_iterations", "skew", "moved"),
    [
        ("warm-up", 101, [(1.1, 9), (12, 16), (15.5, 16)], {10: (0.12, 0.3)}),
        ("transient", 391, [(3.5, 7), (7, 13), (15, 16)], {10: (0.035, 0.07), 100: (0.1, 0.2)}),
        ("settling", 991, [(3.5, 7), (8.5, 13.5), (15, 16)], {10: (0.02, 0.035), 100: (0.03, 0.06), 500: (0.06, 0.11)}),
        ("stable", 800, [(3.5, 7), (10.5, 16), (15, 16)], {10: (0.014, 0.025), 100: (0.015, 0.03), 500: (0.018, 0.04)}),
        ("balanced", 200, [(1.05, 1.25), (1.15, 1.5), (1.3, 1.7)], {10: (0.01, 0.04)}),
    ],
)  # fmt: skip
def test_each_phase_is_about_as_skewed_and_as_steady_as_measured(
    phase: str, num_iterations: int, skew: list[tuple[float, float]], moved: dict[int, tuple[float, float]]
) -> None:
    shares = series_of(phase, num_iterations)
    for value, (low, high) in zip(max_over_mean(shares), skew, strict=True):
        assert low <= value <= high
    for lag, (low, high) in moved.items():
        assert low <= total_variation(shares, lag) <= high


def test_a_warm_up_starts_uniform_collapses_by_iteration_11_and_moves_on_between_50_and_60() -> None:
    shares = series_of("warm-up", 101)
    skew = np.median(shares.max(-1) * 32, axis=1)
    assert skew[0] < 2
    assert skew[10] > 10
    hottest = shares.argmax(-1)
    assert (hottest[44] == hottest[48]).mean() > 0.8
    assert (hottest[48] == hottest[60]).mean() < 0.2
    assert (hottest[60] == hottest[64]).mean() > 0.8


def write_trace(path: Path, **changes: Any) -> Path:
    load = np.array([[[4, 2, 1, 1]], [[8, 0, 0, 0]], [[2, 2, 2, 2]]], dtype=np.float16).repeat(3, axis=1)
    load[:, 1] = load[:, 1, ::-1]
    arrays = {"iterations": np.array([1, 11, 31], dtype=np.int32), "load_share": load} | changes
    np.savez(path, **{key: array for key, array in arrays.items() if array is not None})
    return path


def shares_from(path: Path, **changes: Any) -> Shares:
    return trace_shares(
        path, **{"num_layers": 3, "num_experts": 4, "top_k": 2, "first": 1, "num_iterations": 40, **changes}
    )


def test_a_trace_is_exact_at_its_samples_and_linear_between_them(tmp_path: Path) -> None:
    shares = shares_from(write_trace(tmp_path / "trace.npz"))
    assert_shares(shares, (40, 3, 4), 2)
    first, second, third = [0.5, 0.25, 0.125, 0.125], [0.5, 1 / 6, 1 / 6, 1 / 6], [0.25] * 4
    for iteration, row in [(1, first), (11, second), (31, third), (40, third)]:
        assert shares[iteration - 1, 0] == pytest.approx(row, abs=1e-15)
    assert shares[5, 2] == pytest.approx(np.mean([first, second], axis=0), abs=1e-15)
    assert shares[20, 0] == pytest.approx(np.mean([second, third], axis=0), abs=1e-15)
    assert shares[0, 1] == pytest.approx(first[::-1])


def test_a_run_starts_at_the_iteration_of_the_trace_it_is_told(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.npz")
    assert np.array_equal(shares_from(path, first=13, num_iterations=5), shares_from(path)[12:17])
    late = write_trace(tmp_path / "late.npz", iterations=np.array([101, 111, 131]))
    assert np.array_equal(shares_from(late, first=95, num_iterations=6)[-1], shares_from(path)[0])
    assert np.array_equal(shares_from(late, first=101, num_iterations=40), shares_from(path))


def test_a_trace_of_one_sample_is_constant(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.npz", iterations=np.array([7]), load_share=np.ones((1, 1, 4)))
    assert (shares_from(path) == 0.25).all()


@pytest.mark.parametrize(
    ("num_layers", "taken"),
    [(1, [3]), (2, [1, 4]), (3, [1, 3, 5]), (6, [*range(6)]), (12, [k // 2 for k in range(12)])],
)
def test_layers_are_taken_spread_evenly_over_the_trace(tmp_path: Path, num_layers: int, taken: list[int]) -> None:
    load = np.ones((1, 6, 8))
    load[0, range(6), range(6)] = 2  # so that the hottest expert of a layer is its number
    path = write_trace(tmp_path / "trace.npz", iterations=np.array([1]), load_share=load)
    shares = shares_from(path, num_layers=num_layers, num_experts=8)
    assert shares[0].argmax(-1).tolist() == taken


def test_neighbours_are_merged_if_the_trace_has_more_experts(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.npz")
    assert shares_from(path, num_experts=2, top_k=1)[0, :2].tolist() == [[0.75, 0.25], [0.25, 0.75]]


@pytest.mark.parametrize("num_experts", [3, 8])
def test_experts_that_do_not_divide_are_a_config_error(tmp_path: Path, num_experts: int) -> None:
    wanted = f"has 4 experts a layer, the model {num_experts}; take a model with 4 experts"
    assert wanted in fault_of(write_trace(tmp_path / "trace.npz"), num_experts=num_experts)


def fault_of(path: Path, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        shares_from(path, **changes)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"iterations": None}, "has no array iterations; it needs iterations and load_share"),
        ({"iterations": None, "load_share": None}, "has no array iterations and no load_share"),
        ({"iterations": np.array([1, 2])}, r"load_share is float16 \[3, 3, 4\]; write numbers \[2 iterations"),
        ({"iterations": np.ones((3, 1), int)}, r"iterations is int64 \[3, 1\]; write a list of whole numbers"),
        ({"iterations": np.ones(3)}, r"iterations is float64 \[3\]"),
        ({"iterations": np.array([], int)}, r"iterations is int64 \[0\]"),
        ({"iterations": np.array([1, 11, 11])}, "iterations do not increase"),
        ({"iterations": np.array([21, 11, 1])}, "iterations do not increase"),
        ({"load_share": np.ones((3, 4))}, r"load_share is float64 \[3, 4\]"),
        ({"load_share": np.ones((3, 0, 4))}, r"load_share is float64 \[3, 0, 4\]"),
        ({"load_share": np.full((3, 1, 4), "x")}, "load_share is <U1"),
        ({"load_share": np.full((3, 1, 4), -1.0)}, "load_share has a negative or not finite value"),
        ({"load_share": np.full((3, 1, 4), np.nan)}, "load_share has a negative or not finite value"),
        ({"load_share": np.full((3, 1, 4), np.inf)}, "load_share has a negative or not finite value"),
        ({"load_share": np.zeros((3, 1, 4))}, "or a layer without load"),
        ({"load_share": np.full((3, 1, 4), None)}, "cannot be read as .npz: .* save it again"),
    ],
)
def test_a_trace_with_wrong_arrays_is_a_config_error(tmp_path: Path, changes: dict[str, Any], wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        shares_from(write_trace(tmp_path / "trace.npz", **changes))
    fault_of(tmp_path / "trace.npz")


def write_npy(path: Path) -> None:
    with path.open("wb") as stream:
        np.save(stream, np.ones(3))


def damage(path: Path) -> None:
    write_trace(path)
    data = bytearray(path.read_bytes())
    data[data.index(b"NUMPY") + 130] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda path: None, "cannot be read: No such file or directory; check the path"),
        (Path.mkdir, "cannot be read: Is a directory; check the path"),
        (lambda path: path.write_text("iterations 1 11 21"), "is no .npz file; save one with numpy.savez"),
        (lambda path: path.write_bytes(b""), "is no .npz file"),
        (write_npy, "is no .npz file"),
        (damage, "cannot be read as .npz: Bad CRC-32"),
    ],
)
def test_a_file_that_is_no_trace_is_a_config_error(tmp_path: Path, make: Callable[[Path], Any], wanted: str) -> None:
    make(tmp_path / "trace.npz")
    assert wanted in fault_of(tmp_path / "trace.npz")


@pytest.mark.skipif(not TRACE.exists(), reason="the recorded trace is not beside this checkout")
@pytest.mark.parametrize(("num_layers", "num_experts"), [(12, 32), (4, 8), (24, 16)])
def test_a_recorded_trace_serves_models_of_several_sizes(num_layers: int, num_experts: int) -> None:
    shares = trace_shares(TRACE, num_layers=num_layers, num_experts=num_experts, top_k=2, first=1, num_iterations=600)
    assert_shares(shares, (600, num_layers, num_experts), 2)
    skew = np.median(shares.max(-1) * num_experts, axis=1)
    assert skew[0] < 2 < skew[20]
