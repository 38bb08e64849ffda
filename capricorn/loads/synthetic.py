"""Synthetic expert loads, like those of a training in one of its phases. Knows no file and no token.

Shapes: I iterations of a run, N iterations of the phase up to its end, M MoE layers, E experts.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from capricorn.errors import unknown_name
from capricorn.loads.load_trace import Shares, cap_shares

SIZED_FOR = 32  # the number of experts whose loads the values below describe
TAIL = 3.0

Curve: TypeAlias = tuple[tuple[int, ...], tuple[float, ...]]
"""Iterations of the phase, and the value at each; between them it is on a straight line."""


class Phase(NamedTuple):
    """How the loads of a phase are made: softmax of fixed, slowly drifting and independent parts of logits.

    The fixed part of the expert of rank r (from 1) in a layer is -slope ln(r), and `tail` less from some rank on.
    """

    slope: tuple[float, float]
    tail: float
    drift_sd: float
    drift_iterations: float
    noise_sd: float
    rise: Curve = ((1,), (1.0,))
    """Weight of the fixed and drifting parts."""
    swap: Curve = ((1,), (0.0,))
    """How far the experts have moved on to other ranks."""


_PHASES = {
    "warm-up": Phase((0.9, 2.3), TAIL, 0.35, 60, 0.06, rise=((1, 11), (0.05, 1.0)), swap=((50, 60), (0.0, 1.0))),
    "transient": Phase((0.45, 1.6), TAIL, 0.35, 120, 0.06),
    "settling": Phase((0.45, 1.75), TAIL, 0.27, 1000, 0.055),
    "stable": Phase((0.45, 2.0), TAIL, 0.07, 2000, 0.045),
    "balanced": Phase((0.05, 0.15), 0.0, 0.05, 1000, 0.04),
}
PHASES = tuple(_PHASES)


def synthetic_shares(
    phase: str, *, num_layers: int, num_experts: int, top_k: int, first: int, num_iterations: int, seed: int
) -> Shares:
    """Returns the shares [I, M, E] from iteration `first` of the phase on; each row sums to 1, none exceeds 1/top_k.

    A row depends on the seed, layer and iteration of the phase, not on which others are asked for.

    Args:
        phase: its name.
        num_layers: M.
        num_experts: E.
        top_k: experts of each token.
        first: iteration of the phase that the run begins with.
        num_iterations: I.
        seed: of the random parts.

    Raises:
        ConfigError: there is no such phase.
    """
    if phase not in _PHASES:
        raise unknown_name("phase", phase, PHASES)
    shares_IME = np.empty((num_iterations, num_layers, num_experts))
    for layer in range(num_layers):
        rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=(layer,))))
        logits_NE = _logits(_PHASES[phase], num_experts, first + num_iterations - 1, rng)
        shares_IME[:, layer] = cap_shares(np.exp(logits_NE[first - 1 :]), top_k)
    return shares_IME


def _logits(phase: Phase, num_experts: int, num_iterations: int, rng: np.random.Generator) -> Shares:
    """Returns the logits [N, E] of one layer."""
    rank_E = 1 + np.arange(num_experts)
    slope, tail_from = rng.uniform(*phase.slope), rng.integers(10, 22) * num_experts / SIZED_FOR
    ranked_E = -slope * np.log(rank_E) - phase.tail * (rank_E >= round(tail_from))
    before_E, after_E = rng.permutation(ranked_E), rng.permutation(ranked_E)
    # Drawn by iteration, so that a longer run continues a shorter one.
    normal_N2E = rng.standard_normal((num_iterations, 2, num_experts))
    drift_NE = phase.drift_sd * _ornstein_uhlenbeck(normal_N2E[:, 0], phase.drift_iterations)

    iteration_N = 1 + np.arange(num_iterations)
    rise_N1, swap_N1 = (np.interp(iteration_N, *curve)[:, None] for curve in (phase.rise, phase.swap))
    fixed_NE = (1 - swap_N1) * before_E + swap_N1 * after_E
    logits_NE: Shares = rise_N1 * (fixed_NE + drift_NE) + phase.noise_sd * normal_N2E[:, 1]
    return logits_NE


def _ornstein_uhlenbeck(normal_NE: Shares, time_constant: float) -> Shares:
    """Returns processes [N, E] of variance 1 that forget their past within about `time_constant` iterations."""
    kept = np.exp(-1 / time_constant)
    drift_NE: Shares = np.sqrt(1 - kept**2) * normal_NE
    drift_NE[:1] = normal_NE[:1]
    for previous_E, current_E in pairwise(drift_NE):
        current_E += kept * previous_E
    return drift_NE
