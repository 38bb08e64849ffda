"""What a run is: frozen models of the model, the cluster, the system and the training, checked when they are made.

Knows no torch, no file and no process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from capricorn.config.cluster import ClusterConfig, IterationTimes, Pace
from capricorn.config.fault_kinds import KINDS, NO_LINKS
from capricorn.config.fault_spec import FaultSpec
from capricorn.config.fields import ByteCount, Option, PathPart, SettingsModel, Timeout, check
from capricorn.config.launch_config import LaunchConfig
from capricorn.config.planner import PlannerConfig
from capricorn.hooks import DIRECTIONS, MOMENTS, NO_LAYER, OpKey, matches_op
from capricorn.topology import Topology, default_expert_parallel
from capricorn.units import KIB, MIB, BytesPerSecond

ROUTER = "router"
MOVED_SECTIONS = ("gemini", "storage", "torchsnapshot", "dcp")
"""Sections of version 0.1 that held settings of some systems."""
CUDA_BLOCK_BYTES = 32 * MIB
"""Default of `system.block_bytes` on CUDA: a shard of 20 GB is 600 blocks, and each costs hand-overs of the GIL."""


class ModelConfig(SettingsModel):
    """A decoder-only MoE transformer and the batch each rank trains it on.

    Family `mixtral`: RMSNorm, RoPE, grouped-query or latent attention, SwiGLU experts (3 matrices), dropless routing.
    Family `gpt-moe`: the GPT-2 block with fairscale's capacity-bound MOELayer (2 matrices an expert, top-2).
    """

    name: PathPart = Field(description="Name that runs of it go by")
    family: Literal["mixtral", "gpt-moe"] = Field(description="Kind of block and of routing")
    num_layers: int = Field(gt=0, description="Transformer layers")
    hidden: int = Field(gt=0, description="Width between layers")
    ffn: int = Field(gt=0, description="Inner width of one expert")
    num_heads: int = Field(gt=0, description="Query heads of an attention")
    num_kv_heads: int = Field(gt=0, description="Key-value heads of an attention")
    head_dim: int = Field(gt=0, description="Width of a head")
    attention: Literal["gqa", "mla"] = Field(default="gqa", description="Grouped-query or multi-head latent attention")
    num_experts: int = Field(gt=0, description="Routed experts of a MoE layer")
    top_k: int = Field(gt=0, description="Experts that a token is routed to")
    num_shared_experts: int = Field(default=0, ge=0, description="Experts of a MoE layer that every token passes")
    num_dense_layers: int = Field(default=0, ge=0, description="First layers, which have a dense feed-forward block")
    dense_ffn: int = Field(default=0, ge=0, description="Inner width of a dense feed-forward block")
    moe_every: int = Field(default=1, gt=0, description="Makes every k-th layer a MoE layer")
    vocab_size: int = Field(ge=256, description="Tokens of the vocabulary: 256 trains on bytes, more on a BPE")
    seq_len: int = Field(gt=0, description="Tokens of a sequence")
    batch_size: int = Field(gt=0, description="Sequences per rank and iteration")
    tie_embeddings: bool = Field(default=False, description="Use one matrix for the embeddings and the head")
    balance_loss: float = Field(default=0.01, ge=0, description="Weight of the loss that balances the expert loads")

    @model_validator(mode="after")
    def _check(self) -> Self:
        check(self.top_k <= self.num_experts, f"top_k {self.top_k} exceeds num_experts {self.num_experts}")
        check(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}",
        )
        check(self.head_dim % 2 == 0, f"head_dim {self.head_dim} must be even")
        moe_layers = sum(map(self.is_moe, range(self.num_layers)))
        check(moe_layers > 0, "the model has no MoE layer")
        check(
            self.family == "gpt-moe" or self.dense_ffn > 0 or moe_layers == self.num_layers,
            "layers that are not MoE need dense_ffn > 0",
        )
        if self.family == "gpt-moe":
            check(self.top_k == 2, f"family gpt-moe routes by fairscale's Top2Gate: top_k must be 2, not {self.top_k}")
            check(self.num_shared_experts == 0, "family gpt-moe has no shared experts")
            check(self.num_kv_heads == self.num_heads, "family gpt-moe has one key-value head per head")
            check(self.attention == "gqa", "family gpt-moe has plain attention")
            check(self.num_dense_layers == 0, "family gpt-moe places dense layers by moe_every")
        return self

    @property
    def tokens_per_rank(self) -> int:
        return self.seq_len * self.batch_size

    def is_moe(self, layer: int) -> bool:
        return layer >= self.num_dense_layers and (layer + 1) % self.moe_every == 0


class Emulation(SettingsModel):
    """The scale model as computed: what it stands for, by what factors, and what it comes to."""

    target: ModelConfig | None
    """The model it stands for; None when measured durations are emulated with the model as it is."""
    tokens_per_device: float
    """Of the target, in one iteration."""
    time_factor: float
    """Seconds here for a second there."""
    byte_factor: float
    """Bytes there for a byte here."""
    pace: Pace
    link_bytes_per_s: BytesPerSecond
    storage_node_bytes_per_s: BytesPerSecond | None
    storage_total_bytes_per_s: BytesPerSecond | None
    there: IterationTimes | None
    """Of the target, in its own seconds."""
    here: IterationTimes

    @property
    def rho(self) -> float:
        return self.here.rho


class LoadsConfig(SettingsModel):
    """Where the loads of the experts come from: the router, a phase of the synthetic generator, or a trace file."""

    source: Annotated[str, Option("--loads", "What", "LOADS")] = Field(
        default=ROUTER,
        description="Take expert loads from the router, a phase (warm-up, transient, settling, stable or balanced), "
        "or a trace (npz file)",
    )
    first: int = Field(default=1, gt=0, le=100_000, description="Iteration of the phase or trace to start at")


class TrainConfig(SettingsModel):
    """How long and with what recipe the model trains; the schedule does not depend on `iterations`."""

    iterations: Annotated[int, Option("--iterations", "Work", "N")] = Field(
        default=30, gt=0, description="Train this many iterations"
    )
    warmup: Annotated[int, Option("--warmup", "Work", "N", computed=True)] = Field(
        default=5,
        ge=0,
        description="Leave the first N iterations out of the summary (default: 5, or all but one of fewer; 0 for "
        "faults)",
    )
    seed: Annotated[int, Option("--seed", "Work", "S")] = Field(
        default=0, ge=0, description="Draw weights, order of the data and noise of the routing from this seed"
    )
    lr: float = Field(default=1e-3, gt=0, description="Learning rate at its peak")
    min_lr_frac: float = Field(default=0.1, ge=0, le=1, description="Part of the learning rate that is left in the end")
    lr_warmup_iterations: int = Field(
        default=10, ge=0, description="Iterations in which the learning rate rises to its peak"
    )
    schedule_iterations: int = Field(default=1000, gt=0, description="Length of the cosine of the learning rate")
    weight_decay: float = Field(default=0.1, ge=0, description="AdamW's decay of the weights")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW's decay of the first moment")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="AdamW's decay of the second moment")
    expert_optimizer: Literal["sharded", "replicated"] = Field(
        default="sharded",
        description="Whether replicas of an expert divide its optimizer state among them, or each keeps all of it",
    )
    clip_norm: float = Field(default=1.0, gt=0, description="Norm that gradients are clipped to")
    timeline_every: int = Field(default=10, gt=0, description="Iterations between two recorded timelines of ops")

    @model_validator(mode="after")
    def _check(self) -> Self:
        check(
            self.warmup < self.iterations,
            f"warmup {self.warmup} leaves nothing of {self.iterations} iterations to measure; use fewer",
        )
        return self


class DataConfig(SettingsModel):
    """Text to train on: `stdlib` (the sources of the interpreter's standard library) or a file or folder.

    Of more than 16 MiB only the first are read, which is many epochs of a benchmark.
    """

    path: Annotated[str, Option("--data", "What", "PATH")] = Field(
        default="stdlib", description="Train on the text in this file or folder, or on the interpreter's own stdlib"
    )


class SystemConfig(SettingsModel):
    """A checkpointing system and its settings."""

    name: Annotated[str, Option("--system", "What", "SYSTEM")] = Field(
        default="capricorn",
        description="Checkpoint with this system: one of `list systems`, PACKAGE.MODULE:CLASS or FILE.py:CLASS",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Settings that the system itself defines")
    every: Annotated[int, Option("--ckpt", "Checkpoints", "WHEN", written="every-iter")] = Field(
        default=1, ge=0, description="Make a checkpoint every-iter, every-N, or off (as a setting: 1, N, or 0)"
    )
    replicas: Annotated[int, Option("--replicas", "Checkpoints", "M", computed=True)] = Field(
        default=2,
        gt=0,
        description="Keep M copies of each shard, one of them local (default: 2; 1 with one node)",
    )
    block_bytes: ByteCount = Field(
        default=256 * KIB,
        ge=4096,
        multiple_of=4096,
        description="Bytes of one checksum, and of one transfer where none is planned; by default 32 MiB on CUDA",
    )
    low_class: bool = Field(default=True, description="Mark checkpoint traffic as of low priority (DSCP CS1)")
    send_buffer_bytes: ByteCount = Field(
        default=128 * KIB, ge=4096, description="Send buffer of checkpoint sockets in bytes (SO_SNDBUF)"
    )
    idle_priority: bool = Field(
        default=True, description="Run checkpoint traffic at SCHED_IDLE: on CPU time that nobody else wants"
    )
    staging_threads: int = Field(
        default=1, ge=1, le=64, description="Threads of a rank that copy and hash a checkpoint beside training"
    )
    timeout_s: Timeout = Field(default=30.0, description="Seconds to wait at most for a peer")
    max_lost: int = Field(
        default=1,
        ge=1,
        le=2,
        description="Finished iterations that may be lost; with 2 a late save holds up nothing yet",
    )

    @model_validator(mode="before")
    @classmethod
    def _read_old_names(cls, values: Any) -> Any:
        """Returns the values by the names of today: records of earlier versions say `give_way`."""
        if not isinstance(values, Mapping) or "give_way" not in values:
            return values
        return {"idle_priority" if key == "give_way" else key: value for key, value in values.items()}


class PersistConfig(SettingsModel):
    """The persistent tier of the systems that replicate: which of their checkpoints it gets, and where it lies."""

    every: Annotated[int, Option("--persist-every", "Checkpoints", "N")] = Field(
        default=0, ge=0, description="Keep every N-th iteration on disk, too; 0 keeps none"
    )
    dir: Annotated[str, Option("--persist-dir", "Checkpoints", "PATH")] = Field(
        default="",
        description="Keep them in this folder, which all nodes reach, and resume from what it holds (default: "
        "persistent/ of the run)",
    )
    keep: int = Field(default=2, ge=2, description="Complete checkpoints that are kept on disk")
    timeout_s: Timeout = Field(default=60.0, description="Seconds to wait at most for the writers of other ranks")


class StoreConfig(SettingsModel):
    """Where the memory store lives."""

    root: str = Field(default="/dev/shm", description="Folder of the memory stores, on a tmpfs")
    keep: Annotated[bool, Option("--keep-store", "Checkpoints")] = Field(
        default=False, description="Leave the memory store in place after the run"
    )


class Scenario(SettingsModel):
    """All that defines a run; stored resolved in its record."""

    model: Annotated[ModelConfig, Option("--model", "What", "MODEL", written="mixtral-small")] = Field(
        description="Train this model: a preset of `list models`, or a TOML file"
    )
    train: TrainConfig = TrainConfig()
    data: DataConfig = DataConfig()
    cluster: ClusterConfig = ClusterConfig()
    loads: LoadsConfig = LoadsConfig()
    system: SystemConfig = SystemConfig()
    planner: PlannerConfig = PlannerConfig()
    persist: PersistConfig = PersistConfig()
    store: StoreConfig = StoreConfig()
    launch: LaunchConfig = LaunchConfig()
    faults: Annotated[tuple[FaultSpec, ...], Option("--fault", "Failures", "FAULT", (), parameter="faults")] = Field(
        default=(),
        description="Inject a failure, KIND@rank=R,iteration=I[,op=...], with a KIND of `list faults`; repeatable",
    )
    emulation: Emulation | None = None
    """Computed from the cluster and the model; None without emulation."""

    @property
    def topology(self) -> Topology:
        cluster = self.cluster
        world_size = cluster.nodes * cluster.ranks_per_node
        expert_parallel = cluster.expert_parallel or default_expert_parallel(self.model.num_experts, world_size)
        return Topology(cluster.nodes, cluster.ranks_per_node, expert_parallel)

    @model_validator(mode="before")
    @classmethod
    def _read_older(cls, values: Any) -> Any:
        """Records of version 0.1 have sections for some systems; their fields are options of the system now."""
        older = {name: values[name] for name in MOVED_SECTIONS if isinstance(values, dict) and name in values}
        if not older:
            return values
        options = {key: value for section in older.values() for key, value in section.items()}
        system = dict(values.get("system", {}))
        kept = {name: value for name, value in values.items() if name not in older}
        return kept | {"system": system | {"options": options | system.get("options", {})}}

    @model_validator(mode="after")
    def _check(self) -> Self:
        topology, model = self.topology, self.model
        check(
            self.system.replicas <= topology.num_nodes,
            f"--replicas {self.system.replicas} needs as many nodes, there are {topology.num_nodes}; "
            f"use --nodes {self.system.replicas} or --replicas {topology.num_nodes}",
        )
        check(
            self.planner.replan != "oracle",
            "planner.replan=oracle knows what has not happened yet: it is for ablate --trace alone",
        )
        check(
            topology.expert_parallel <= model.num_experts,
            f"--expert-parallel {topology.expert_parallel}: so many ranks cannot share {model.num_experts} experts, as "
            f"each must hold at least one; use --expert-parallel "
            f"{default_expert_parallel(model.num_experts, topology.world_size)}, or a model with more experts",
        )
        if model.family == "gpt-moe":
            check(
                model.num_experts % topology.expert_parallel == 0,
                f"{model.num_experts} experts do not divide by {topology.expert_parallel} ranks, "
                f"as {model.name} (fairscale MOELayer) needs; change --expert-parallel, --nodes or --ranks-per-node",
            )
            check(
                model.tokens_per_rank % model.num_experts == 0,
                f"{model.tokens_per_rank} tokens per rank do not divide by {model.num_experts} experts, "
                f"as {model.name} (fairscale Top2Gate) needs; change model.batch_size or model.seq_len",
            )
            check(
                self.loads.source == ROUTER,
                f"--loads {self.loads.source}: {model.name} is routed by fairscale's gate, whose experts take a fixed "
                "number of rows; use --loads router",
            )
        check(
            not (self.cluster.is_emulated and self.launch.nnodes),
            f"--cluster {self.cluster.name} emulates all nodes on this machine: leave out --nnodes",
        )
        for fault in self.faults:
            _check_fault(fault, topology, model, self.train.iterations)
            needs_links = fault.kind in KINDS and "links" in KINDS[fault.kind].needs
            check(not needs_links or self.cluster.is_emulated, f"fault {fault}: {NO_LINKS}")
        return self


def ops_of(model: ModelConfig) -> list[OpKey]:
    """Returns every op of an iteration."""
    kinds = {True: ("attention", "gate", "dispatch", "expert", "combine"), False: ("attention", "expert")}
    layers = [(layer, kind) for layer in range(model.num_layers) for kind in kinds[model.is_moe(layer)]]
    both = [*layers, (NO_LAYER, "head")]
    keys = [OpKey(layer, direction, kind) for layer, kind in both for direction in DIRECTIONS]  # type: ignore[arg-type]
    return [*keys, OpKey(NO_LAYER, "backward", "reduce"), OpKey(NO_LAYER, "forward", "update")]


def _check_fault(fault: FaultSpec, topology: Topology, model: ModelConfig, iterations: int) -> None:
    can_come = fault.op in MOMENTS or any(
        matches_op(fault.op, op, edge) for op in ops_of(model) for edge in ("begin", "end")
    )
    check(can_come, f"fault {fault} can never be triggered: {model.name} has no such op")
    if fault.rank is not None:
        check(fault.rank < topology.world_size, f"fault {fault} names rank {fault.rank} of {topology.world_size}")
    if fault.node is not None:
        check(fault.node < topology.num_nodes, f"fault {fault} names node {fault.node} of {topology.num_nodes}")
    check(fault.iteration <= iterations, f"fault {fault} comes after the last iteration, {iterations}")
