"""The dropless MoE block: router, dispatch, experts of this rank, combine. Knows neither attention nor the optimizer.

Shapes: T tokens of this rank, D hidden, F ffn, E experts, L experts of this rank, K top_k, G expert-parallel groups of
W ranks each, A = T*K assignments of this rank, R rows this rank's experts receive.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from capricorn.config.scenario import ModelConfig
from capricorn.hooks import TrainerHook
from capricorn.loads.forced_routing import ForcedRouting
from capricorn.topology import expert_split
from capricorn.trainer.exchange import Network
from capricorn.trainer.ops import all_to_all, permute, run_op, sort_order, spread

NORM_EPS = 1e-6


def expert_parameter(expert_ids: range, *shape: int) -> nn.Parameter:
    """Returns a parameter of several experts, stacked in dim 0; its attribute `expert_ids` gives their global ids."""
    param = nn.Parameter(torch.empty(len(expert_ids), *shape))
    param.expert_ids = expert_ids  # type: ignore[attr-defined]
    return param


def expert_ids_of(param: Tensor) -> range | None:
    """Returns the global ids along dim 0, or None for a dense parameter."""
    return getattr(param, "expert_ids", None)


def expert_key(name: str, expert_id: int) -> str:
    """Returns the global name of one expert's slice: `layers.0.moe.experts.w1`, 5 -> `layers.0.moe.experts.5.w1`.

    An index after `experts` is a local one, as fairscale numbers them, and is replaced.
    """
    return re.sub(r"\.experts\.(\d+\.)?", f".experts.{expert_id}.", name)


class SwiGLU(nn.Module):
    """A dense feed-forward block: w2(silu(w1 x) * w3 x)."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, ffn, bias=False)
        self.w2 = nn.Linear(ffn, hidden, bias=False)
        self.w3 = nn.Linear(hidden, ffn, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        y_TD: Tensor = self.w2(silu(self.w1(x_TD)) * self.w3(x_TD))
        return y_TD


class Experts(nn.Module):
    """The SwiGLU experts this rank holds."""

    def __init__(self, hidden: int, ffn: int, expert_ids: range) -> None:
        super().__init__()
        self.w1 = expert_parameter(expert_ids, ffn, hidden)
        self.w2 = expert_parameter(expert_ids, hidden, ffn)
        self.w3 = expert_parameter(expert_ids, ffn, hidden)

    def forward(self, rows_RD: Tensor, rows_per_expert: list[int]) -> Tensor:
        """Returns each expert's rows passed through it; an expert without rows still gets a gradient, of zeros."""
        weights = zip(torch.split(rows_RD, rows_per_expert), self.w1, self.w2, self.w3, strict=True)
        return torch.cat([linear(silu(linear(x, w1)) * linear(x, w3), w2) for x, w1, w2, w3 in weights])


class MoE(nn.Module):
    """Norm, router, routed and shared experts of one layer.

    Forced routing overrules the router's choice of experts, not its weights, so that the loss stays a real one. The
    router takes the top-k of a softmax in fp32 and renormalises it. The balance loss is Switch Transformer's, with the
    fractions of tokens taken over all ranks, so that it does not depend on how a batch is split over ranks. Departs:
    models that route otherwise (DeepSeek-V3 by biased sigmoids) are routed this way too.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        rank: int,
        world_size: int,
        network: Network,
        forced_routing: ForcedRouting | None = None,
        everyone: Network | None = None,
    ) -> None:
        """Makes the layer with the experts of one rank.

        Args:
            config: of the model.
            layer: its number, from 0.
            rank: whose experts it holds, in its expert-parallel group.
            world_size: number of ranks in that group.
            network: of that group; exchanges tokens.
            forced_routing: assigns the experts in place of the router; None leaves it to the router.
            everyone: of all ranks; by default the expert-parallel group is all ranks.
        """
        super().__init__()
        self.layer, self.rank, self.top_k = layer, rank, config.top_k
        self.network, self.everyone, self.forced_routing = network, everyone or network, forced_routing
        self.split = expert_split(config.num_experts, world_size)
        self.norm = nn.RMSNorm(config.hidden, eps=NORM_EPS)
        self.gate = nn.Linear(config.hidden, config.num_experts, bias=False)
        self.experts = Experts(config.hidden, config.ffn, self.split[rank])
        shared = config.num_shared_experts
        self.shared = SwiGLU(config.hidden, shared * config.ffn) if shared else None

    def forward(self, x_TD: Tensor, hook: TrainerHook | None) -> tuple[Tensor, Tensor]:
        """Returns what the experts add to the tokens [T, D], and the balance loss, 1 if experts are loaded alike."""
        h_TD, rows_AD, weights_TK, probs_E, counts_E, order_A, inverse_A = run_op(
            hook, self.layer, "gate", self._route, x_TD
        )
        counts_GWE = self.everyone.gather(counts_E).view(-1, len(self.split), len(counts_E))
        loads_GE = counts_GWE.sum(1)
        total_E = loads_GE.sum(0)
        if hook is not None:
            hook.on_routed(self.layer, loads_GE.flatten().tolist())
        counts = counts_GWE[self.everyone.rank // len(self.split)].tolist()
        mine = self.split[self.rank]
        received = [row[mine.start : mine.stop] for row in counts]
        send = [sum(counts[self.rank][ids.start : ids.stop]) for ids in self.split]
        receive = [sum(row) for row in received]

        rows_RD = all_to_all(rows_AD, send, receive, self.network, hook, self.layer, "dispatch")
        outputs = run_op(hook, self.layer, "expert", lambda rows, h: self._compute(rows, h, received), rows_RD, h_TD)
        rows_AD = all_to_all(outputs[0], receive, send, self.network, hook, self.layer, "combine")

        rows_TKD = permute(rows_AD, inverse_A, order_A).view(*weights_TK.shape, -1)
        y_TD = sum(outputs[1:], (weights_TK.unsqueeze(-1) * rows_TKD).sum(1))
        frac_E = total_E / total_E.sum()
        return y_TD, len(frac_E) * (frac_E * probs_E).sum()

    def _route(self, x_TD: Tensor) -> tuple[Tensor, ...]:
        """Returns normed tokens, their copies by expert, weights, mean probabilities, counts, order and its inverse."""
        h_TD = self.norm(x_TD)
        probs_TE = self.gate(h_TD).float().softmax(-1)
        experts_TK = self._choose(probs_TE)
        weights_TK = probs_TE.gather(-1, experts_TK)
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        order_A, inverse_A = sort_order(experts_TK.flatten())
        counts_E = torch.bincount(experts_TK.flatten(), minlength=probs_TE.shape[1])
        if torch.is_autocast_enabled(h_TD.device.type):
            # Real systems send rows in the precision the experts compute in.
            h_TD = h_TD.to(torch.get_autocast_dtype(h_TD.device.type))
        rows_AD = spread(h_TD, self.top_k, order_A, inverse_A)
        return h_TD, rows_AD, weights_TK, probs_TE.mean(0), counts_E, order_A, inverse_A

    def _choose(self, probs_TE: Tensor) -> Tensor:
        """Returns the experts [T, K] of each token: the likeliest, or those that forced routing assigns."""
        if self.forced_routing is None:
            return torch.topk(probs_TE, self.top_k, dim=-1).indices
        return self.forced_routing.assign_experts(self.layer, len(probs_TE)).to(probs_TE.device)

    def _compute(self, rows_RD: Tensor, h_TD: Tensor, received: list[list[int]]) -> tuple[Tensor, ...]:
        """Returns the rows passed through the routed experts and, if any, the tokens passed through the shared ones.

        Rows come by sender and then expert; `received` [W][L] says how many of each.
        """
        rows_WL = torch.tensor(received, device=rows_RD.device)
        expert_WL = torch.arange(rows_WL.shape[1], device=rows_RD.device).expand_as(rows_WL)
        expert_R = expert_WL.flatten().repeat_interleave(rows_WL.flatten())
        order_R, inverse_R = sort_order(expert_R)
        rows_per_expert = [sum(column) for column in zip(*received, strict=True)]
        outputs_RD = self.experts(permute(rows_RD, order_R, inverse_R), rows_per_expert)
        outputs_RD = permute(outputs_RD, inverse_R, order_R)
        return (outputs_RD,) if self.shared is None else (outputs_RD, self.shared(h_TD))
