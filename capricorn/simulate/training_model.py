"""An analytic model of training under a series of expert loads: how long each op of each iteration takes.

Departs: all ranks wait for each other at every exchange, so the spans are those of the most loaded rank and the same
at both ends of the link; buffers are free.
Shapes: I iterations, M MoE layers, E experts, W ranks, S idle spans, O ops.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from capricorn.config.cluster import BACKWARD
from capricorn.config.fields import SettingsModel, check
from capricorn.config.planner import RHO_RANGE
from capricorn.errors import ConfigError
from capricorn.hooks import NO_LAYER, OpKey
from capricorn.loads.load_trace import Ints, Shares, cap_shares, trace_shares, trace_size
from capricorn.planner.link_model import LinkModel
from capricorn.planner.profile import COMMUNICATION, IterationProfile, spans_of
from capricorn.topology import expert_split
from capricorn.units import Bytes, Seconds

Floats: TypeAlias = npt.NDArray[np.float64]

ITERATION_S: Seconds = 1.0
"""The mean iteration without checkpoint; everything else is in proportion to it."""
LATENCY_FRAC = 0.001
"""Latency of the link, of the mean span."""
LEAST_NOISE = 0.001
"""To which any duration or share falls at most, as a multiple of itself without noise: nothing vanishes."""
MOST_ITERATIONS = 100_000
"""So that a training fits into memory."""


class TraceConfig(SettingsModel):
    """The training that a replay takes a series of expert loads for."""

    rho: float = Field(
        default=0.9,
        ge=RHO_RANGE[0],
        le=RHO_RANGE[1],
        description="transfer time of a checkpoint / idle time of an iteration",
    )
    first: int = Field(default=1, gt=0, description="iteration of the trace to start at")
    iterations: int = Field(
        default=0, ge=0, le=MOST_ITERATIONS, description="how many to replay; 0 is to the end of the trace"
    )
    ranks: int = Field(default=8, gt=0)
    top_k: int = Field(default=2, gt=0)
    tokens: int = Field(
        default=1 << 16, gt=0, le=1 << 40, description="assignments of a layer and iteration, over all ranks"
    )
    load_noise: float = Field(default=0.05, ge=0, lt=1, description="relative sd of a share, by iteration")
    compute_noise: float = Field(default=0.02, ge=0, lt=1, description="relative sd of a computing op's duration")
    idle_frac: float = Field(default=0.587, ge=0.001, le=0.999, description="of an iteration, its spans on average")
    attention_frac: float = Field(default=0.5, ge=0, le=1, description="of the computing under balanced loads")
    num_chunks: int = Field(
        default=1000, gt=0, le=1_000_000, description="full chunks of a checkpoint; about 20 a span"
    )
    profile_cost_frac: float = Field(
        default=0.002, ge=0, le=10, description="of an iteration, profiling and planning it"
    )
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        # Else no rank might have any.
        check(
            self.tokens >= self.ranks,
            f"trace.tokens {self.tokens} is less than one for each of {self.ranks} ranks; give trace.tokens more",
        )
        return self


def ops_of_layers(num_layers: int) -> tuple[OpKey, ...]:
    """Returns the ops of an iteration in order: each layer forward, back again, and the update.

    Attention stands for the gate too. A layer has two spans in each direction: its attention and its experts.
    """
    kinds = ("attention", "dispatch", "expert", "combine")
    forward = [OpKey(layer, "forward", kind) for layer in range(num_layers) for kind in kinds]  # type: ignore[arg-type]
    backward = [op._replace(direction="backward") for op in reversed(forward)]
    return (*forward, *backward, OpKey(NO_LAYER, "forward", "update"))


@dataclass(frozen=True, slots=True)
class SimulatedTraining:
    """Every iteration of a training, as it goes without checkpoints."""

    ops: tuple[OpKey, ...]
    ops_s: Floats
    """[I, O], from when the last rank has come to an op to when the last has done it."""
    spans_s: Floats
    """[I, S]"""
    tokens: Ints
    """[I, M, W] token assignments to the experts of each rank."""

    @property
    def base_s(self) -> Floats:
        """How long each iteration [I] takes."""
        total_s: Floats = self.ops_s.sum(1)
        return total_s

    @property
    def idle_s(self) -> Floats:
        """How long the link is idle in each iteration [I]."""
        total_s: Floats = self.spans_s.sum(1)
        return total_s

    def link(self, shard_bytes: Bytes, rho: float) -> LinkModel:
        """Returns the link over which a checkpoint takes `rho` times the idle time of an iteration."""
        bytes_per_s = shard_bytes / (rho * float(self.idle_s.mean()))
        return LinkModel(LATENCY_FRAC * float(self.spans_s.mean()), bytes_per_s)

    def profile(self, index: int, iteration: int) -> IterationProfile:
        """Returns what all ranks measure of the iteration at that index.

        Between two exchanges a rank computes for its part of the longest time, and waits in the second.
        """
        tokens_MW = self.tokens[index]
        part_MW = tokens_MW / tokens_MW.max(1, keepdims=True)
        is_expert_O = np.array([op.kind == "expert" for op in self.ops])
        layer_O = np.array([max(op.layer, 0) for op in self.ops])
        part_WO = np.where(is_expert_O, part_MW[layer_O].T, 1.0)
        reached_O = np.cumsum(self.ops_s[index])
        done_WO = reached_O - (1 - part_WO) * self.ops_s[index]
        begins_WO = np.concatenate([np.zeros((len(done_WO), 1)), done_WO[:, :-1]], axis=1)
        tokens = {layer: tuple(row) for layer, row in enumerate(tokens_MW.tolist())}
        return IterationProfile(iteration, self.ops, _rows(begins_WO), _rows(done_WO), tokens)


def _rows(values: Floats) -> tuple[tuple[float, ...], ...]:
    return tuple(map(tuple, values.tolist()))


def train(shares_IME: Shares, config: TraceConfig) -> SimulatedTraining:
    """Returns the training that has these loads.

    The mean iteration takes 1 s; the all-to-all is as slow as makes the spans `idle_frac` of that.

    Raises:
        ConfigError: there are more ranks than experts.
    """
    rng = np.random.Generator(np.random.Philox(config.seed))
    tokens_IMW = _tokens(shares_IME, config, rng)
    ops = ops_of_layers(shares_IME.shape[1])
    most_IM = tokens_IMW.max(2) * (config.ranks / config.tokens)
    computing_IO = _computing(ops, most_IM, config.attention_frac)
    computing_IO *= _noise(rng, config.compute_noise, computing_IO.shape)
    moving_IO = _moving(ops, most_IM)
    ops_s = _scaled(computing_IO, config.idle_frac) + _scaled(moving_IO, 1 - config.idle_frac)
    is_span_O = [op.kind not in COMMUNICATION for op in ops]
    assert sum(is_span_O) == len(spans_of(ops))
    return SimulatedTraining(ops, ops_s, ops_s[:, is_span_O], tokens_IMW)


def train_on(path: Path, config: TraceConfig) -> SimulatedTraining:
    """Returns the training that has the loads of a trace, in all its iterations or in those that are asked for.

    Raises:
        ConfigError: the file is no trace, it ends before the first iteration or is too long, there are more ranks than
            experts, or fewer experts than a token goes to.
    """
    size = trace_size(path)
    if config.first > size.last:
        raise ConfigError(f"trace.first {config.first} comes after the last iteration of {path}, {size.last}")
    check(
        config.top_k <= size.num_experts,
        f"trace.top_k {config.top_k} exceeds the {size.num_experts} experts of a layer of {path}; give at most as many",
    )
    num_iterations = config.iterations or size.last - config.first + 1
    check(
        num_iterations <= MOST_ITERATIONS,
        f"from trace.first {config.first} on {path} has {num_iterations} iterations; "
        f"choose trace.iterations of at most {MOST_ITERATIONS}",
    )
    shares_IME = trace_shares(
        path, num_layers=size.num_layers, num_experts=size.num_experts, top_k=config.top_k, first=config.first,
        num_iterations=num_iterations,
    )  # fmt: skip
    return train(shares_IME, config)


def _tokens(shares_IME: Shares, config: TraceConfig, rng: np.random.Generator) -> Ints:
    """Returns the assignments [I, M, W] to the ranks, with the noise of the batches in the shares."""
    noisy_IME = cap_shares(shares_IME * _noise(rng, config.load_noise, shares_IME.shape), config.top_k)
    starts = [experts.start for experts in expert_split(shares_IME.shape[2], config.ranks)]
    tokens_IMW: Ints = np.rint(np.add.reduceat(noisy_IME, starts, axis=2) * config.tokens).astype(np.int64)
    return tokens_IMW


def _noise(rng: np.random.Generator, deviation: float, shape: tuple[int, ...]) -> Floats:
    """Returns independent factors around 1."""
    factors: Floats = np.maximum(LEAST_NOISE, 1 + deviation * rng.standard_normal(shape))
    return factors


def _computing(ops: tuple[OpKey, ...], most_IM: Floats, attention_frac: float) -> Floats:
    """Returns how long the ops [I, O] compute, in any unit."""
    columns = []
    for op in ops:
        factor = BACKWARD if op.direction == "backward" else 1
        if op.kind == "attention":
            columns.append(np.full(len(most_IM), factor * attention_frac))
        elif op.kind == "expert":
            columns.append(factor * (1 - attention_frac) * most_IM[:, op.layer])
        else:
            columns.append(np.zeros(len(most_IM)))
    return np.stack(columns, axis=1)


def _moving(ops: tuple[OpKey, ...], most_IM: Floats) -> Floats:
    """Returns how long the ops [I, O] own the link, in any unit: as long as the most loaded rank sends or receives."""
    none_I = np.zeros(len(most_IM))
    return np.stack(
        [most_IM[:, op.layer] if op.kind in ("dispatch", "combine") else none_I for op in ops],
        axis=1,
    )


def _scaled(parts_IO: Floats, frac: float) -> Floats:
    """Returns the parts in seconds, scaled to that share of the mean iteration on average."""
    scaled_IO: Floats = parts_IO * (frac * ITERATION_S / parts_IO.sum(1).mean())
    return scaled_IO
