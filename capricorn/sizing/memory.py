"""How large a run is, by formula, before anything starts: parameters, bytes per rank, host memory, tmpfs.

The formulas are those `doctor` and `run --dry-run` print and the tests hold against the real thing.
"""

from __future__ import annotations

from dataclasses import dataclass

from capricorn.config.scenario import ModelConfig, Scenario
from capricorn.systems.registry import find
from capricorn.systems.settings import SystemSettings, file_settings_of, settings_of
from capricorn.topology import expert_split
from capricorn.units import KIB, MIB, Bytes

STATE_BYTES_PER_PARAM = 12
"""fp32 weight, Adam's first and second moment. Source: Gemini, SOSP'23, section 2."""
WORKER_BYTES, AGENT_BYTES = 355 * MIB, 225 * MIB
"""Resident size of a worker before it makes a model, and of a process that has torch imported; CPU build, measured."""
NUM_SLOTS = 2
"""Iterations the store keeps of each copy: the newest complete one and the one being written."""
SLOT_OVERHEAD_BYTES = 32 * KIB
"""Of a slot: header page, checksum table, random state, step counts, padding, and its share of the manifest."""

MLA_Q_RANK, MLA_KV_RANK, MLA_ROPE_DIM = 1536, 512, 64
"""Latent widths of multi-head latent attention. Source: DeepSeek-V3, section 4.2."""


def expert_params(model: ModelConfig) -> int:
    """Parameters of one routed expert."""
    if model.family == "mixtral":
        return 3 * model.hidden * model.ffn
    return 2 * model.hidden * model.ffn + model.ffn + model.hidden


def attention_params(model: ModelConfig) -> int:
    """Parameters of the attention of one layer."""
    h, d = model.hidden, model.head_dim
    if model.attention == "mla":
        q = h * MLA_Q_RANK + MLA_Q_RANK + MLA_Q_RANK * model.num_heads * (d + MLA_ROPE_DIM)
        kv = h * (MLA_KV_RANK + MLA_ROPE_DIM) + MLA_KV_RANK + MLA_KV_RANK * model.num_heads * 2 * d
        return q + kv + model.num_heads * d * h
    weights = h * d * (model.num_heads + 2 * model.num_kv_heads) + model.num_heads * d * h
    bias = d * (model.num_heads + 2 * model.num_kv_heads) + h if model.family == "gpt-moe" else 0
    return weights + bias


def dense_params(model: ModelConfig) -> int:
    """Parameters every rank holds in full: embeddings, attention, norms, gates, dense and shared feed-forward."""
    h = model.hidden
    gpt = model.family == "gpt-moe"
    embedding = model.vocab_size * h * (1 if model.tie_embeddings else 2) + (model.seq_len * h if gpt else 0)
    norm = 2 * h if gpt else h
    total = embedding + norm
    for layer in range(model.num_layers):
        total += attention_params(model) + 2 * norm
        if model.is_moe(layer):
            total += h * model.num_experts + model.num_shared_experts * expert_params(model)
        else:
            total += expert_params(model) if gpt else 3 * h * model.dense_ffn
    return total


def num_moe_layers(model: ModelConfig) -> int:
    return sum(map(model.is_moe, range(model.num_layers)))


def total_params(model: ModelConfig) -> int:
    return dense_params(model) + num_moe_layers(model) * model.num_experts * expert_params(model)


def active_params(model: ModelConfig) -> int:
    """Parameters that one token passes through."""
    return dense_params(model) + num_moe_layers(model) * model.top_k * expert_params(model)


