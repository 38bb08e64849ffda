from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from capricorn.config.presets import MODELS
from capricorn.config.resolve import load_model
from capricorn.config.scenario import ModelConfig, TrainConfig
from capricorn.hooks import NO_LAYER, OpKey, TrainerHook
from capricorn.sizing.memory import attention_params, total_params
from capricorn.topology import expert_split
from capricorn.trainer.exchange import Network
from capricorn.trainer.models import build_model
from capricorn.trainer.moe import expert_ids_of, expert_key
from capricorn.trainer.ops import all_to_all
from capricorn.trainer.optimizer import Optimizer
from tests.support.spawn import run_ranks

MOE_KINDS = ("attention", "gate", "dispatch", "expert", "combine")
DENSE_KINDS = ("attention", "expert")


class Recorder(TrainerHook):
    """All events in order; checks that at most one op is open."""

    def __init__(self) -> None:
        self.events: list[tuple[str, OpKey]] = []
        self.routed: list[tuple[int, list[int]]] = []
        self.open: OpKey | None = None

    def on_op_begin(self, op: OpKey) -> None:
        assert self.open is None, f"{op} begins inside {self.open}"
        self.open = op
        self.events.append(("begin", op))

    def on_op_end(self, op: OpKey) -> None:
        assert self.open == op, f"{op} ends, but {self.open} is open"
        self.open = None
        self.events.append(("end", op))

    def on_routed(self, layer: int, tokens_per_expert: Any) -> None:
        self.routed.append((layer, list(tokens_per_expert)))


class FirstExperts(nn.Module):
    """A gate by which every token prefers the experts with the smallest ids."""

    def __init__(self, gate: nn.Linear) -> None:
        super().__init__()
        self.weight = gate.weight

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, 0 * self.weight) - torch.arange(len(self.weight))


def model_of(name: str, **changes: Any) -> ModelConfig:
    return ModelConfig.model_validate(load_model(name).model_dump() | changes)


