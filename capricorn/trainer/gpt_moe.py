"""Family `gpt-moe`: the GPT-2 block with fairscale's capacity-bound Top2Gate and MOELayer.

Each expert takes a fixed number of rows, what overflows is dropped, and the all-to-all is padded: its cost shows no
expert load, unlike that of the dropless family. fairscale is used as it is; only its layer's forward is written anew,
to place the hooks.

Shapes: B sequences, S positions, T = B*S tokens, D hidden, F ffn, E experts, L experts of this rank, W ranks,
C = 2T/E rows an expert takes from a rank, N = E*C.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from fairscale.nn.moe import MOELayer, Top2Gate
from torch import Tensor, nn
from torch.nn.functional import gelu, linear

from capricorn.config.scenario import ModelConfig
from capricorn.hooks import TrainerHook
from capricorn.topology import expert_split
from capricorn.trainer.decoder import Attention, Block, Decoder
from capricorn.trainer.exchange import Network
from capricorn.trainer.moe import expert_parameter
from capricorn.trainer.ops import all_to_all, run_op


class GeluExpert(nn.Module):
    """One expert, w2 gelu(w1 x + b1) + b2; its parameters are stacks of one, to carry the global id in dim 0."""

    def __init__(self, hidden: int, ffn: int, expert_id: int) -> None:
        super().__init__()
        ids = range(expert_id, expert_id + 1)
        self.w1, self.b1 = expert_parameter(ids, ffn, hidden), expert_parameter(ids, ffn)
        self.w2, self.b2 = expert_parameter(ids, hidden, ffn), expert_parameter(ids, hidden)

    def forward(self, x_WLCD: Tensor) -> Tensor:
        return linear(gelu(linear(x_WLCD, self.w1[0], self.b1[0])), self.w2[0], self.b2[0])


class HookedMoE(MOELayer):  # type: ignore[misc]
    """fairscale's MOELayer with its norm, as ops that a hook hears.

    Needs an initialised process group, tokens that divide by the number of experts, and experts that divide by ranks.
    """

    def __init__(
        self, config: ModelConfig, layer: int, rank: int, world_size: int, network: Network, everyone: Network
    ) -> None:
        """Makes the layer with the experts of one rank.

        Args:
            config: of the model.
            layer: its number, from 0.
            rank: whose experts it holds, in its expert-parallel group.
            world_size: number of ranks in that group.
            network: of that group; exchanges tokens.
            everyone: of all ranks.
        """
        ids = expert_split(config.num_experts, world_size)[rank]
        experts = nn.ModuleList(GeluExpert(config.hidden, config.ffn, expert_id) for expert_id in ids)
        super().__init__(Top2Gate(config.hidden, config.num_experts), experts, network.group)
        self.layer, self.num_experts = layer, config.num_experts
        self.network, self.everyone = network, everyone
        self.norm = nn.LayerNorm(config.hidden)

    def forward(self, x_TD: Tensor, hook: TrainerHook | None) -> tuple[Tensor, Tensor]:
        """Returns what the experts add to the tokens [T, D], and the balance loss, 1 when experts are loaded
        alike.

        Source: fairscale 0.4.13, MOELayer.forward; GShard, algorithm 2.
        """
        rows_ND, weights_TEC, balance, counts_E = run_op(hook, self.layer, "gate", self._route, x_TD)
        if hook is not None:
            counts_GWE = self.everyone.gather(counts_E).view(-1, self.network.size, self.num_experts)
            hook.on_routed(self.layer, counts_GWE.sum(1).flatten().tolist())
        splits = [len(rows_ND) // self.world_size] * self.world_size
        rows_ND = all_to_all(rows_ND, splits, splits, self.network, hook, self.layer, "dispatch")
        rows_ND = run_op(hook, self.layer, "expert", self._compute, rows_ND)
        rows_ND = all_to_all(rows_ND, splits, splits, self.network, hook, self.layer, "combine")
        return torch.einsum("tec,ecd->td", weights_TEC, rows_ND.view(*weights_TEC.shape[1:], -1)), balance

    def _route(self, x_TD: Tensor) -> tuple[Tensor, ...]:
        """Returns rows by expert, weights for the way back, balance loss, rows kept per expert."""
        h_TD = self.norm(x_TD)
        balance, weights_TEC, kept_TEC = self.gate(h_TD)
        rows_ECD = torch.einsum("tec,td->ecd", kept_TEC.to(h_TD.dtype), h_TD)
        # fairscale divides twice by the number of experts, Switch Transformer's balance loss multiplies once.
        return rows_ECD.flatten(0, 1), weights_TEC, balance * self.num_experts**2, kept_TEC.sum((0, 2))

    def _compute(self, rows_ND: Tensor) -> Tensor:
        rows_WLCD = rows_ND.view(self.world_size, self.num_local_experts, -1, rows_ND.shape[-1])
        outputs = [expert(x) for x, expert in zip(torch.split(rows_WLCD, 1, dim=1), self.experts, strict=True)]
        return torch.cat(outputs, dim=1).view_as(rows_ND)


class GptDecoder(Decoder):
    """A decoder whose positions are learned."""

    def __init__(self, config: ModelConfig, blocks: Iterable[Block], norm: nn.Module) -> None:
        super().__init__(config, blocks, norm)
        self.position = nn.Embedding(config.seq_len, config.hidden)

    def embed(self, tokens_BS: Tensor) -> Tensor:
        return super().embed(tokens_BS) + self.position.weight[: tokens_BS.shape[1]]


def gpt_moe(config: ModelConfig, rank: int, world_size: int, network: Network, everyone: Network) -> Decoder:
    """Makes a model of family `gpt-moe`: GPT-2 with LayerNorm, learned positions, biases, and MoE in some layers.

    Args:
        config: of the model.
        rank: whose experts it holds, in its expert-parallel group.
        world_size: number of ranks in that group.
        network: of that group; exchanges tokens.
        everyone: of all ranks.
    """
    hidden, ffn = config.hidden, config.ffn

    def block(layer: int) -> Block:
        attention = nn.Sequential(nn.LayerNorm(hidden), Attention(config, bias=True, rope=False))
        if config.is_moe(layer):
            return Block(layer, attention, moe=HookedMoE(config, layer, rank, world_size, network, everyone))
        mlp = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, ffn), nn.GELU(), nn.Linear(ffn, hidden))
        return Block(layer, attention, mlp=mlp)

    return GptDecoder(config, map(block, range(config.num_layers)), nn.LayerNorm(hidden))
