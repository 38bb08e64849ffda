"""What the hooks of one iteration cost when nobody listens, as a fraction of the iteration."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from capricorn.baselines.none import NoCheckpoint

from benchmarks.timing import interleaved, ratio
from capricorn.config.resolve import load_model
from capricorn.config.scenario import TrainConfig
from capricorn.hooks import HookChain, OpKey, TrainerHook
from capricorn.trainer.exchange import Network
from capricorn.trainer.loop import StallMeter
from capricorn.trainer.models import build_model
from capricorn.trainer.optimizer import Optimizer

CALLS = 2000


class _Count(TrainerHook):
    def __init__(self) -> None:
        self.num_ops = 0

    def on_op_begin(self, op: OpKey) -> None:
        self.num_ops += 1


def main() -> None:
    """Prints the cost measured end to end, and that of the single calls times their number."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'store'}", rank=0, world_size=1)
        _measure()
        dist.destroy_process_group()


def _measure() -> None:
    config = load_model("mixtral-small")
    model = build_model(config, 0, 1, Network(dist.group.WORLD), "cpu", 0)
    optimizer = Optimizer(model, TrainConfig())
    tokens_BS = torch.randint(0, config.vocab_size, (config.batch_size, config.seq_len))

    def iterate(hook: TrainerHook | None) -> None:
        optimizer.zero_grad()
        model(tokens_BS, tokens_BS, hook).backward()
        optimizer.reduce(hook)
        optimizer.step()

    chain = HookChain([StallMeter(NoCheckpoint())])
    durations = interleaved({"without": lambda: iterate(None), "with": lambda: iterate(chain)})
    print(f"iteration with idle hooks / without: {ratio(durations['with'], durations['without'])}")

    counter = _Count()
    iterate(counter)
    op = OpKey(0, "forward", "expert")

    def call() -> None:
        for _ in range(CALLS):
            chain.on_op_begin(op)
            chain.on_op_end(op)

    per_op_s = median(interleaved({"calls": call})["calls"]) / CALLS
    share = counter.num_ops * per_op_s / median(durations["without"])
    print(f"calls of {counter.num_ops} ops an iteration: {per_op_s * 1e6:.2f} us each, {100 * share:.3f} % of it")
