from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from capricorn.config.resolve import load_model
from capricorn.config.scenario import ModelConfig, TrainConfig
from capricorn.sizing.memory import total_params
from capricorn.trainer.exchange import Network
from capricorn.trainer.models import build_model
from capricorn.trainer.optimizer import Optimizer, learning_rate
from tests.support.spawn import run_ranks

TRAIN = TrainConfig(lr=1e-3, lr_warmup_iterations=2)


@pytest.fixture
def one_rank_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model_of(name: str, **changes: Any) -> ModelConfig:
    return ModelConfig.model_validate(load_model(name).model_dump() | changes)


def batch_of(config: ModelConfig, rank: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (6, config.seq_len + 1), generator=generator)
    mine = tokens.chunk(num_ranks)[rank]
    return mine[:, :-1], mine[:, 1:]


def iterate(model: nn.Module, optimizer: Optimizer, batch: tuple[Tensor, Tensor], iterations: int) -> list[float]:
    """The loss of each iteration, then the gradient norm of each."""
    losses, norms = [], []
    for iteration in range(1, iterations + 1):
        optimizer.set_lr(iteration)
        optimizer.zero_grad()
        loss = model(*batch, None)
        loss.backward()
        optimizer.reduce(None)
        norms.append(optimizer.clip().item())
        optimizer.step()
        losses.append(loss.item())
    return losses + norms


def train(rank: int, num_ranks: int, config: ModelConfig, iterations: int) -> dict[str, Any]:
    torch.manual_seed(rank)
    model = build_model(config, rank, num_ranks, Network(dist.group.WORLD), "cpu", 0)
    optimizer = Optimizer(model, TRAIN, Network(dist.group.WORLD))
    losses = iterate(model, optimizer, batch_of(config, rank, num_ranks), iterations)
    dense = {name: p.detach().clone() for name, p in model.named_parameters() if name in optimizer.dense_owner}
    owned = {name: tensor.clone() for name, tensor in optimizer.owned_tensors().items()}
    return {"losses": losses, "dense": dense, "owned": owned, "aliases": optimizer.aliases()}


@cache
def trained(name: str, num_ranks: int, iterations: int) -> list[dict[str, Any]]:
    return run_ranks(train, num_ranks, load_model(name), iterations)


