"""The state of a training job that must survive a failure: owned tensors, random state, data position.

| small value   | what it is                                       | on another number of ranks                    |
|---------------|--------------------------------------------------|-----------------------------------------------|
| rng, cuda_rng | random state of this rank: noise of the routing  | drawn anew: from rank 0's, iteration and rank |
| sequences     | how many sequences all ranks together have read  | kept                                          |
| data          | tokens, length and order of the sequences        | kept; other data are refused                  |
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from capricorn.errors import ConfigError
from capricorn.systems.flat_state import FlatState, SavedValues, Values
from capricorn.trainer.data import Batches
from capricorn.trainer.optimizer import Optimizer

_DATA_OPTIONS = ("--data", "model.seq_len", "--seed")
"""What the sequences and their order follow from, as `data` has them."""


def training_state(optimizer: Optimizer, batches: Batches, device: torch.device) -> FlatState:
    """Returns the state of this rank, as the checkpointing systems see it.

    The learning-rate schedule is a function of the iteration, which every checkpoint is named by, and needs no entry.
    """

    def capture() -> dict[str, Tensor]:
        values = {"rng": torch.get_rng_state(), "sequences": torch.tensor(batches.position), "data": _data_of(batches)}
        return values | ({"cuda_rng": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})

    def publish(values: Values) -> None:
        optimizer.publish()
        torch.set_rng_state(values["rng"])
        batches.position = int(values["sequences"])
        if device.type == "cuda":
            if "cuda_rng" not in values:
                raise ConfigError("the checkpoint was made without a GPU: it has no random state of one")
            torch.cuda.set_rng_state(values["cuda_rng"], device)

    def reshard(saved: SavedValues) -> Values:
        return _reshard(saved, batches, device)

    return FlatState(
        optimizer.owned_tensors(), capture=capture, publish=publish, aliases=optimizer.aliases(), reshard=reshard
    )


def _data_of(batches: Batches) -> Tensor:
    return torch.tensor([batches.digest >> 1, batches.seq_len, batches.seed])  # a digest that fits a signed integer


def _reshard(saved: SavedValues, batches: Batches, device: torch.device) -> Values:
    """Returns the small values by which this rank goes on from what any number of ranks have saved.

    Raises:
        ConfigError: the sequences are others, so that the position would mean something else.
    """
    first = saved.of_rank(0)
    is_of_training = isinstance(first, Mapping) and isinstance(first.get("rng"), Tensor)
    if not is_of_training or not {"sequences", "position"} & first.keys():
        raise ConfigError("it has no random state and data position of a run")
    _check_same_data(first, batches)
    is_as_saved = saved.world_size == batches.world_size
    mine = saved.of_rank(batches.rank) if is_as_saved else {}
    seed = _seed(first["rng"], saved.iteration, batches.rank)
    rng = torch.Generator().manual_seed(seed).get_state()
    values = {"rng": mine.get("rng", rng), "sequences": _position(first, saved, batches), "data": _data_of(batches)}
    if device.type == "cuda":  # seed and offset, as CUDA's generators have them
        values["cuda_rng"] = mine.get("cuda_rng", torch.tensor([seed, 0]).view(torch.uint8))
    return values


def _check_same_data(saved: Values, batches: Batches) -> None:
    if "data" not in saved:  # version 0.2 and before did not say
        return
    facts = zip(_DATA_OPTIONS, saved["data"].tolist(), _data_of(batches).tolist(), strict=True)
    other = ", ".join(option for option, then, now in facts if then != now)
    if other:
        raise ConfigError(f"its data position is of other sequences; give the {other} that it was trained with")


def _position(first: Values, saved: SavedValues, batches: Batches) -> Tensor:
    """Returns the sequences that have been read, so that the next is the first that nobody has read."""
    if "sequences" in first:
        return torch.as_tensor(first["sequences"])
    # Version 0.2 and before counted the batches of each rank, and did not say of which size.
    return torch.tensor(int(first["position"]) * saved.world_size * batches.batch_size)


def _seed(rng: Tensor, iteration: int, rank: int) -> int:
    """Returns a seed made of a random state, and so of the training's seed, of the iteration and the rank."""
    return xxh3_64_intdigest(rng.numpy().tobytes() + f"{iteration} {rank}".encode()) >> 1
