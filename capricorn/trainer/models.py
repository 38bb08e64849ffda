"""The model of a run: the class of its family, with weights that follow from the seed and global names alone."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from capricorn.config.scenario import ModelConfig
from capricorn.loads.forced_routing import ForcedRouting
from capricorn.trainer.decoder import mixtral
from capricorn.trainer.exchange import Network
from capricorn.trainer.moe import expert_ids_of, expert_key

INIT_STD = 0.02


def build_model(
    config: ModelConfig,
    rank: int,
    world_size: int,
    network: Network,
    device: torch.device | str,
    seed: int,
    forced_routing: ForcedRouting | None = None,
    everyone: Network | None = None,
) -> nn.Module:
    """Returns the model with the experts of `rank`; called as `model(tokens_BS, targets_BS, hook)` it yields the loss.

    The initial weights depend on the seed and the parameter's global name only: the dense ones are equal on all ranks,
    and a model on one rank starts equal to that on many.

    Args:
        config: its family chooses the class.
        rank: whose experts the model holds, in its expert-parallel group.
        world_size: number of ranks in that group.
        network: of that group; exchanges tokens.
        device: where parameters live; on `meta` they have no values.
        seed: of the initial weights.
        forced_routing: assigns the experts, in place of the router; not for family `gpt-moe`.
        everyone: of all ranks; by default the expert-parallel group is all ranks.

    Raises:
        ConfigError: the group has more ranks than there are experts.
    """
    with torch.device(device):
        if config.family == "gpt-moe":
            # fairscale is needed by this family only, and slow to import.
            from capricorn.trainer.gpt_moe import gpt_moe

            model: nn.Module = gpt_moe(config, rank, world_size, network, everyone or network)
        else:
            model = mixtral(config, rank, world_size, network, forced_routing, everyone or network)
    if torch.device(device).type != "meta":
        init_parameters(model, seed)
    return model


@torch.no_grad()
def init_parameters(model: nn.Module, seed: int) -> None:
    """Fills each parameter from a generator seeded by its global name: matrices normal, biases 0, norms 1."""
    for name, param in model.named_parameters():
        ids = expert_ids_of(param)
        if ids is None:
            _init_tensor(param, name, seed)
            continue
        for index, expert_id in enumerate(ids):
            _init_tensor(param[index], expert_key(name, expert_id), seed)


def _init_tensor(tensor: Tensor, name: str, seed: int) -> None:
    if tensor.ndim < 2:
        tensor.fill_(1.0 if name.endswith("weight") else 0.0)
        return
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    generator = torch.Generator(tensor.device).manual_seed(int.from_bytes(digest, "little"))
    tensor.normal_(0.0, INIT_STD, generator=generator)
