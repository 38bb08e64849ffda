"""The update: gradient reduction, clipping, AdamW with the state of what several ranks hold sharded over these ranks.

Tells which tensors of the training state each rank owns. Knows no checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from fairscale.optim import OSS
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW

from capricorn.config.scenario import TrainConfig
from capricorn.hooks import NO_LAYER, OpKey, TrainerHook
from capricorn.trainer.exchange import Network
from capricorn.trainer.moe import expert_ids_of, expert_key
from capricorn.units import MIB, Bytes

BUCKET_BYTES = 32 * MIB
REDUCE = OpKey(NO_LAYER, "backward", "reduce")


def learning_rate(train: TrainConfig, iteration: int) -> float:
    """Returns the rate of an iteration, from 1: linear warm-up to `lr`, then a cosine to `min_lr_frac` of it."""
    if iteration <= train.lr_warmup_iterations:
        return train.lr * iteration / train.lr_warmup_iterations
    after, length = iteration - train.lr_warmup_iterations, train.schedule_iterations - train.lr_warmup_iterations
    progress = min(1.0, after / max(1, length))
    return train.lr * (train.min_lr_frac + (1 - train.min_lr_frac) * 0.5 * (1 + math.cos(math.pi * progress)))


class Optimizer:
    """AdamW over a model, in two parts: dense parameters, which all ranks hold, and experts, which their replicas hold.

    What several ranks hold is in fairscale's OSS: each rank updates its share and gives it to the others. Experts
    without replicas are in an optimizer of this rank alone, and so are those whose state each replica is to keep whole.

    All state and all gradients exist from the start and stay where they are, so that buffers can be laid out before
    training. Dense gradients are views of one flat buffer that is reduced in place.

    Needs an initialised process group, also for one rank. Made after the model is on its device: OSS moves the dense
    parameters into buffers of its own.
    """

    def __init__(
        self,
        model: nn.Module,
        train: TrainConfig,
        network: Network | None = None,
        experts: Network | None = None,
        replicas: Network | None = None,
    ) -> None:
        """Makes all state.

        Args:
            model: on its device.
            train: the recipe.
            network: of all ranks; by default the default group.
            experts: of the ranks that share the experts; by default all.
            replicas: of the ranks that hold the same experts; by default there are no others.
        """
        self.train, self.network = train, network or Network(dist.group.WORLD)
        self._experts_network, self._replicas = experts or self.network, replicas or Network()
        self.world_size, self.rank = self.network.size, self.network.rank
        named = dict(model.named_parameters())
        every_name = dict(model.named_parameters(remove_duplicate=False))
        canonical = {param: name for name, param in named.items()}
        self._aliases = {name: canonical[p] for name, p in every_name.items() if canonical[p] != name}
        self._dense = {name: p for name, p in named.items() if expert_ids_of(p) is None}
        self._experts = {name: p for name, p in named.items() if expert_ids_of(p) is not None}

        settings: dict[str, Any] = {"lr": train.lr, "betas": (train.beta1, train.beta2), "fused": True}
        self.oss = OSS(_groups(self._dense, train), optim=AdamW, group=self.network.group, **settings)
        self.expert_oss = self._shard_experts(settings)
        self.local = self.expert_oss.optim if self.expert_oss else AdamW(_groups(self._experts, train), **settings)
        for adamw in (self.oss.optim, self.local):
            _materialise(adamw)
        self.dense_owner = _owners(self._dense, self.oss.partition_parameters())
        self.expert_owner = self._find_expert_owners()
        self._flat_grad = _flatten_grads(list(self._dense.values()))
        for param in self._experts.values():
            param.grad = torch.zeros_like(param)

    def _shard_experts(self, settings: dict[str, Any]) -> OSS | None:
        """Returns what updates the experts with their replicas; None where this rank does so alone."""
        if self._replicas.size == 1 or self.train.expert_optimizer == "replicated":
            return None
        return OSS(_groups(self._experts, self.train), optim=AdamW, group=self._replicas.group, **settings)

    def _find_expert_owners(self) -> dict[str, int]:
        """Returns the replica to whose state each expert parameter belongs, by its place among the replicas."""
        if self.expert_oss is not None:
            return _owners(self._experts, self.expert_oss.partition_parameters())
        largest_first = sorted(self._experts, key=lambda name: self._experts[name].numel(), reverse=True)
        return {name: index % self._replicas.size for index, name in enumerate(largest_first)}

    def follow_networks(self) -> None:
        """Takes the groups that the networks have now, or none."""
        self.oss.group = self.network.group
        if self.expert_oss is not None:
            self.expert_oss.group = self._replicas.group

    def zero_grad(self) -> None:
        """Zeroes all gradients in place."""
        self._flat_grad.zero_()
        for grad in self._expert_grads():
            grad.zero_()

    def reduce(self, hook: TrainerHook | None) -> None:
        """Makes each gradient that of the mean of all ranks' losses; one op, collective."""
        start = self._flat_grad.data_ptr()
        stop = start + self._flat_grad.nbytes
        # A gradient set to None in between would be a new tensor, and silently stay unreduced.
        assert all(p.grad is not None and start <= p.grad.data_ptr() < stop for p in self._dense.values())
        assert all(p.grad is not None for p in self._experts.values())
        if hook is not None:
            hook.on_op_begin(REDUCE)
        if self.world_size > 1:
            for bucket in torch.split(self._flat_grad, BUCKET_BYTES // self._flat_grad.element_size()):
                self.network.all_reduce(bucket)
            if self._replicas.size > 1:
                for grad in self._expert_grads():
                    self._replicas.all_reduce(grad)
            for grad in (self._flat_grad, *self._expert_grads()):
                grad.div_(self.world_size)
        if hook is not None:
            hook.on_op_end(REDUCE)

    def clip(self) -> Tensor:
        """Scales all gradients to a norm of at most `clip_norm`; returns the norm before, over all parameters.

        Collective. Counts dense gradients once and each expert's once; so it must follow `reduce`.
        """
        squares = get_total_norm(self._expert_grads()).square()
        if self._experts_network.size > 1:
            dist.all_reduce(squares, group=self._experts_network.group)
        norm = (get_total_norm([self._flat_grad]).square() + squares).sqrt()
        clip_grads_with_norm_([*self._dense.values(), *self._experts.values()], self.train.clip_norm, norm)
        return norm

    def _expert_grads(self) -> list[Tensor]:
        return [p.grad for p in self._experts.values() if p.grad is not None]

    def set_lr(self, iteration: int) -> float:
        """Sets and returns the learning rate of that iteration."""
        lr = learning_rate(self.train, iteration)
        for group in (*self.oss.param_groups, *(self.expert_oss or self.local).param_groups):
            group["lr"] = lr
        return lr

    def step(self) -> None:
        """Updates the owned parameters, and gives them to the other ranks that hold them; collective."""
        if self.expert_oss is None:
            self.local.step()
        else:
            self._replicas.pace_broadcasts(_num_bytes(self._experts))
            self.expert_oss.step()
        self.network.pace_broadcasts(_num_bytes(self._dense))
        self.oss.step()

    def owned_tensors(self) -> dict[str, Tensor]:
        """Returns the live tensors this rank owns, by global name; over all ranks each part of the state occurs once.

        `param/`, `exp_avg/` and `exp_avg_sq/` name a dense parameter or one expert's slice of one, `step/` a count of
        updates. Slices of one stacked tensor follow each other, and so do dense parameters as they lie in memory.
        """
        experts = [item for item in self._experts.items() if self.expert_owner[item[0]] == self._replicas.rank]
        dense = [item for item in self._dense.items() if self.dense_owner[item[0]] == self.rank]
        dense.sort(key=lambda item: item[1].storage_offset())
        state = {**self.local.state, **self.oss.optim.state}
        owned: dict[str, Tensor] = {}
        for kind in ("param", "exp_avg", "exp_avg_sq"):
            for name, param in experts + dense:
                tensor = param.detach() if kind == "param" else state[param][kind]
                owned |= {f"{kind}/{key}": part for key, part in _parts(name, param, tensor)}
        for name, param in experts + dense:
            owned[f"step/{_step_key(name, param)}"] = state[param]["step"]
        return owned

    def aliases(self) -> dict[str, str]:
        """Returns further names of tied parameters, each with the name it is owned under."""
        return dict(self._aliases)

    @torch.no_grad()
    def publish(self) -> None:
        """Gives what several ranks hold from its owner to the others, as after a restore; collective."""
        self.network.pace_broadcasts(_num_bytes(self._dense))
        for name, param in self._dense.items():
            dist.broadcast(param.data, group=self.network.group, group_src=self.dense_owner[name])
        if self._replicas.size == 1:
            return
        is_replicated = self.expert_oss is None
        self._replicas.pace_broadcasts(_num_bytes(self._experts) * (3 if is_replicated else 1))
        for name, param in self._experts.items():
            for tensor in (param.data, *(self.local.state[param].values() if is_replicated else ())):
                dist.broadcast(tensor, group=self._replicas.group, group_src=self.expert_owner[name])


def _owners(named: dict[str, nn.Parameter], partition: list[list[dict[str, Any]]]) -> dict[str, int]:
    """Returns the place in the group of the rank whose optimizer updates each parameter."""
    owner = {id(param): rank for rank, groups in enumerate(partition) for group in groups for param in group["params"]}
    return {name: owner[id(param)] for name, param in named.items()}


def _num_bytes(named: dict[str, nn.Parameter]) -> Bytes:
    return sum(param.nbytes for param in named.values())


def _groups(named: dict[str, nn.Parameter], train: TrainConfig) -> list[dict[str, Any]]:
    """Returns parameter groups with weight decay on matrices only, the largest first so that OSS balances ranks."""
    params = sorted(named.values(), key=Tensor.numel, reverse=True)
    decayed = [p for p in params if _is_matrix(p)]
    others = [p for p in params if not _is_matrix(p)]
    groups = [
        {"params": decayed, "weight_decay": train.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _is_matrix(param: Tensor) -> bool:
    return param.ndim - (expert_ids_of(param) is not None) >= 2


def _materialise(adamw: AdamW) -> None:
    """Creates the state that AdamW would create in its first step, in the same form."""
    for group in adamw.param_groups:
        for param in group["params"]:
            adamw.state[param] = {
                "step": torch.zeros((), dtype=torch.float32, device=param.device),
                "exp_avg": torch.zeros_like(param, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(param, memory_format=torch.preserve_format),
            }


def _flatten_grads(params: list[nn.Parameter]) -> Tensor:
    """Returns a zeroed buffer of which each parameter's gradient is made a view."""
    flat = torch.zeros(sum(map(Tensor.numel, params)), device=params[0].device)
    for param, grad in zip(params, torch.split(flat, [p.numel() for p in params]), strict=True):
        param.grad = grad.view_as(param)
    return flat


def _parts(name: str, param: Tensor, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensor by global name: whole if dense, else one slice an expert."""
    ids = expert_ids_of(param)
    if ids is None:
        yield name, tensor
        return
    for expert_id, part in zip(ids, tensor, strict=True):
        yield expert_key(name, expert_id), part


def _step_key(name: str, param: Tensor) -> str:
    """Returns a name that no other rank's stacked parameter has: `layers.0.moe.experts.w1@0-3`."""
    ids = expert_ids_of(param)
    return name if ids is None else f"{expert_key(name, ids.start)}@{ids.start}-{ids.stop - 1}"
