"""Forced routing: assigns experts to tokens so that the loads of a source come out. Knows no model and no router.

Shapes: I iterations of a run, M MoE layers, E experts, T tokens of this rank, K top_k.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from capricorn.hooks import TrainerHook
from capricorn.loads.load_trace import Ints, Shares, cap_shares

UNIT = 2**32  # what one expert of a token weighs: whole numbers keep the experts of a token distinct without rounding


class ForcedRouting(TrainerHook):
    """Assigns experts to each token so that each expert expects exactly its share of an iteration.

    An assignment depends on the seed, iteration, layer and rank only, so a restarted training sees it again.
    """

    def __init__(self, shares_IME: Shares, *, layers: Sequence[int], top_k: int, seed: int, rank: int) -> None:
        """Keeps the shares; an iteration begins with `on_iteration_begin`.

        Args:
            shares_IME: starts with iteration 1.
            layers: the ids of its M layers in the model, in order.
            top_k: experts of each token.
            seed: of the assignment.
            rank: whose tokens are routed.
        """
        self._shares_IME, self._top_k, self._seed, self._rank = shares_IME, top_k, seed, rank
        self._index = {layer: index for index, layer in enumerate(layers)}

    def on_iteration_begin(self, iteration: int) -> None:
        self._iteration = iteration
        self._shares_ME = cap_shares(self._shares_IME[iteration - 1], self._top_k)

    def assign_experts(self, layer: int, num_tokens: int) -> Tensor:
        """Returns the experts of each token [T, K] in the iteration begun last, int64, distinct for a token.

        Source: Madow, "On the theory of systematic sampling, II" (1949): the experts lie on a line of length K, each as
        long as K times its share, and a token takes those at u, u + 1, ... with a random u of its own in [0, 1).
        """
        key = np.random.SeedSequence(self._seed, spawn_key=(self._iteration, layer, self._rank))
        rng = np.random.Generator(np.random.Philox(key))
        shares_E = self._shares_ME[self._index[layer]]
        # Neighbours on the line are rarely chosen together: in a fixed order always the same ones.
        order_E = rng.permutation(len(shares_E))
        ends_E = np.cumsum(_lengths(shares_E[order_E], self._top_k))
        points_TK = rng.integers(UNIT, size=(num_tokens, 1)) + UNIT * np.arange(self._top_k)
        return torch.from_numpy(order_E[np.searchsorted(ends_E, points_TK, side="right")])


def _lengths(shares_E: Shares, top_k: int) -> Ints:
    """Returns whole lengths [E] in proportion to the shares: at most UNIT each, top_k UNITs in all, 0 for no share."""
    lengths_E = np.minimum(np.floor(shares_E * (top_k * UNIT)), UNIT).astype(np.int64)
    # What rounding cut off, less than 1 for each expert, goes to the first that have a load, and room.
    room_E = np.where(lengths_E > 0, UNIT - lengths_E, 0)
    added_E: Ints = np.diff(np.minimum(np.cumsum(room_E), top_k * UNIT - lengths_E.sum()), prepend=0)
    return lengths_E + added_E
