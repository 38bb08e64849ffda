"""Paced computing: each compute op really runs, and is then stretched by sleeping to the time that the modelled device
would need for the tokens it got. An observer of the trainer; it hides no work and knows no checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from capricorn.config.cluster import BACKWARD, Pace
from capricorn.config.scenario import ModelConfig
from capricorn.hooks import OpKey, TrainerHook
from capricorn.topology import Topology
from capricorn.units import Seconds


class Pacer(TrainerHook):
    """Stretches the compute ops of one rank; communication and the update take the time they take.

    It must hear the begin of an op last and its end first, so that time spent in other hooks stays outside.
    """

    def __init__(
        self,
        pace: Pace,
        model: ModelConfig,
        rank: int,
        topology: Topology,
        *,
        clock: Callable[[], Seconds] = time.perf_counter,
        sleep: Callable[[Seconds], None] = time.sleep,
    ) -> None:
        self._pace, self._model, self._clock, self._sleep = pace, model, clock, sleep
        self._mine = topology.experts_of(model.num_experts)[rank]
        self._rows: dict[int, int] = {}
        self._due_s: Seconds = 0.0
        self._errors_s: list[Seconds] = []
        self._overruns_s: dict[str, Seconds] = {}

    def on_routed(self, layer: int, tokens_per_expert: Sequence[int]) -> None:
        self._rows[layer] = sum(tokens_per_expert[self._mine.start : self._mine.stop])

    def on_op_begin(self, op: OpKey) -> None:
        self._due_s = self._clock() + self.duration(op)

    def on_op_end(self, op: OpKey) -> None:
        if not self.duration(op):
            return
        early_s = self._due_s - self._clock()
        if early_s < 0:
            self._overruns_s[str(op)] = -early_s
            return
        self._sleep(early_s)
        self._errors_s.append(self._clock() - self._due_s)

    def duration(self, op: OpKey) -> Seconds:
        """Returns how long the modelled device takes for the op with the tokens it got; 0 for what is not paced."""
        return self._forward(op) * (BACKWARD if op.direction == "backward" else 1)

    def take(self) -> tuple[list[Seconds], dict[str, Seconds]]:
        """Returns by how much ops missed their time since the last call, and the overruns of the slower ones by op."""
        taken = self._errors_s, self._overruns_s
        self._errors_s, self._overruns_s = [], {}
        return taken

    def _forward(self, op: OpKey) -> Seconds:
        pace = self._pace
        if op.kind == "head":
            return pace.head_s
        if op.kind == "expert":
            return self._experts(op.layer)
        if op.kind not in ("attention", "gate"):
            return 0.0
        if not self._model.is_moe(op.layer):
            return pace.attention_s
        return pace.moe_gate_s if op.kind == "gate" else pace.moe_attention_s

    def _experts(self, layer: int) -> Seconds:
        if not self._model.is_moe(layer):
            return self._pace.dense_s
        rows = self._rows[layer]
        if self._model.family == "gpt-moe":  # experts take padded batches, whatever is routed
            rows = self._model.tokens_per_rank * self._model.top_k
        return self._pace.expert_s_per_row * rows + self._pace.shared_s