def batch_of(config: ModelConfig, num_sequences: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, config.vocab_size, (num_sequences, config.seq_len + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def part_of(batch: tuple[Tensor, Tensor], rank: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    tokens, targets = (t.chunk(num_ranks)[rank] for t in batch)
    return tokens, targets


def built(config: ModelConfig, rank: int = 0, num_ranks: int = 1, seed: int = 0) -> nn.Module:
    network = Network(dist.group.WORLD if dist.is_initialized() else None)
    return build_model(config, rank, num_ranks, network, "cpu", seed)


@pytest.fixture
def one_rank_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def count(model: nn.Module, *, experts: bool) -> int:
    return sum(p.numel() for p in model.parameters() if (expert_ids_of(p) is not None) == experts)


@pytest.mark.usefixtures("one_rank_group")
@pytest.mark.parametrize("name", MODELS)
def test_each_preset_has_exactly_the_parameters_the_formula_says(name: str) -> None:
    config = load_model(name)
    models = [build_model(config, rank, 3, Network(dist.group.WORLD), "meta", 0) for rank in range(3)]
    assert count(models[0], experts=False) + sum(count(m, experts=True) for m in models) == total_params(config)


@pytest.mark.parametrize("tie", [False, True])
def test_latent_attention_and_tied_embeddings_are_sized_right(tie: bool) -> None:
    config = model_of("mixtral-tiny", attention="mla", tie_embeddings=tie)
    model = built(config)
    assert sum(p.numel() for p in model.parameters()) == total_params(config)
    core = model.get_submodule("layers.0.attention.1")
    assert sum(p.numel() for p in core.parameters()) == attention_params(config)


@pytest.mark.usefixtures("one_rank_group")
@pytest.mark.parametrize("name", ["qwen3-moe-tiny", "gpt-moe-tiny"])
def test_initial_weights_do_not_depend_on_the_number_of_ranks(name: str) -> None:
    config = load_model(name)

    def weights(rank: int, num_ranks: int) -> dict[str, Tensor]:
        found = {}
        for key, param in built(config, rank, num_ranks).named_parameters():
            for index, expert in enumerate(expert_ids_of(param) or ()):
                found[expert_key(key, expert)] = param[index]
            if expert_ids_of(param) is None:
                found[key] = param
        return found

    whole, halves = weights(0, 1), weights(0, 2) | weights(1, 2)
    assert whole.keys() == halves.keys()
    assert all(torch.equal(whole[key], halves[key]) for key in whole)
    assert len({t.flatten()[0].item() for key, t in whole.items() if key.endswith("w1")}) > 1


def test_another_seed_gives_other_weights() -> None:
    one, other = (built(load_model("mixtral-tiny"), seed=seed) for seed in (1, 2))
    assert not torch.equal(next(one.parameters()), next(other.parameters()))


def loss_and_grads(rank: int, num_ranks: int, config: ModelConfig) -> tuple[float, dict[str, Tensor]]:
    model = built(config, rank, num_ranks)
    optimizer = Optimizer(model, TrainConfig(), Network(dist.group.WORLD))
    loss = model(*part_of(batch_of(config, 6), rank, num_ranks), None)
    loss.backward()
    optimizer.reduce(None)
    grads = {}
    for name, param in model.named_parameters():
        assert param.grad is not None
        for index, expert in enumerate(expert_ids_of(param) or ()):
            grads[expert_key(name, expert)] = param.grad[index].clone()
        if expert_ids_of(param) is None:
            grads[name] = param.grad.clone()
    mean = loss.detach() / num_ranks
    dist.all_reduce(mean)
    return float(mean), grads


@cache
def on_one_rank(config: ModelConfig) -> list[tuple[float, dict[str, Tensor]]]:
    return run_ranks(loss_and_grads, 1, config)


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [pytest.param("mixtral-tiny", 2, marks=pytest.mark.slow), ("mixtral-tiny", 3), ("qwen3-moe-tiny", 3)],
)
def test_several_ranks_compute_the_loss_and_gradients_of_one(name: str, num_ranks: int) -> None:
    config = load_model(name)
    [(loss, grads)] = on_one_rank(config)
    results = run_ranks(loss_and_grads, num_ranks, config)
    merged = {name: grad for _, part in results for name, grad in part.items()}
    assert merged.keys() == grads.keys()
    for other_loss, _ in results:
        assert other_loss == pytest.approx(loss, abs=1e-5)
    for key, grad in grads.items():
        torch.testing.assert_close(merged[key], grad, atol=2e-6, rtol=1e-3, msg=lambda text, k=key: f"{k}: {text}")


def exchange(rank: int, num_ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    # Rank r sends r + s rows to rank s; rank 0 keeps none for itself.
    sizes = [[r + s for s in range(num_ranks)] for r in range(num_ranks)]
    send, receive = sizes[rank], [row[rank] for row in sizes]
    rows = torch.arange(sum(send) * 2, dtype=torch.float32).view(-1, 2) + 100 * rank
    rows.requires_grad_()
    received = all_to_all(rows, send, receive, Network(dist.group.WORLD), None, 0, "dispatch")
    received.backward(received.detach() * 2)
    assert rows.grad is not None
    return rows.detach(), received.detach(), rows.grad


def test_all_to_all_moves_rows_by_sender_and_its_backward_brings_gradients_home() -> None:
    results = run_ranks(exchange, 3)
    for rank, (rows, received, grad) in enumerate(results):
        expected = [sent.split([r + s for s in range(3)])[rank] for r, (sent, _, _) in enumerate(results)]
        assert torch.equal(received, torch.cat(expected))
        assert torch.equal(grad, rows * 2)


def events(rank: int, num_ranks: int, config: ModelConfig, skewed: bool) -> list[Recorder]:
    torch.manual_seed(rank)
    model = built(config, rank, num_ranks)
    if skewed:
        for block in model.layers:
            block.moe.gate = FirstExperts(block.moe.gate)
    optimizer = Optimizer(model, TrainConfig(), Network(dist.group.WORLD))
    recorders = []
    for iteration in range(1, 3):
        recorders.append(Recorder())
        optimizer.zero_grad()
        model(*batch_of(config, config.batch_size, seed=iteration * num_ranks + rank), recorders[-1]).backward()
        optimizer.reduce(recorders[-1])
        optimizer.clip()
        optimizer.step()
    if skewed and rank == num_ranks - 1:
        for param in model.parameters():
            assert expert_ids_of(param) is None or not param.grad.any()
    return recorders


@cache
def recorded(num_ranks: int, config: ModelConfig, skewed: bool) -> list[list[Recorder]]:
    return run_ranks(events, num_ranks, config, skewed)


@pytest.mark.parametrize(
    ("name", "changes", "num_ranks", "skewed"),
    [
        ("mixtral-tiny", {}, 2, False),
        ("mixtral-tiny", {}, 3, False),
        ("mixtral-tiny", {}, 2, True),
        ("mixtral-tiny", {"num_dense_layers": 1, "dense_ffn": 32, "balance_loss": 0.0}, 2, False),
        ("gpt-moe-tiny", {}, 1, False),
        ("gpt-moe-tiny", {}, 2, False),
    ],
)
def test_the_hook_hears_every_op_once_in_the_same_order_on_all_ranks_and_iterations(
    name: str, changes: dict[str, Any], num_ranks: int, skewed: bool
) -> None:
    config = model_of(name, **changes)
    results = recorded(num_ranks, config, skewed)
    first = results[0][0]
    assert all(recorder.events == first.events for recorders in results for recorder in recorders)
    assert all(recorder.open is None for recorders in results for recorder in recorders)
    expected = {OpKey(NO_LAYER, "backward", "reduce")}
    for direction in ("forward", "backward"):
        expected.add(OpKey(NO_LAYER, direction, "head"))
        for layer in range(config.num_layers):
            kinds = MOE_KINDS if config.is_moe(layer) else DENSE_KINDS
            expected |= {OpKey(layer, direction, kind) for kind in kinds}
    begun = [op for edge, op in first.events if edge == "begin"]
    assert len(begun) == len(expected)
    assert set(begun) == expected
    forward = [op for op in begun if op.direction == "forward"]
    backward = [op for op in begun if op.direction == "backward" and op.kind != "reduce"]
    assert [(op.layer, op.kind) for op in backward] == [(op.layer, op.kind) for op in reversed(forward)]


@pytest.mark.parametrize("name", ["mixtral-tiny", "gpt-moe-tiny"])
def test_the_hook_hears_token_counts_summed_over_ranks(name: str) -> None:
    config = load_model(name)
    results = recorded(2, config, False)
    for one, other in zip(*results, strict=True):
        assert one.routed == other.routed
        assert [layer for layer, _ in one.routed] == [k for k in range(config.num_layers) if config.is_moe(k)]
        for _, counts in one.routed:
            assert len(counts) == config.num_experts
            assignments = 2 * config.tokens_per_rank * config.top_k
            assert sum(counts) == assignments if config.family == "mixtral" else 0 < sum(counts) <= assignments


def test_a_rank_whose_experts_get_no_token_still_takes_part() -> None:
    config = load_model("mixtral-tiny")
    for recorders in recorded(2, config, True):
        for _, counts in recorders[0].routed:
            assert not any(counts[expert] for expert in expert_split(config.num_experts, 2)[1])


def test_without_the_balance_loss_the_loss_is_the_cross_entropy() -> None:
    config = load_model("mixtral-tiny")
    batch = batch_of(config, 2)
    without = built(model_of("mixtral-tiny", balance_loss=0.0))(*batch, None)
    with_loss = built(config)(*batch, None)
    # A fresh router spreads tokens almost evenly, so that each of the two layers adds about 1 x the weight.
    assert (with_loss - without).item() == pytest.approx(2 * config.balance_loss, rel=0.05)
    assert without.item() == pytest.approx(5.5, abs=0.2)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention": "mla"},
        {"num_shared_experts": 2},
        {"num_dense_layers": 1, "dense_ffn": 48},
        {"attention": "mla", "num_shared_experts": 1, "num_dense_layers": 1, "dense_ffn": 48, "tie_embeddings": True},
        {"num_kv_heads": 4, "moe_every": 2, "dense_ffn": 48},
    ],
)
def test_every_variant_gives_each_parameter_a_gradient(changes: dict[str, Any]) -> None:
    config = model_of("mixtral-tiny", **changes)
    model = built(config)
    model(*batch_of(config, 2), Recorder()).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize("attention", ["gqa", "mla"])
def test_no_token_sees_a_later_one(attention: str) -> None:
    config = model_of("mixtral-tiny", attention=attention)
    core = built(config).get_submodule("layers.0.attention")
    x = torch.randn(1, 16, config.hidden)
    changed = x.clone()
    changed[:, 9:] += 1
    difference = (core(changed) - core(x)).abs().amax(-1)[0]
    assert difference[:9].max() == 0
    assert difference[9:].min() > 0


def test_the_hook_changes_no_bit_of_loss_or_gradient() -> None:
    config = load_model("qwen3-moe-tiny")
    outcomes = []
    for hook in (None, TrainerHook()):
        model = built(config)
        loss = model(*batch_of(config, 2), hook)
        loss.backward()
        outcomes.append([loss, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


def autocast_loss(rank: int, num_ranks: int, config: ModelConfig) -> float:
    torch.manual_seed(rank)
    model = built(config, rank, num_ranks)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(*part_of(batch_of(config, 4), rank, num_ranks), Recorder())
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    return float(loss.detach())


@pytest.mark.parametrize("name", ["qwen3-moe-tiny", "gpt-moe-tiny"])
def test_bf16_autocast_trains_fp32_parameters(name: str) -> None:
    config = load_model(name)
    for loss in run_ranks(autocast_loss, 2, config):
        assert loss == pytest.approx(5.56, abs=0.15)
