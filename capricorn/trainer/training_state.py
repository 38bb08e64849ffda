"""The state of a training job that must survive a failure: owned tensors, random state, data position."""

from __future__ import annotations

import torch
from torch import Tensor

from capricorn.systems.flat_state import FlatState, Values
from capricorn.trainer.data import Batches
from capricorn.trainer.optimizer import Optimizer


def training_state(optimizer: Optimizer, batches: Batches, device: torch.device) -> FlatState:
    """Returns the state of this rank, as the checkpointing systems see it.

    The learning-rate schedule is a function of the iteration, which every checkpoint is named by, and needs no entry.
    """

    def capture() -> dict[str, Tensor]:
        values = {"rng": torch.get_rng_state(), "position": torch.tensor(batches.position)}
        return values | ({"cuda_rng": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})

    def publish(values: Values) -> None:
        optimizer.publish()
        torch.set_rng_state(values["rng"])
        batches.position = int(values["position"])
        if device.type == "cuda":
            torch.cuda.set_rng_state(values["cuda_rng"], device)

    return FlatState(optimizer.owned_tensors(), capture=capture, publish=publish, aliases=optimizer.aliases())
