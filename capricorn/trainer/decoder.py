"""The decoder-only models: attention, blocks, head. Knows neither optimizer nor processes.

Shapes: B sequences, S positions, T = B*S tokens, D hidden, H heads, G key-value heads, d head dim, r rope dim,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from capricorn.config.scenario import ModelConfig
from capricorn.hooks import NO_LAYER, TrainerHook
from capricorn.loads.forced_routing import ForcedRouting
from capricorn.sizing.memory import MLA_KV_RANK, MLA_Q_RANK, MLA_ROPE_DIM
from capricorn.trainer.exchange import Network
from capricorn.trainer.moe import NORM_EPS, MoE, SwiGLU
from capricorn.trainer.ops import run_op

ROPE_BASE = 10000.0


def rope_table(seq_len: int, rope_dim: int) -> Tensor:
    """Returns cosines and sines [2, S, r/2] of the rotary position embedding."""
    freq_r = ROPE_BASE ** (-torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim)
    angle_Sr = torch.arange(seq_len, dtype=torch.float32).unsqueeze(1) * freq_r
    return torch.stack([angle_Sr.cos(), angle_Sr.sin()])


def rotate(x_BHSr: Tensor, rope_2Sr: Tensor) -> Tensor:
    """Returns the vectors, each pair (i, i + r/2) turned by its position's angle."""
    cos_Sr, sin_Sr = rope_2Sr[:, : x_BHSr.shape[-2]]
    a, b = x_BHSr.chunk(2, dim=-1)
    return torch.cat([a * cos_Sr - b * sin_Sr, b * cos_Sr + a * sin_Sr], dim=-1).type_as(x_BHSr)


