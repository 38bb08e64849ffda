"""From a cluster and a model to the scale model of both: what is trained here, how long its ops last, how fast its
links are. Pure arithmetic, the same on every machine.

Of the target's iteration three durations count: computing, all-to-all, and the transfer of a checkpoint. Time is
stretched by one factor and bytes are divided by another, so that all three keep their proportions. A node of the
target, all its devices together, is a node here; its layers are folded into fewer, longer ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from capricorn.config.cluster import IterationTimes, Pace
from capricorn.config.fields import validate
from capricorn.config.scenario import Emulation, ModelConfig, Scenario
from capricorn.errors import ConfigError
from capricorn.sizing.memory import dense_params, num_moe_layers, total_params
from capricorn.sizing.workload import (
    ACTIVATION_BYTES,
    PASSES,
    Work,
    expert_nodes,
    flops_per_s,
    flops_per_token,
    layers_of,
    link_of,
    remote_bytes,
    storage_of,
    times,
    times_of,
    work_of,
)
from capricorn.units import BytesPerSecond, Seconds, format_seconds

VALUE_BYTES = 4
"""Of a value here, where all is fp32."""
RATES: dict[str, BytesPerSecond] = {"mixtral": 10e6, "gpt-moe": 5e6}
"""Of links, by family: fairscale's gate takes time with the square of the tokens, so there are to be fewer of them."""
BATCH = 4
WIDTHS, VOCABULARIES, MIN_FFN = range(32, 1025, 8), (256, 512, 1024, 2048, 4096), 4
MAX_ERROR = 0.05
"""Deviation of bytes from their aim, by rounding widths to whole numbers, beyond which there is no scale model."""
MIN_OP_S: Seconds = 0.002
"""Ops that last less cannot be told from a late wake-up."""
FLOPS_ALLOWED_PER_S = 10e9
"""Real computing of all ranks together, for each second of modelled computing, that two cores do with ease."""


def scale(scenario: Scenario) -> Scenario:
    """Returns the scenario with its emulation computed and its model scaled; unchanged on `local`.

    Raises:
        ConfigError: no scale model of this model and cluster keeps the proportions.
    """
    if not scenario.cluster.is_emulated:
        return scenario
    cluster = scenario.cluster
    if cluster.rate_bytes_per_s is None:
        cluster = cluster.model_copy(update={"rate_bytes_per_s": RATES[scenario.model.family]})
        scenario = scenario.model_copy(update={"cluster": cluster})
    try:
        emulation, model = _measured(scenario) if cluster.is_measured else _described(scenario)
    except (ValidationError, ArithmeticError):  # a figure that comes out as infinite, or as nothing
        raise ConfigError(
            f"--cluster {cluster.name}: its figures are too large or too small for a scale model; look at those that "
            "were set"
        ) from None
    parts = scenario.model_dump() | {"emulation": emulation, "model": model}
    return validate(Scenario, parts, f"--cluster {cluster.name}")


def _described(scenario: Scenario) -> tuple[Emulation, ModelConfig]:
    """Returns the scale model of a cluster that is described by its hardware."""
    work = work_of(scenario)
    cluster, there = work.cluster, times_of(work)
    time_factor = cluster.iteration_s / (there.compute_s + there.all_to_all_s)
    byte_factor = link_of(cluster) / (cluster.rate * time_factor)
    model = _shrink(work, byte_factor, there.compute_s * time_factor)
    pace = _pace(work, model, time_factor)
    _check_pace(pace, model, scenario)
    storage = [None if rate is None else rate / byte_factor / time_factor for rate in storage_of(cluster)]
    emulation = Emulation(
        target=work.model,
        tokens_per_device=work.tokens / cluster.devices_per_node,
        time_factor=time_factor,
        byte_factor=byte_factor,
        pace=pace,
        link_bytes_per_s=cluster.rate,
        storage_node_bytes_per_s=storage[0],
        storage_total_bytes_per_s=storage[1],
        there=there,
        here=_times_here(replace(work, model=model), pace),
    )
    return emulation, model