def activation_bytes(model: ModelConfig, value_bytes: Bytes) -> Bytes:
    """Returns the bytes that the forward pass keeps for the backward pass, about; nothing is recomputed."""
    attention = 4 * model.hidden + 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    moe = (model.top_k * (2 * model.hidden + 4 * model.ffn)) + model.num_shared_experts * 4 * model.ffn
    values = model.num_layers * (8 * model.hidden + attention + moe) + 3 * model.vocab_size
    return value_bytes * model.tokens_per_rank * values


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes a scenario takes; per rank those of the rank with the most experts."""

    shard_bytes: Bytes
    """State one rank owns and checkpoints: 12 bytes per owned parameter."""
    device_bytes: Bytes
    """Weights, gradients, moments and activations one rank keeps, on its device."""
    process_bytes: Bytes
    """Host memory of all processes on this machine, training state included when the device is the CPU."""
    store_bytes: Bytes
    """tmpfs of this machine: replicas x 2 slots x the state of the owners it hosts, and one slot more of each owner
    where checkpoints are persisted; of a system that writes files, what it keeps and is writing, if they lie there."""

    @property
    def host_bytes(self) -> Bytes:
        """Host memory of this machine; tmpfs is part of it."""
        return self.process_bytes + self.store_bytes


def needs_of(scenario: Scenario, *, cuda: bool) -> Needs:
    """Returns what the scenario takes on this machine (all its nodes when they are emulated, one when real)."""
    model, topology = scenario.model, scenario.topology
    held, owned = held_expert_params(scenario), owned_expert_params(scenario)
    dense = dense_params(model)
    dense_share = -(-dense // topology.world_size)
    shard = STATE_BYTES_PER_PARAM * (owned + dense_share)
    moments = (held if scenario.train.expert_optimizer == "replicated" else owned) + dense_share
    device = 8 * (dense + held) + 8 * moments + activation_bytes(model, 2 if cuda else 4)
    nodes_here = 1 if scenario.launch.nnodes else topology.num_nodes
    ranks_here = nodes_here * topology.ranks_per_node
    buffers = _buffer_bytes(scenario, shard)
    writer = AGENT_BYTES if _persists(scenario) else 0
    processes = (
        AGENT_BYTES * (nodes_here + 1) + (WORKER_BYTES + writer + buffers + (0 if cuda else device)) * ranks_here
    )
    return Needs(shard, device, processes, _store_bytes(scenario, nodes_here, shard))


def held_expert_params(scenario: Scenario) -> int:
    """Returns the parameters of the experts that a rank holds, of the rank that holds the most."""
    model = scenario.model
    num_experts = len(expert_split(model.num_experts, scenario.topology.expert_parallel)[0])
    return num_experts * num_moe_layers(model) * expert_params(model)


def owned_expert_params(scenario: Scenario) -> int:
    """Returns those that belong to its state: replicas divide what they hold by whole matrices of a layer."""
    matrices = (3 if scenario.model.family == "mixtral" else 2) * num_moe_layers(scenario.model)
    share = -(-matrices // scenario.topology.num_expert_replicas)
    return -(-held_expert_params(scenario) * share // matrices) if matrices else 0


def _buffer_bytes(scenario: Scenario, shard_bytes: Bytes) -> Bytes:
    """Returns what the system itself needs of host memory, a rank, if it sends anything."""
    settings = settings_of(scenario)
    sends = scenario.system.every > 0 and scenario.system.replicas > 1
    return settings.buffer_bytes_of(shard_bytes) if sends and isinstance(settings, SystemSettings) else 0


def _persists(scenario: Scenario) -> bool:
    """Whether checkpoints in memory are also written to disk, each rank by a process of its own."""
    system = scenario.system
    return find(system.name).replicates and system.every > 0 and scenario.persist.every > 0


def _store_bytes(scenario: Scenario, num_nodes: int, shard_bytes: Bytes) -> Bytes:
    """Returns what so many of the nodes take of tmpfs."""
    topology, system, entry = scenario.topology, scenario.system, find(scenario.system.name)
    if entry.kind == "nothing" or not system.every:
        return 0
    state_bytes = STATE_BYTES_PER_PARAM * total_params(scenario.model)
    if entry.writes_files:
        files = file_settings_of(scenario)
        return (files.keep + 1) * state_bytes if files.in_memory else 0
    num_copies = NUM_SLOTS * system.replicas + _persists(scenario)
    slot_overhead_bytes = SLOT_OVERHEAD_BYTES + 8 * (shard_bytes // system.block_bytes)
    overhead_bytes = num_copies * num_nodes * topology.ranks_per_node * slot_overhead_bytes
    return state_bytes * num_nodes // topology.num_nodes * num_copies + overhead_bytes


SAMPLE_BYTES, LINE_BYTES = 700, 150
"""Of a rank's record of an iteration, and of a line of a timeline or of an event; measured."""
LOG_BYTES = MIB


def record_bytes(scenario: Scenario) -> Bytes:
    """Returns what the records and logs of a run take, about, on the machine that launches it."""
    model, train, ranks = scenario.model, scenario.train, scenario.topology.world_size
    loads = num_moe_layers(model) * (LINE_BYTES + 6 * model.num_experts)
    timelines = train.iterations // train.timeline_every * ranks * LINE_BYTES * (10 * model.num_layers + 4)
    return LOG_BYTES + train.iterations * (ranks * SAMPLE_BYTES + loads) + timelines


def file_bytes(scenario: Scenario) -> Bytes:
    """Returns what a system that writes files takes of the disk: what it keeps and is writing, unless it is tmpfs."""
    files = file_settings_of(scenario)
    writes = find(scenario.system.name).writes_files and scenario.system.every and not files.in_memory
    return (files.keep + 1) * STATE_BYTES_PER_PARAM * total_params(scenario.model) if writes else 0


def persistent_bytes(scenario: Scenario) -> Bytes:
    """Returns what the persistent tier takes: what it keeps and is writing."""
    kept = scenario.persist.keep + 1 if _persists(scenario) else 0
    return kept * STATE_BYTES_PER_PARAM * total_params(scenario.model)
