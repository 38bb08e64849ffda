"""Runs a function on several ranks of a gloo group, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from capricorn.runtime.persist.writer_forker import WriterForker
from capricorn.runtime.persist.writer_process import WriterStarter

# A server that has imported all that takes long, as torch's compiler with which an optimizer is made, but computed
# nothing: its children start at once, and no thread is lost in a fork.
CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = [
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict_saver",
    "fairscale.optim",
    "fairscale.nn.moe",
    "capricorn.runtime.persist.writer",
    "capricorn.launch.worker",
]
CONTEXT.set_forkserver_preload(PRELOADED)


start_writer: WriterStarter | None = None
"""In a rank whose `run_ranks` said so: forks writers of the persistent tier."""


def run_ranks(
    fn: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    deadline_s: float = 60.0,
    lost: Collection[int] = (),
    forks_writers: bool = False,
) -> list[Any]:
    """What the module-level `fn(rank, num_ranks, *args)` returns on each rank, one thread each; None of `lost` ones."""
    with TemporaryDirectory() as folder:
        processes = [
            CONTEXT.Process(target=_run_rank, args=(fn, rank, num_ranks, args, Path(folder), deadline_s, forks_writers))
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        end = time.monotonic() + deadline_s
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        late = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
            process.join()
        errors = [path.read_text() for path in sorted(Path(folder).glob("error*"))]
        assert not errors, "\n".join(errors)
        assert not late, f"ranks {late} did not end within {deadline_s} s"
        results = [None if rank in lost else Path(folder) / f"result{rank}" for rank in range(num_ranks)]
        return [path and torch.load(path, weights_only=False) for path in results]


def _run_rank(
    fn: Callable[..., Any],
    rank: int,
    num_ranks: int,
    args: tuple[Any, ...],
    folder: Path,
    deadline_s: float,
    forks_writers: bool,
) -> None:
    global start_writer
    torch.set_num_threads(1)
    start_writer = WriterForker().start if forks_writers else None
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=deadline_s),
        )
        dist.barrier()  # one that ends at once would look like a failure to those that are still connecting
        torch.save(fn(rank, num_ranks, *args), folder / f"result{rank}")
        dist.destroy_process_group()
    except BaseException:
        (folder / f"error{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise
