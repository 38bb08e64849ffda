"""The cluster a run stands for: failure domains on this machine, and what a scale model of a real cluster is made from.

Pure values; how the scale is computed is in `scale`.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from capricorn.config.fields import ByteRate, Option, PathPart, SettingsModel, check
from capricorn.errors import ConfigError
from capricorn.units import BytesPerSecond, Seconds, count_noun

Device = Literal["auto", "cpu", "cuda"]
LOCAL = "local"

DEVICES: dict[str, float] = {"v100": 125e12, "rtx3090": 71e12, "a100": 312e12, "h100": 989e12}
"""Peak of dense half-precision matrix products with fp32 sums, in flop/s. Source: NVIDIA's data sheets."""

STORAGES: dict[str, tuple[BytesPerSecond, BytesPerSecond | None]] = {
    "shared-20g": (2.5e9, 2.5e9),
    "nvme-gen3": (2.5e9, None),
    "nvme-gen4": (6e9, None),
    "nvme-gen4-x4": (24e9, None),
}
"""Bytes a second of one node and of all nodes together (None: each has its own). `shared-20g` is the file system of
20 Gb/s beside the p3dn and p4d clusters of Gemini, SOSP'23; the others are local drives, one or four striped."""


FAILURE_DOMAINS = frozenset({"name", "nodes", "ranks_per_node", "expert_parallel", "device"})
HARDWARE = frozenset({
    "accelerator", "flops_per_s", "devices_per_node", "mfu", "link_bytes_per_s", "link_efficiency", "rho",
    "iteration_s", "moe_layers",
})  # fmt: skip
"""What describes hardware and how it is scaled, and means nothing where durations are given."""
MEASURED = frozenset({"attention_s", "expert_s", "head_s"})
"""The durations that are given of a cluster that was measured."""