def split_heads(x_BSD: Tensor, num_heads: int) -> Tensor:
    """Returns the heads that lie side by side in the last dim as [B, H, S, d]."""
    batch, positions, width = x_BSD.shape
    return x_BSD.view(batch, positions, num_heads, width // num_heads).transpose(1, 2)


class Attention(nn.Module):
    """Causal grouped-query attention, its positions by RoPE unless `rope` is false."""

    rope: Tensor | None

    def __init__(self, config: ModelConfig, *, bias: bool = False, rope: bool = True) -> None:
        super().__init__()
        self.heads = config.num_heads, config.num_kv_heads, config.num_kv_heads
        self.widths = [config.head_dim * n for n in self.heads]
        self.qkv = nn.Linear(config.hidden, sum(self.widths), bias=bias)
        self.out = nn.Linear(self.widths[0], config.hidden, bias=bias)
        table = rope_table(config.seq_len, config.head_dim) if rope else None
        self.register_buffer("rope", table, persistent=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        parts = torch.split(self.qkv(x_BSD), self.widths, dim=-1)
        q_BHSd, k_BGSd, v_BGSd = (split_heads(part, n) for part, n in zip(parts, self.heads, strict=True))
        if self.rope is not None:
            q_BHSd, k_BGSd = rotate(q_BHSd, self.rope), rotate(k_BGSd, self.rope)
        grouped = self.heads[0] != self.heads[1]
        y_BHSd = scaled_dot_product_attention(q_BHSd, k_BGSd, v_BGSd, is_causal=True, enable_gqa=grouped)
        y_BSD: Tensor = self.out(y_BHSd.transpose(1, 2).flatten(2))
        return y_BSD


class LatentAttention(nn.Module):
    """Multi-head latent attention: queries, keys and values through low-rank latents, one rotary key for all heads.

    Source: DeepSeek-V3, section 2.1.1; widths of section 4.2.
    """

    rope: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.q_down = nn.Linear(config.hidden, MLA_Q_RANK, bias=False)
        self.q_norm = nn.RMSNorm(MLA_Q_RANK, eps=NORM_EPS)
        self.q_up = nn.Linear(MLA_Q_RANK, config.num_heads * (config.head_dim + MLA_ROPE_DIM), bias=False)
        self.kv_down = nn.Linear(config.hidden, MLA_KV_RANK + MLA_ROPE_DIM, bias=False)
        self.kv_norm = nn.RMSNorm(MLA_KV_RANK, eps=NORM_EPS)
        self.kv_up = nn.Linear(MLA_KV_RANK, config.num_heads * 2 * config.head_dim, bias=False)
        self.out = nn.Linear(config.num_heads * config.head_dim, config.hidden, bias=False)
        self.register_buffer("rope", rope_table(config.seq_len, MLA_ROPE_DIM), persistent=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        q_BHSd = split_heads(self.q_up(self.q_norm(self.q_down(x_BSD))), self.num_heads)
        latent_BSd, key_BSr = torch.split(self.kv_down(x_BSD), [MLA_KV_RANK, MLA_ROPE_DIM], dim=-1)
        k_BHSd, v_BHSd = split_heads(self.kv_up(self.kv_norm(latent_BSd)), self.num_heads).chunk(2, dim=-1)
        q_BHSd, query_BHSr = torch.split(q_BHSd, [self.head_dim, MLA_ROPE_DIM], dim=-1)
        key_BHSr = rotate(key_BSr.unsqueeze(1), self.rope).expand(-1, self.num_heads, -1, -1)
        q_BHSd = torch.cat([q_BHSd, rotate(query_BHSr, self.rope)], dim=-1)
        k_BHSd = torch.cat([k_BHSd, key_BHSr], dim=-1)
        y_BHSd = scaled_dot_product_attention(q_BHSd, k_BHSd, v_BHSd, is_causal=True)
        y_BSD: Tensor = self.out(y_BHSd.transpose(1, 2).flatten(2))
        return y_BSD


class Block(nn.Module):
    """One layer: attention, then `moe` or else `mlp`, each normed and on a residual branch."""

    def __init__(
        self, layer: int, attention: nn.Module, *, moe: nn.Module | None = None, mlp: nn.Module | None = None
    ) -> None:
        """Puts a layer together.

        Args:
            layer: its number, from 0.
            attention: with its norm, without the residual branch.
            moe: the MoE block, if it is an MoE layer.
            mlp: the dense feed-forward block with its norm, if it is not.
        """
        super().__init__()
        self.layer, self.attention, self.moe, self.mlp = layer, attention, moe, mlp

    def forward(self, x_BSD: Tensor, hook: TrainerHook | None) -> tuple[Tensor, Tensor | None]:
        """Returns the tokens after the layer, and its balance loss if it is MoE."""
        x_BSD = run_op(hook, self.layer, "attention", lambda x: x + self.attention(x), x_BSD)
        if self.moe is not None:
            y_TD, balance = self.moe(x_BSD.flatten(0, 1), hook)
            return x_BSD + y_TD.view_as(x_BSD), balance
        assert self.mlp is not None
        mlp = self.mlp
        return run_op(hook, self.layer, "expert", lambda x: x + mlp(x), x_BSD), None


class Decoder(nn.Module):
    """Embedding, blocks, norm and head, tied to the embedding if the config says so; yields the loss."""

    def __init__(self, config: ModelConfig, blocks: Iterable[Block], norm: nn.Module) -> None:
        super().__init__()
        self.balance_weight = config.balance_loss
        self.embedding = nn.Embedding(config.vocab_size, config.hidden)
        self.layers = nn.ModuleList(blocks)
        self.norm = norm
        self.head = nn.Linear(config.hidden, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def embed(self, tokens_BS: Tensor) -> Tensor:
        x_BSD: Tensor = self.embedding(tokens_BS)
        return x_BSD

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor, hook: TrainerHook | None = None) -> Tensor:
        """Returns the mean cross entropy over this rank's tokens plus the weighted balance losses: a scalar in fp32."""
        x_BSD, balances = self.embed(tokens_BS), []
        for block in self.layers:
            x_BSD, balance = block(x_BSD, hook)
            balances += [] if balance is None else [balance]
        loss = run_op(hook, NO_LAYER, "head", lambda x: self._loss(x, targets_BS), x_BSD)
        return loss + self.balance_weight * torch.stack(balances).sum() if self.balance_weight else loss

    def _loss(self, x_BSD: Tensor, targets_BS: Tensor) -> Tensor:
        logits_TV = self.head(self.norm(x_BSD)).flatten(0, 1).float()
        return cross_entropy(logits_TV, targets_BS.flatten())


def mixtral(
    config: ModelConfig,
    rank: int,
    world_size: int,
    network: Network,
    forced_routing: ForcedRouting | None,
    everyone: Network,
) -> Decoder:
    """Makes a model of family `mixtral`: RMSNorm, RoPE, grouped-query or latent attention, SwiGLU, dropless routing.

    Args:
        config: of the model.
        rank: whose experts it holds, in its expert-parallel group.
        world_size: number of ranks in that group.
        network: of that group; exchanges tokens.
        forced_routing: assigns the experts in place of the router; None leaves it to the router.
        everyone: of all ranks.
    """

    def norm() -> nn.Module:
        return nn.RMSNorm(config.hidden, eps=NORM_EPS)

    def block(layer: int) -> Block:
        core = LatentAttention(config) if config.attention == "mla" else Attention(config)
        attention = nn.Sequential(norm(), core)
        if config.is_moe(layer):
            return Block(layer, attention, moe=MoE(config, layer, rank, world_size, network, forced_routing, everyone))
        return Block(layer, attention, mlp=nn.Sequential(norm(), SwiGLU(config.hidden, config.dense_ffn)))

    return Decoder(config, map(block, range(config.num_layers)), norm())