def _measured(scenario: Scenario) -> tuple[Emulation, ModelConfig]:
    """Returns the model as it is, at the durations and the link rate that the cluster gives."""
    cluster, model = scenario.cluster, scenario.model
    attention_s, expert_s = cluster.attention_s, cluster.expert_s
    assert attention_s is not None
    assert expert_s is not None
    pace = Pace(
        attention_s=attention_s,
        gate_s=0.0,
        expert_s_per_row=expert_s / (model.tokens_per_rank * model.top_k),
        shared_s=0.0,
        dense_s=expert_s,
        head_s=cluster.head_s,
    )
    node, total = storage_of(cluster)
    emulation = Emulation(
        target=None,
        tokens_per_device=model.tokens_per_rank,
        time_factor=1.0,
        byte_factor=1.0,
        pace=pace,
        link_bytes_per_s=cluster.rate,
        storage_node_bytes_per_s=node,
        storage_total_bytes_per_s=total,
        there=None,
        here=_times_here(Work(model, cluster, scenario.system.replicas, 0.0, expert_nodes(scenario)), pace),
    )
    return emulation, model


# --- the scale model ---------------------------------------------------------------------------------------------


def _shrink(work: Work, byte_factor: float, compute_s: Seconds) -> ModelConfig:
    """Returns the small model whose state and rows are the target's divided by the byte factor.

    Of all widths that do, it is the one whose dense share of parameters comes nearest to the target's, and whose real
    computing, in `compute_s`, is light.
    """
    rated = [(_badness(model, work, byte_factor, compute_s), model) for model in _candidates(work, byte_factor)]
    best = min(rated, key=lambda pair: pair[0], default=None)
    if best is None or _error(best[1], work, byte_factor) > MAX_ERROR:
        raise ConfigError(
            f"no scale model of {work.model.name} on {work.cluster.name} with {work.cluster.nodes} nodes keeps its "
            "proportions at this size: set cluster.rate_bytes_per_s or cluster.iteration_s higher"
        )
    return best[1]


def _candidates(work: Work, byte_factor: float) -> Iterator[ModelConfig]:
    params = total_params(work.model) / byte_factor
    for hidden in WIDTHS:
        seq_len = _seq_len(work, byte_factor, hidden)
        for vocab_size in VOCABULARIES:
            narrow, wide = (_small(work, hidden, seq_len, vocab_size, ffn) for ffn in (64, 128))
            per_width = (total_params(wide) - total_params(narrow)) / 64
            ffn = round(64 + (params - total_params(narrow)) / per_width)
            if ffn >= MIN_FFN:
                yield _small(work, hidden, seq_len, vocab_size, ffn)


def _seq_len(work: Work, byte_factor: float, hidden: int) -> int:
    """Returns the length of sequences in a batch of BATCH, so that rows x width is the target's by the byte factor."""
    fold = num_moe_layers(work.model) / _num_moe_layers(work)
    there = work.tokens * work.model.hidden * ACTIVATION_BYTES * fold
    tokens = there / byte_factor / (hidden * VALUE_BYTES) / work.cluster.ranks_per_node
    experts = work.model.num_experts
    # fairscale's gate wants tokens that divide by the experts.
    unit = experts // math.gcd(experts, BATCH) if work.model.family == "gpt-moe" else 1
    return max(unit, round(tokens / BATCH / unit) * unit)


def _num_moe_layers(work: Work) -> int:
    return min(work.cluster.moe_layers, num_moe_layers(work.model))