def merged(results: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {name: tensor for result in results for name, tensor in result["owned"].items()}


def test_the_learning_rate_warms_up_then_falls_along_a_cosine() -> None:
    recipe = TrainConfig(lr=1.0, lr_warmup_iterations=10, schedule_iterations=110, min_lr_frac=0.1)
    rates = [learning_rate(recipe, iteration) for iteration in range(1, 200)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == 1.0
    assert rates[59] == pytest.approx(0.55)
    assert rates[109:] == [pytest.approx(0.1)] * 90
    assert rates[9:] == sorted(rates[9:], reverse=True)


def test_the_learning_rate_needs_no_warm_up() -> None:
    assert learning_rate(TrainConfig(lr=1.0, lr_warmup_iterations=0), 1) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.usefixtures("one_rank_group")
@pytest.mark.parametrize("name", ["mixtral-tiny", "gpt-moe-tiny"])
def test_on_one_rank_the_update_equals_plain_adamw_bit_for_bit(name: str) -> None:
    config = model_of(name, tie_embeddings=True)
    batch = batch_of(config, 0, 1)
    recipe = TrainConfig(lr=1e-3, lr_warmup_iterations=2, clip_norm=1e9)
    model = build_model(config, 0, 1, Network(dist.group.WORLD), "cpu", 0)
    torch.manual_seed(0)
    losses = iterate(model, Optimizer(model, recipe, Network(dist.group.WORLD)), batch, 4)[:4]

    plain = build_model(config, 0, 1, Network(dist.group.WORLD), "cpu", 0)
    # The moments of this one come to be in its first step.
    matrices = [p for p in plain.parameters() if p.ndim - hasattr(p, "expert_ids") >= 2]
    others = [p for p in plain.parameters() if p.ndim - hasattr(p, "expert_ids") < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    adamw = AdamW(groups, betas=(0.9, 0.95), fused=True)
    torch.manual_seed(0)
    for iteration, expected in enumerate(losses, 1):
        for group in adamw.param_groups:
            group["lr"] = learning_rate(recipe, iteration)
        adamw.zero_grad()
        loss = plain(*batch, None)
        loss.backward()
        adamw.step()
        assert loss.item() == expected
    for (key, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b), key


@pytest.mark.usefixtures("one_rank_group")
def test_clipping_scales_all_gradients_by_their_common_norm() -> None:
    config = load_model("mixtral-tiny")
    model = build_model(config, 0, 1, Network(), "cpu", 0)
    optimizer = Optimizer(model, TrainConfig(clip_norm=0.01))
    model(*batch_of(config, 0, 1), None).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    before = torch.cat([grad.flatten() for grad in grads]).double().norm()
    norm = optimizer.clip()
    after = torch.cat([grad.flatten() for grad in grads]).norm()
    assert float(norm) == pytest.approx(float(before), rel=1e-4)
    assert float(after) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.usefixtures("one_rank_group")
def test_the_whole_state_exists_before_the_first_update_and_stays_where_it_is() -> None:
    config = load_model("mixtral-tiny")
    model = build_model(config, 0, 1, Network(), "cpu", 0)
    optimizer = Optimizer(model, TRAIN)
    before = optimizer.owned_tensors()
    addresses = {name: tensor.data_ptr() for name, tensor in before.items()}
    iterate(model, optimizer, batch_of(config, 0, 1), 2)
    after = optimizer.owned_tensors()
    assert list(after) == list(before)
    assert {name: tensor.data_ptr() for name, tensor in after.items()} == addresses
    assert all(float(t) == 2 for name, t in before.items() if name.startswith("step/"))
    assert sum(t.numel() for name, t in after.items() if not name.startswith("step/")) == 3 * total_params(config)


@pytest.mark.usefixtures("one_rank_group")
def test_the_slices_of_one_stacked_tensor_follow_each_other() -> None:
    model = build_model(load_model("mixtral-tiny"), 0, 1, Network(), "cpu", 0)
    owned = list(Optimizer(model, TRAIN).owned_tensors().items())
    for kind in ("param", "exp_avg", "exp_avg_sq"):
        first = next(i for i, (name, _) in enumerate(owned) if name == f"{kind}/layers.1.moe.experts.0.w2")
        run = owned[first : first + 8]
        assert [name for name, _ in run] == [f"{kind}/layers.1.moe.experts.{e}.w2" for e in range(8)]
        size = run[0][1].nbytes
        assert [t.data_ptr() for _, t in run] == [run[0][1].data_ptr() + e * size for e in range(8)]


@pytest.mark.usefixtures("one_rank_group")
def test_tied_parameters_are_owned_under_one_name() -> None:
    model = build_model(load_model("gpt-moe-tiny"), 0, 1, Network(dist.group.WORLD), "cpu", 0)
    optimizer = Optimizer(model, TRAIN)
    assert optimizer.aliases() == {"head.weight": "embedding.weight"}
    assert "param/embedding.weight" in optimizer.owned_tensors()
    assert "param/head.weight" not in optimizer.owned_tensors()


@pytest.mark.usefixtures("one_rank_group")
def test_a_gradient_that_left_the_flat_buffer_is_noticed() -> None:
    model = build_model(load_model("mixtral-tiny"), 0, 1, Network(), "cpu", 0)
    optimizer = Optimizer(model, TRAIN)
    model.zero_grad(set_to_none=True)
    with pytest.raises(AssertionError):
        optimizer.reduce(None)


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [pytest.param("mixtral-tiny", 2, marks=pytest.mark.slow), ("mixtral-tiny", 3), ("gpt-moe-tiny", 2)],
)
def test_all_ranks_together_own_each_part_of_the_state_exactly_once(name: str, num_ranks: int) -> None:
    [alone] = trained(name, 1, 5)
    results = trained(name, num_ranks, 20)
    names = [name for result in results for name in result["owned"]]
    assert len(names) == len(set(names))
    shapes, expected = (
        {key: tensor.shape for key, tensor in owned.items() if not key.startswith("step/")}
        for owned in (merged(results), alone["owned"])
    )
    assert shapes == expected
    assert sum(shape.numel() for shape in shapes.values()) == 3 * total_params(load_model(name))
    sizes = [sum(t.numel() for t in result["owned"].values()) for result in results]
    assert max(sizes) < 1.6 * min(sizes)


def test_several_ranks_train_like_one() -> None:
    [alone] = trained("mixtral-tiny", 1, 5)
    results = trained("mixtral-tiny", 2, 20)
    mean = torch.tensor([result["losses"] for result in results]).mean(0).tolist()
    assert mean[:5] == pytest.approx(alone["losses"][:5], abs=2e-4)
    assert mean[20:25] == pytest.approx(alone["losses"][5:], rel=1e-2)
    assert results[0]["losses"][20:] == results[1]["losses"][20:]


@pytest.mark.parametrize("name", ["mixtral-tiny", "gpt-moe-tiny"])
def test_training_learns_and_gives_the_same_bits_each_time(name: str) -> None:
    once, again = trained(name, 2, 20), run_ranks(train, 2, load_model(name), 20)
    assert [r["losses"] for r in once] == [r["losses"] for r in again]
    assert all(torch.equal(tensor, merged(again)[key]) for key, tensor in merged(once).items())
    assert all(torch.equal(tensor, once[1]["dense"][key]) for key, tensor in once[0]["dense"].items())
    assert all(result["losses"][19] < result["losses"][0] - 0.5 for result in once)


def restore(rank: int, num_ranks: int, config: ModelConfig) -> tuple[list[float], list[float]]:
    """The losses of two iterations, and again after the state before them was overwritten and put back."""
    model = build_model(config, rank, num_ranks, Network(dist.group.WORLD), "cpu", 0)
    group = dist.new_group(list(range(num_ranks)))
    optimizer = Optimizer(model, TRAIN, Network(group))
    batch = batch_of(config, rank, num_ranks)
    iterate(model, optimizer, batch, 2)
    saved = {name: tensor.clone() for name, tensor in optimizer.owned_tensors().items()}
    first = iterate(model, optimizer, batch, 2)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(7.0)
    for name, tensor in optimizer.owned_tensors().items():
        tensor.copy_(saved[name])
    optimizer.publish()
    return first, iterate(model, optimizer, batch, 2)


def test_after_writing_the_owned_tensors_and_publishing_training_repeats_bit_for_bit() -> None:
    for first, second in run_ranks(restore, 3, load_model("mixtral-tiny")):
        assert first == second
