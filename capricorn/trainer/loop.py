"""The training loop: one rank, any model, any checkpointing system. Times iterations and charges all systems alike.

Knows no system by name, no fault and no file; those listen to its hooks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from capricorn.hooks import NO_LAYER, OpKey, TrainerHook
from capricorn.trainer.data import Batches
from capricorn.trainer.optimizer import Optimizer
from capricorn.units import Seconds

UPDATE = OpKey(NO_LAYER, "forward", "update")


class StallMeter(TrainerHook):
    """Passes every moment on to a checkpointing system and sums the time spent there."""

    def __init__(self, system: TrainerHook) -> None:
        self._system = system
        self.stall_s: Seconds = 0.0

    def on_iteration_begin(self, iteration: int) -> None:
        self._charge(self._system.on_iteration_begin, iteration)

    def on_op_begin(self, op: OpKey) -> None:
        self._charge(self._system.on_op_begin, op)

    def on_op_end(self, op: OpKey) -> None:
        self._charge(self._system.on_op_end, op)

    def on_routed(self, layer: int, tokens_per_expert: Sequence[int]) -> None:
        self._charge(self._system.on_routed, layer, tokens_per_expert)

    def before_update(self, iteration: int) -> None:
        self._charge(self._system.before_update, iteration)

    def after_update(self, iteration: int) -> None:
        self._charge(self._system.after_update, iteration)

    def on_iteration_end(self, iteration: int) -> None:
        self._charge(self._system.on_iteration_end, iteration)

    def _charge(self, moment: Callable[..., None], *arguments: object) -> None:
        begin_s = time.perf_counter()
        moment(*arguments)
        self.stall_s += time.perf_counter() - begin_s


@dataclass(frozen=True, slots=True)
class TrainedIteration:
    """The loss and the times of one iteration on one rank."""

    iteration: int
    loss: float
    duration_s: Seconds
    stall_s: Seconds


class Trainer:
    """Trains one rank's part of a model, an iteration at a time."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        batches: Batches,
        device: torch.device,
        meter: StallMeter,
        hook: TrainerHook,
    ) -> None:
        """Puts the parts of a training together.

        Args:
            model: yields the loss of a batch.
            optimizer: updates the model.
            batches: of this rank.
            device: where the model is.
            meter: the checkpointing system; it is part of `hook`.
            hook: hears every moment.
        """
        self._model, self._optimizer, self._batches, self._device = model, optimizer, batches, device
        self._meter, self._hook = meter, hook

    def run(self, iteration: int) -> TrainedIteration:
        """Trains iteration `iteration`, counted from 1; the state before it must be that of `iteration` - 1."""
        begin_s, stalled_s = time.perf_counter(), self._meter.stall_s
        self._hook.on_iteration_begin(iteration)
        self._optimizer.zero_grad()
        loss = self._forward()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.reduce(self._hook)
        self._update(iteration)
        value = float(loss.item())  # on a GPU this waits for the iteration to end
        self._hook.on_iteration_end(iteration)
        return TrainedIteration(iteration, value, time.perf_counter() - begin_s, self._meter.stall_s - stalled_s)

    def _forward(self) -> torch.Tensor:
        tokens_BS, targets_BS = (torch.from_numpy(part).to(self._device) for part in self._batches.next())
        with self._precision():
            loss: torch.Tensor = self._model(tokens_BS, targets_BS, self._hook)
        return loss

    def _update(self, iteration: int) -> None:
        self._optimizer.clip()
        self._optimizer.set_lr(iteration)
        self._hook.before_update(iteration)
        self._hook.on_op_begin(UPDATE)
        self._optimizer.step()
        self._hook.on_op_end(UPDATE)
        self._hook.after_update(iteration)

    def _precision(self) -> AbstractContextManager[object]:
        # Weights and moments stay fp32. On this kind of CPU bf16 autocast is slower than fp32.
        return torch.autocast("cuda", torch.bfloat16) if self._device.type == "cuda" else nullcontext()