def _small(work: Work, hidden: int, seq_len: int, vocab_size: int, ffn: int) -> ModelConfig:
    target = work.model
    dense, heads = min(1, target.num_dense_layers), max(2, hidden // 64)
    changes: dict[str, Any] = {
        "num_layers": dense + _num_moe_layers(work) * target.moe_every,
        "num_dense_layers": dense,
        "hidden": hidden,
        "ffn": ffn,
        "dense_ffn": max(1, round(ffn * target.dense_ffn / target.ffn)) if target.dense_ffn else 0,
        "num_heads": heads,
        "num_kv_heads": heads if target.family == "gpt-moe" else 1,
        "head_dim": 16,
        "attention": "gqa",
        "vocab_size": vocab_size,
        "seq_len": seq_len,
        "batch_size": BATCH,
    }
    return target.model_copy(update=changes)


def _rows_bytes(model: ModelConfig, work: Work) -> float:
    """Returns the bytes that one all-to-all takes out of a node here."""
    rows = work.cluster.ranks_per_node * model.tokens_per_rank * model.top_k
    return remote_bytes(rows * model.hidden * VALUE_BYTES, work.expert_nodes)


def _error(model: ModelConfig, work: Work, byte_factor: float) -> float:
    """Returns the relative deviation of the state and of the rows from their aims."""
    fold = num_moe_layers(work.model) / num_moe_layers(model)
    by_state = abs(total_params(model) * byte_factor / total_params(work.model) - 1)
    # Of all rows: those of experts within a node leave none.
    there = work.rows * work.model.hidden * ACTIVATION_BYTES * fold
    here = work.cluster.ranks_per_node * model.tokens_per_rank * model.top_k * model.hidden * VALUE_BYTES
    return by_state + abs(here * byte_factor / there - 1)


def _badness(model: ModelConfig, work: Work, byte_factor: float, compute_s: Seconds) -> float:
    share_here, share_there = (dense_params(one) / total_params(one) for one in (model, work.model))
    ranks = work.cluster.nodes * work.cluster.ranks_per_node
    real_flops = ranks * model.tokens_per_rank * PASSES * _real_flops_per_token(model)
    return (
        30 * _error(model, work, byte_factor)
        + abs(math.log(share_here / share_there))
        + real_flops / compute_s / FLOPS_ALLOWED_PER_S
    )


def _real_flops_per_token(model: ModelConfig) -> float:
    """Returns the flops of a forward here, where fairscale's gate multiplies all tokens with all places at experts."""
    flops, layers = flops_per_token(model), layers_of(model)
    places = 4 * model.top_k * model.tokens_per_rank * model.hidden if model.family == "gpt-moe" else 0
    return sum(flops[op] * layers[op] for op in flops) + places * layers["gate"]


def _pace(work: Work, model: ModelConfig, time_factor: float) -> Pace:
    """Returns how long each op takes here: all the target's time in such ops, split over as many as there are here."""
    flops, there, here = flops_per_token(work.model), layers_of(work.model), layers_of(model)
    per_flop = time_factor * work.tokens / flops_per_s(work.cluster)
    spent = {op: per_flop * flops[op] * there[op] / here[op] if here[op] else 0.0 for op in flops}
    return Pace(
        attention_s=spent["attention"],
        gate_s=spent["gate"],
        expert_s_per_row=spent["expert"] / (model.tokens_per_rank * model.top_k),
        shared_s=spent["shared"],
        dense_s=spent["dense"],
        head_s=spent["head"],
    )


def _check_pace(pace: Pace, model: ModelConfig, scenario: Scenario) -> None:
    experts_s = pace.expert_s_per_row * model.tokens_per_rank * model.top_k
    shortest_s = min(pace.moe_attention_s, pace.moe_gate_s, experts_s)
    if shortest_s < MIN_OP_S:
        raise ConfigError(
            f"computing of {model.name} is so small a part of an iteration on {scenario.cluster.name} that ops last "
            f"{format_seconds(shortest_s)} here, too short to be paced: use a published model (capricorn-bench list "
            "models), a larger model.batch_size, or a larger cluster.iteration_s"
        )


def _times_here(work: Work, pace: Pace) -> IterationTimes:
    """Returns the times of the scale model, which is the model of `work` here."""
    model = work.model
    layers, rows = layers_of(model), model.tokens_per_rank * model.top_k
    moe = pace.gate_s + pace.expert_s_per_row * rows + pace.shared_s
    forward = pace.attention_s * layers["attention"] + moe * layers["expert"] + pace.dense_s * layers["dense"]
    compute_s, rows_bytes = PASSES * (forward + pace.head_s), _rows_bytes(model, work)
    return times(work, compute_s=compute_s, rows_bytes=rows_bytes, rate=work.cluster.rate)
