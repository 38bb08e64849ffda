"""One iteration of a model on a real cluster, by formula: flops, bytes, and how long they take. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace

from capricorn.config.cluster import BACKWARD, DEVICES, STORAGES, ClusterConfig, IterationTimes
from capricorn.config.scenario import ModelConfig, Scenario
from capricorn.errors import ConfigError, unknown_name
from capricorn.sizing.memory import (
    STATE_BYTES_PER_PARAM,
    attention_params,
    dense_params,
    expert_params,
    num_moe_layers,
    total_params,
)
from capricorn.systems.registry import find
from capricorn.units import Bytes, BytesPerSecond, Seconds

ACTIVATION_BYTES, GRADIENT_BYTES = 2, 4
"""Of a value that real systems exchange between experts (bf16), and of a gradient they reduce (fp32)."""
PASSES = 1 + BACKWARD
"""The forward of an op and its backward, in times of its forward."""


@dataclass(frozen=True, slots=True)
class Work:
    """One iteration of the target on its cluster."""

    model: ModelConfig
    cluster: ClusterConfig
    replicas: int
    tokens: float
    """Of a node, all its devices together."""
    expert_nodes: int
    """Nodes among which all experts are divided; the others hold the same."""

    @property
    def rows(self) -> float:
        """Token assignments of a node."""
        return self.tokens * self.model.top_k


def work_of(scenario: Scenario) -> Work:
    """Returns the target's iteration, with the tokens of its batch, or with those that make rho what was asked for."""
    cluster, model = scenario.cluster, scenario.model
    tokens = model.tokens_per_rank * cluster.devices_per_node
    work = Work(model, cluster, scenario.system.replicas, tokens, expert_nodes(scenario))
    if cluster.rho is None:
        return work
    rho = times_of(work).rho
    if rho == 0:
        raise ConfigError("cluster.rho cannot be set with --replicas 1: no checkpoint crosses the network")
    return replace(work, tokens=tokens * rho / cluster.rho)


def expert_nodes(scenario: Scenario) -> int:
    """Returns the number of nodes of an expert-parallel group."""
    topology = scenario.topology
    return max(1, topology.expert_parallel // topology.ranks_per_node)


def flops_per_s(cluster: ClusterConfig) -> float:
    """Returns what the devices of a node reach together."""
    if cluster.flops_per_s is None and cluster.accelerator not in DEVICES:
        raise unknown_name("accelerator", cluster.accelerator, DEVICES)
    return (cluster.flops_per_s or DEVICES[cluster.accelerator]) * cluster.devices_per_node * cluster.mfu


def link_of(cluster: ClusterConfig) -> BytesPerSecond:
    assert cluster.link_bytes_per_s is not None
    return cluster.link_bytes_per_s * cluster.link_efficiency


def storage_of(cluster: ClusterConfig) -> tuple[BytesPerSecond | None, BytesPerSecond | None]:
    if cluster.storage and cluster.storage not in STORAGES:
        raise unknown_name("storage", cluster.storage, STORAGES)
    node, total = STORAGES.get(cluster.storage, (None, None))
    return cluster.storage_node_bytes_per_s or node, cluster.storage_total_bytes_per_s or total


def flops_per_token(model: ModelConfig) -> dict[str, float]:
    """Returns the flops of a forward, by op of one layer; `head` of the whole model."""
    scores = 2 * model.seq_len * model.num_heads * model.head_dim  # half of the square is masked
    is_gpt = model.family == "gpt-moe"
    dense = expert_params(model) if is_gpt else 3 * model.hidden * model.dense_ffn
    # GShard's gate multiplies the tokens of a group, here a sequence, with the places at the experts.
    places = model.top_k * model.seq_len if is_gpt else 0
    return {
        "attention": 2 * attention_params(model) + scores,
        "gate": 2 * model.hidden * (model.num_experts + places),
        "expert": 2 * model.top_k * expert_params(model),
        "shared": 2 * model.num_shared_experts * expert_params(model),
        "dense": 2 * dense,
        "head": 2 * model.vocab_size * model.hidden,
    }


def layers_of(model: ModelConfig) -> dict[str, int]:
    """Returns how often an iteration has each op, in one direction."""
    moe = num_moe_layers(model)
    dense = model.num_layers - moe
    return {"attention": model.num_layers, "gate": moe, "expert": moe, "shared": moe, "dense": dense, "head": 1}


def times_of(work: Work) -> IterationTimes:
    model, cluster = work.model, work.cluster
    flops, layers = flops_per_token(model), layers_of(model)
    per_token = PASSES * sum(flops[op] * layers[op] for op in flops)
    compute_s = work.tokens * per_token / flops_per_s(cluster)
    rows_bytes = remote_bytes(work.rows * model.hidden * ACTIVATION_BYTES, work.expert_nodes)
    return times(work, compute_s=compute_s, rows_bytes=rows_bytes, rate=link_of(cluster))


def times(work: Work, *, compute_s: Seconds, rows_bytes: float, rate: BytesPerSecond) -> IterationTimes:
    """Returns the times of an iteration.

    Args:
        work: what is trained, and where.
        compute_s: how long the iteration computes.
        rows_bytes: what one all-to-all takes out of a node.
        rate: of a node's link.
    """
    traffic = _traffic(work, rows_bytes)
    return IterationTimes(
        compute_s=compute_s,
        all_to_all_s=traffic.all_to_all_bytes / rate,
        reduce_s=traffic.reduce_bytes / rate,
        checkpoint_s=traffic.checkpoint_bytes / rate,
    )


@dataclass(frozen=True, slots=True)
class Traffic:
    """What leaves a node in an iteration."""

    all_to_all_bytes: float
    reduce_bytes: float
    checkpoint_bytes: float


def traffic_of(scenario: Scenario, value_bytes: Bytes) -> Traffic:
    """Returns what a node of the scenario sends in an iteration, with a checkpoint; `value_bytes` of an activation."""
    model, topology = scenario.model, scenario.topology
    tokens = model.tokens_per_rank * topology.ranks_per_node
    replicas = scenario.system.replicas if find(scenario.system.name).replicates and scenario.system.every else 1
    work = Work(model, scenario.cluster, replicas, tokens, expert_nodes(scenario))
    return _traffic(work, remote_bytes(work.rows * model.hidden * value_bytes, work.expert_nodes))


def _traffic(work: Work, rows_bytes: float) -> Traffic:
    """Returns what leaves a node, of which one all-to-all sends `rows_bytes`."""
    model, nodes = work.model, work.cluster.nodes
    experts = num_moe_layers(model) * model.num_experts * expert_params(model) / work.expert_nodes
    reduced = remote_bytes(dense_params(model), nodes) + remote_bytes(experts, nodes // work.expert_nodes)
    return Traffic(
        all_to_all_bytes=4 * num_moe_layers(model) * rows_bytes,
        reduce_bytes=2 * GRADIENT_BYTES * reduced,
        checkpoint_bytes=STATE_BYTES_PER_PARAM * total_params(model) / nodes * (work.replicas - 1),
    )


def remote_bytes(num_bytes: float, num_nodes: int) -> float:
    """Returns what leaves the node, of traffic that is spread evenly over so many nodes."""
    return num_bytes * (num_nodes - 1) / num_nodes