class ClusterConfig(SettingsModel):
    """Failure domains, and the cluster they are a scale model of.

    `local` runs the nodes as process groups on this machine, one torchrun agent each, with nothing modelled. Any other
    name is an emulation: either of a cluster described by its hardware (`accelerator`, `link_bytes_per_s`), for which
    model, bytes and rates are scaled down, or of a measured one (`attention_s`, `expert_s`, `rate_bytes_per_s`), for
    which the model runs as it is.
    """

    name: Annotated[PathPart, Option("--cluster", "Place", "CLUSTER")] = Field(
        default=LOCAL,
        description="Run on this machine as it is (local), or on a scale model of a cluster: a preset of "
        "`list clusters`, or a TOML file",
    )
    nodes: Annotated[int, Option("--nodes", "Place", "N", computed=True)] = Field(
        default=2, gt=0, description="Split the ranks over this many failure domains (default: 2; 1 with one GPU)"
    )
    ranks_per_node: Annotated[int, Option("--ranks-per-node", "Place", "K", computed=True)] = Field(
        default=1, gt=0, description="Start this many ranks on each node (default: 1; on CUDA one for each GPU)"
    )
    expert_parallel: Annotated[int | None, Option("--expert-parallel", "Place", "N", computed=True)] = Field(
        default=None,
        gt=0,
        description="Divide the experts of a layer among N ranks, and keep as many replicas of each as there are such "
        "groups (default: all ranks, or the most that divide them and hold an expert each)",
    )
    device: Annotated[Device, Option("--device", "Place")] = Field(
        default="auto", description="Train on this device; auto takes CUDA where there is any"
    )

    accelerator: str = Field(default="", description="Device of the cluster: v100, rtx3090, a100 or h100")
    flops_per_s: float | None = Field(
        default=None, gt=0, description="Peak of one device in flop/s, instead of `accelerator`"
    )
    devices_per_node: int = Field(default=1, gt=0, description="Devices in a node of the cluster")
    mfu: float = Field(default=0.4, gt=0, le=1, description="Part of the peak that training reaches")
    link_bytes_per_s: ByteRate | None = Field(
        default=None, gt=0, description="Line rate of a node of the cluster, each direction, as in 400Gbit"
    )
    link_efficiency: float = Field(default=0.6, gt=0, le=1, description="Part of the line rate that transfers reach")
    storage: str = Field(
        default="", description="Storage of the cluster: shared-20g, nvme-gen3, nvme-gen4 or nvme-gen4-x4"
    )
    storage_node_bytes_per_s: ByteRate | None = Field(
        default=None, gt=0, description="Rate at which one node writes to storage, instead of `storage`"
    )
    storage_total_bytes_per_s: ByteRate | None = Field(
        default=None, gt=0, description="Rate at which all nodes together write to storage"
    )

    rho: float | None = Field(
        default=None,
        gt=0,
        description="Transfer time of a checkpoint / idle time of an iteration; sets the tokens of an iteration",
    )
    rate_bytes_per_s: ByteRate | None = Field(
        default=None,
        gt=0,
        description="Rate of a node's link here, each direction (default: 80 Mbit/s; 40 for family gpt-moe)",
    )
    iteration_s: float = Field(
        default=2.5, gt=0, description="Seconds that an iteration takes here, without reduce and update"
    )
    moe_layers: int = Field(default=4, gt=0, description="MoE layers of the scale model")
    qos: bool = Field(default=False, description="Give links a low class below all other traffic (DSCP CS1)")
    links: Literal["auto", "namespaces", "user-namespaces", "paced"] = Field(
        default="auto", description="How links are emulated; auto takes the first way that this machine allows"
    )

    attention_s: float | None = Field(
        default=None, gt=0, description="Seconds of a measured attention, forward; backward takes twice as long"
    )
    expert_s: float | None = Field(
        default=None, gt=0, description="Seconds of the measured experts of a layer, forward, at a rank's mean load"
    )
    head_s: float = Field(default=0.0, ge=0, description="Seconds of the measured head, forward")

    @property
    def is_emulated(self) -> bool:
        return self.name != LOCAL

    @property
    def rate(self) -> BytesPerSecond:
        """Of a node's link here, once it is resolved."""
        assert self.rate_bytes_per_s is not None
        return self.rate_bytes_per_s

    @property
    def is_measured(self) -> bool:
        """Whether the durations of ops are given instead of computed from hardware."""
        return self.attention_s is not None and self.expert_s is not None

    def describe(self) -> str:
        """Returns where something runs, in one line: `2 nodes x 1 rank on cpu`."""
        where = f"a scale model of {self.name}" if self.is_emulated else self.device
        return f"{count_noun(self.nodes, 'node')} x {count_noun(self.ranks_per_node, 'rank')} on {where}"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.is_emulated:
            self._refuse(type(self).model_fields.keys() - FAILURE_DOMAINS, "name a cluster")
            return self
        check(self.nodes > 1, f"--cluster {self.name} emulates a network: it needs --nodes 2 or more")
        check(self.device != "cuda", f"--cluster {self.name} paces computing on the CPU: use --device cpu")
        has_flops = bool(self.accelerator) or self.flops_per_s is not None
        is_described = has_flops and self.link_bytes_per_s is not None
        check(
            self.is_measured or is_described,
            f"cluster {self.name} needs accelerator and link_bytes_per_s, or attention_s and expert_s",
        )
        if self.is_measured:
            self._refuse(HARDWARE, "its durations are given")
        else:
            self._refuse(MEASURED, "give both attention_s and expert_s, or neither")
        return self

    def _refuse(self, keys: Set[str], reason: str) -> None:
        """Raises ConfigError if one of these fields is set, since it would change nothing."""
        for key in sorted(keys):
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ConfigError(f"cluster.{key} means nothing on --cluster {self.name}: {reason}")


BACKWARD = 2
"""How much longer the backward of an op takes than its forward."""
MIN_GATE_FRAC = 0.5
"""Of attention and gate of an MoE layer together, what the gate gets at least: it is light on a device, but not here,
where it sorts and counts on the CPU. Their sum, which is the span a checkpoint can use, stays as modelled."""


class Pace(SettingsModel):
    """Modelled duration of each compute op of the scale model, forward; backward takes twice as long."""

    attention_s: Seconds
    gate_s: Seconds
    expert_s_per_row: Seconds
    """Of an MoE layer's experts, per row that this rank's experts receive."""
    shared_s: Seconds
    """Of an MoE layer's shared experts, whatever is routed."""
    dense_s: Seconds
    """Of the feed-forward block of a layer that is not MoE."""
    head_s: Seconds

    @property
    def moe_gate_s(self) -> Seconds:
        """Of the gate as it is paced."""
        return max(self.gate_s, MIN_GATE_FRAC * (self.attention_s + self.gate_s))

    @property
    def moe_attention_s(self) -> Seconds:
        """Of the attention of an MoE layer as it is paced."""
        return self.attention_s + self.gate_s - self.moe_gate_s


class IterationTimes(SettingsModel):
    """Seconds of one iteration on one node, at balanced expert loads."""

    compute_s: Seconds
    all_to_all_s: Seconds
    reduce_s: Seconds
    """All-reduce of the gradients of what every rank holds, in fp32."""
    checkpoint_s: Seconds
    """Transfer of the node's state to its peers, alone on the link."""

    @property
    def rho(self) -> float:
        """Checkpoint transfer time / idle span time: computing is when the link is idle."""
        return self.checkpoint_s / self.compute_s
