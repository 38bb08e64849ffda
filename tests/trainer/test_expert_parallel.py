"""Shapes of expert-parallel groups and replicas: the same training, each byte of its state owned by one rank."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from capricorn.config.resolve import load_model
from capricorn.config.scenario import ModelConfig, TrainConfig
from capricorn.hooks import OpKey, TrainerHook
from capricorn.topology import Topology
from capricorn.trainer.exchange import Networks
from capricorn.trainer.models import build_model
from capricorn.trainer.moe import expert_ids_of
from capricorn.trainer.optimizer import Optimizer
from tests.support.spawn import run_ranks
from tests.trainer.test_optimizer import iterate, merged

NUM_RANKS, ITERATIONS = 4, 3
ROUNDING = 2e-6
"""Relative. Gradients are summed over other parts, so their last bits differ."""
Kept = Literal["sharded", "replicated"]


class Loads(TrainerHook):
    """Hears what routers choose."""

    def __init__(self) -> None:
        self.heard: list[list[int]] = []

    def on_routed(self, layer: int, tokens_per_expert: Any) -> None:
        self.heard.append(list(tokens_per_expert))

    def on_op_begin(self, op: OpKey) -> None:
        assert op.kind != "combine" or self.heard


def batch_of(config: ModelConfig, rank: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (2 * num_ranks, config.seq_len + 1), generator=generator)
    mine = tokens.chunk(num_ranks)[rank]
    return mine[:, :-1], mine[:, 1:]


def train(rank: int, num_ranks: int, name: str, expert_parallel: int, kept: Kept) -> dict[str, Any]:
    config, recipe = load_model(name), TrainConfig(lr_warmup_iterations=2, expert_optimizer=kept)
    torch.manual_seed(rank)
    nets = Networks(Topology(num_ranks, 1, expert_parallel), rank)
    model = build_model(config, nets.experts.rank, nets.experts.size, nets.experts, "cpu", 0, None, nets.everyone)
    optimizer = Optimizer(model, recipe, nets.everyone, nets.experts, nets.replicas)
    figures = iterate(model, optimizer, batch_of(config, rank, num_ranks), ITERATIONS)
    loads = Loads()
    model(*batch_of(config, rank, num_ranks), loads)
    trained = {name: param.detach().clone() for name, param in model.named_parameters()}
    owned = {name: tensor.clone() for name, tensor in optimizer.owned_tensors().items()}
    with torch.no_grad():  # what is not owned comes back from its owner
        kept_here = {tensor.data_ptr() for tensor in optimizer.owned_tensors().values()}
        for param in model.parameters():
            for part in param if expert_ids_of(param) is not None else [param]:
                if part.data_ptr() not in kept_here:
                    part.fill_(7.0)
    optimizer.publish()
    wrong = [name for name, param in model.named_parameters() if not torch.equal(param, trained[name])]
    dist.barrier()
    return {"losses": figures[:ITERATIONS], "norms": figures[ITERATIONS:], "owned": owned, "wrong": wrong,
            "loads": loads.heard, "shares": [ids for p in model.parameters() if (ids := expert_ids_of(p))][:1],
            "trained": trained}  # fmt: skip


@cache
def trained(name: str, expert_parallel: int, kept: Kept = "sharded") -> list[dict[str, Any]]:
    return run_ranks(train, NUM_RANKS, name, expert_parallel, kept)


SHAPES = [
    ("mixtral-tiny", 2, "sharded"), ("mixtral-tiny", 2, "replicated"), ("mixtral-tiny", 1, "sharded"),
    ("gpt-moe-tiny", 2, "sharded"), ("gpt-moe-tiny", 1, "replicated"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "expert_parallel", "kept"), SHAPES)
def test_losses_norms_and_state_are_those_of_one_expert_parallel_group(
    name: str, expert_parallel: int, kept: Kept
) -> None:
    reference, results = trained(name, NUM_RANKS), trained(name, expert_parallel, kept)
    for one, other in zip(reference, results, strict=True):
        assert other["losses"] == pytest.approx(one["losses"], rel=ROUNDING)
        assert other["norms"] == pytest.approx(one["norms"], rel=1e-4)
    assert len({tuple(result["norms"]) for result in results}) == 1
    expected, actual = merged(reference), merged(results)
    expected, actual = ({k: v for k, v in each.items() if not k.startswith("step/")} for each in (expected, actual))
    assert actual.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(actual[key], tensor, rtol=1e-2, atol=1e-5, msg=key)


@pytest.mark.parametrize(("name", "expert_parallel", "kept"), SHAPES)
def test_each_part_of_the_state_has_one_owner_and_the_others_get_it_back(
    name: str, expert_parallel: int, kept: Kept
) -> None:
    results = trained(name, expert_parallel, kept)
    owners = Counter(key for result in results for key in result["owned"])
    assert set(owners.values()) == {1}
    assert [result["wrong"] for result in results] == [[]] * NUM_RANKS
    sizes = [sum(tensor.nbytes for tensor in result["owned"].values()) for result in results]
    assert max(sizes) < 2 * min(sizes), "replicas divide the experts among them by whole matrices, here six"


@pytest.mark.parametrize(("name", "expert_parallel", "kept"), SHAPES)
def test_replicas_have_the_same_experts_bit_for_bit(name: str, expert_parallel: int, kept: Kept) -> None:
    results = trained(name, expert_parallel, kept)
    for rank, result in enumerate(results):
        replica = results[rank % expert_parallel]
        assert result["shares"] == replica["shares"]
        assert all(torch.equal(tensor, replica["trained"][key]) for key, tensor in result["trained"].items())


@pytest.mark.parametrize("name", ["mixtral-tiny", "gpt-moe-tiny"])
def test_loads_come_by_group_and_say_in_sum_what_those_of_one_group_say(name: str) -> None:
    one, two = trained(name, NUM_RANKS)[0]["loads"], trained(name, 2)
    assert all(result["loads"] == two[0]["loads"] for result in two)
    for loads, expected in zip(two[0]["loads"], one, strict=True):
        assert len(loads) == 2 * len(expected)
        summed = [a + b for a, b in zip(loads[: len(expected)], loads[len(expected) :], strict=True)]
        # A near tie of the router may tip over.
        assert sum(abs(a - b) for a, b in zip(summed, expected, strict=True)) <= 0.02 * sum(expected)


def rejoin(rank: int, num_ranks: int, folder: str) -> list[tuple[int, ...]]:
    """Sums ranks over each group, leaves them, meets the others again, and sums once more."""
    nets, sums = Networks(Topology(num_ranks, 1, 2), rank), []
    for attempt in range(2):
        if attempt:
            nets.leave()
            dist.destroy_process_group()
            store = f"file://{folder}/again"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
            nets.rejoin()
        totals = [torch.tensor(float(rank)) for _ in range(3)]
        for net, total in zip((nets.everyone, nets.experts, nets.replicas), totals, strict=True):
            net.all_reduce(total)
        sums.append(tuple(int(total) for total in totals))
    return sums


def test_groups_are_those_of_the_topology_also_after_all_have_met_again(tmp_path: Path) -> None:
    expected = [(6, 1, 2), (6, 1, 4), (6, 5, 2), (6, 5, 4)]
    assert run_ranks(rejoin, NUM_RANKS, str(tmp_path)) == [[sums, sums] for sums in expected]
