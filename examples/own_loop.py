"""The runtime in a training loop of one's own, without the harness: a checkpoint of every iteration, and a restart.

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nproc-per-node 2 --max-restarts 3 examples/own_loop.py

The variable is needed with torch 2.13, whose restarted workers otherwise look for those of the dead attempt.
Rank 1 kills itself once, in iteration 30; torchrun starts all ranks again and they go on from iteration 29, or
from 28 if 29 was still being copied. On several nodes, with `torchrun --nnodes 2 ...` and `replicas=2`, the loss of a
node is survived as well.
"""

from __future__ import annotations

import os
import shutil
import signal

import torch
import torch.distributed as dist
from torch import nn

from capricorn import FlatState, NoCompleteCheckpointError, SystemConfig, join_job, load_system

ITERATIONS = 50


def main() -> None:
    """Trains a small model on numbers, another one on each rank."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Linear(512, 512)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(512)).sum().backward()
    optimizer.step()  # the state of the optimizer must exist when it is laid out

    # What must survive. Everything here changes in the update only, except what `capture` yields after each update.
    tensors = {f"param/{rank}/{name}": param for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        tensors |= {f"{key}/{rank}/{name}": value for key, value in optimizer.state[param].items()}
    state = FlatState(
        tensors,
        capture=lambda: {"rng": torch.get_rng_state()},
        publish=lambda values: torch.set_rng_state(values["rng"]),
    )

    job = join_job("own-loop", SystemConfig(replicas=1))
    system = load_system("capricorn")()
    system.attach(job, state)
    try:
        done = system.restore().iteration
        print(f"rank {rank} goes on after iteration {done}", flush=True)
    except NoCompleteCheckpointError:
        done = 0

    for iteration in range(done + 1, ITERATIONS + 1):
        optimizer.zero_grad()
        loss = model(torch.randn(64, 512)).square().mean()
        loss.backward()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)  # as in any training of several ranks, something keeps them in step
        if rank == 1 and iteration == 30 and job.attempt == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        system.before_update(iteration)  # returns when the state may be overwritten
        optimizer.step()
        system.after_update(iteration)  # the state now belongs to `iteration`

    system.drain(timeout_s=30.0)
    print(
        f"rank {rank}: mean loss {mean.item():.6f}, newest complete checkpoint {system.latest_complete()}", flush=True
    )
    system.close()
    dist.barrier()
    if rank == 0:
        shutil.rmtree(job.store_dir.parent)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
