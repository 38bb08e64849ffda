"""The system around lm-resiliency: what survives whom, that nothing is torn, and that no wait is endless."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from capricorn.errors import ConfigError, NoCompleteCheckpointError
from capricorn.systems.flat_state import FlatState
from capricorn.systems.interface import PacedRoute
from capricorn.systems.registry import load_system
from tests.support.peers import Toy, job_of, left_files, left_over
from tests.support.runs import flip_byte
from tests.support.spawn import run_ranks

pytest.importorskip("lm_resiliency")

from lm_resiliency.checkpointing import disk
from lm_resiliency.checkpointing.copy import AsyncDeviceCopier
from lm_resiliency.checkpointing.replication import ChunkedGlooBackend

LM = "lm-resiliency"


def save_and_restore(rank: int, num_nodes: int, folder: str, lost: tuple[int, ...]) -> list[Any]:
    toy = Toy(LM, job_of(rank, num_nodes, Path(folder)))
    toy.train(1, 5)
    toy.system.drain(10.0)
    completed, counters = toy.system.take_completed(), toy.system.counters()
    kinds = {event.kind for event in toy.system.take_events()}
    toy.system.close()
    toy.system.close()
    left = left_over() == toy.before
    dist.barrier()
    if rank in lost:
        shutil.rmtree(toy.job.store_dir)
    again = Toy(LM, job_of(rank, num_nodes, Path(folder), attempt=1))
    report = again.system.restore()
    restored = again.holds(report.iteration)
    again.train(report.iteration + 1, report.iteration + 2)
    again.system.drain(10.0)
    latest = again.system.latest_complete()
    again.system.close()
    moved = counters.staged_bytes > 0, counters.sent_bytes > 0
    return [completed, report.iteration, list(report.sources), restored, latest, left, moved, kinds]


@pytest.mark.parametrize(("num_nodes", "lost"), [(1, ()), (2, ()), (2, (1,)), (4, (0, 3))])
def test_the_last_iteration_is_restored_after_nodes_are_lost(
    tmp_path: Path, num_nodes: int, lost: tuple[int, ...]
) -> None:
    results = run_ranks(save_and_restore, num_nodes, str(tmp_path), lost)
    for completed, iteration, sources, restored, latest, left, moved, kinds in results:
        assert completed == [1, 2, 3, 4, 5]
        assert iteration == 5
        assert sources == ["peer" if rank in lost else "local" for rank in range(num_nodes)]
        assert restored
        assert latest == 7
        assert left
        assert moved == (True, num_nodes > 1)
        assert kinds == ({"stage", "send"} if num_nodes > 1 else {"stage"})


def lose_a_pair(rank: int, num_nodes: int, folder: str) -> list[Any]:
    toy = Toy(LM, job_of(rank, num_nodes, Path(folder)))
    toy.train(1, 2)
    toy.system.close()
    dist.barrier()
    if rank < 2:
        shutil.rmtree(toy.job.store_dir)
    again = Toy(LM, job_of(rank, num_nodes, Path(folder), attempt=1))
    try:
        again.system.restore()
    except NoCompleteCheckpointError as error:
        return [str(error), left_files(again.job)]
    finally:
        again.system.close()
    return ["restored"]


def test_a_pair_that_is_lost_together_is_named_and_nothing_stale_stays(tmp_path: Path) -> None:
    for message, files in run_ranks(lose_a_pair, 4, str(tmp_path)):
        assert "rank 0, 1 has no copy" in message
        assert files == []


def slow_exchange(rank: int, num_nodes: int, folder: str) -> list[Any]:
    """The exchange of iteration 5 begins when update 6 has come and gone; rank 1 then loses its node."""
    delay(0.3)
    toy = Toy(LM, job_of(rank, num_nodes, Path(folder), every=5))
    toy.train(1, 6)
    toy.system.drain(10.0)
    toy.system.close()
    dist.barrier()
    if rank == 1:
        shutil.rmtree(toy.job.store_dir)
    again = Toy(LM, job_of(rank, num_nodes, Path(folder), attempt=1))
    report = again.system.restore()
    restored = again.holds(report.iteration)
    again.system.close()
    return [report.iteration, list(report.sources), restored]


def delay(seconds: float) -> None:
    original = ChunkedGlooBackend.send

    def send(self: ChunkedGlooBackend, tensors: list[torch.Tensor], step: int, meta: bytes = b"") -> None:
        time.sleep(seconds)
        original(self, tensors, step, meta)

    ChunkedGlooBackend.send = send  # type: ignore[method-assign]


def test_no_update_tears_what_the_peer_is_sent(tmp_path: Path) -> None:
    assert run_ranks(slow_exchange, 2, str(tmp_path)) == [[5, ["local", "peer"], True]] * 2


def mute(rank: int, num_nodes: int, folder: str) -> list[Any]:
    """Rank 1 says nothing to its peer from iteration 3 on, trains on, and loses its node at the end."""
    if rank == 1:
        silence(3)
    toy = Toy(LM, job_of(rank, num_nodes, Path(folder), timeout_s=1.0))
    toy.train(1, 6)
    completed, counters, complaint = toy.system.take_completed(), toy.system.counters(), toy.complaint()
    toy.system.close()
    left = left_over() == toy.before
    dist.barrier()
    if rank == 1:
        shutil.rmtree(toy.job.store_dir)
    again = Toy(LM, job_of(rank, num_nodes, Path(folder), attempt=1))
    report = again.system.restore()
    restored = again.holds(report.iteration)
    again.system.close()
    return [completed, counters.failed_saves, complaint, left, report.iteration, list(report.sources), restored]


def silence(iteration: int) -> None:
    original = ChunkedGlooBackend.send

    def send(self: ChunkedGlooBackend, tensors: list[torch.Tensor], step: int, meta: bytes = b"") -> None:
        if step >= iteration:
            raise RuntimeError("no word")
        original(self, tensors, step, meta)

    ChunkedGlooBackend.send = send  # type: ignore[method-assign]


def test_a_silent_peer_costs_checkpoints_but_no_training_and_not_the_last_complete_one(tmp_path: Path) -> None:
    for completed, failed, complaint, left, iteration, sources, restored in run_ranks(mute, 2, str(tmp_path)):
        assert completed == [1, 2]
        assert failed == 4
        assert "iteration 6: not tried" in complaint
        assert left
        assert (iteration, sources, restored) == (2, ["local", "peer"], True)


class Left(Exception):  # noqa: N818 - what a worker raises on SIGTERM
    """The worker ends."""


def leave(signum: int, frame: object) -> NoReturn:
    raise Left


def terminated(rank: int, num_nodes: int, folder: str, amid_copy: bool) -> list[Any]:
    """SIGTERM after iteration 3, or when half of iteration 4 is copied; another one while files are written."""
    signal.signal(signal.SIGTERM, leave)
    toy = Toy(LM, job_of(rank, num_nodes, Path(folder)))
    toy.train(1, 3)
    toy.system.drain(5.0)
    last = partial(toy.train, 4, 4) if amid_copy else terminate
    with (
        patch.object(disk, "_fsync_directory", terminate),
        patch.object(AsyncDeviceCopier, "start_copy", copy_half),
        pytest.raises(Left),
    ):
        last()
    written = [path.parent.name for path in toy.job.store_dir.rglob(f"rank-{rank}.pt")]
    toy.system.close()
    dist.barrier()
    again = Toy(LM, job_of(rank, num_nodes, Path(folder), attempt=1))
    report = again.system.restore()
    restored = again.holds(report.iteration)
    again.system.close()
    return [sorted(written), report.iteration, restored]


def terminate(*arguments: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def copy_half(copier: object, sources: list[torch.Tensor], places: list[torch.Tensor]) -> None:
    places[0].copy_(sources[0])
    terminate()


@pytest.mark.parametrize(("amid_copy", "written"), [(False, ["step-2", "step-3"]), (True, ["step-3"])])
def test_a_worker_that_is_told_to_end_leaves_files_of_whole_generations(
    tmp_path: Path, amid_copy: bool, written: list[str]
) -> None:
    assert run_ranks(terminated, 2, str(tmp_path), amid_copy) == [[written, 3, True]] * 2


def damaged(rank: int, num_nodes: int, folder: str) -> list[Any]:
    """Rank 0's own file of iteration 3, the newest, gets a flipped bit."""
    toy = Toy(LM, job_of(rank, num_nodes, Path(folder)))
    toy.train(1, 3)
    toy.system.drain(5.0)
    toy.system.close()
    if rank == 0:
        (file,) = toy.job.store_dir.rglob("step-3/rank-0.pt")
        flip_byte(file, file.stat().st_size // 2)
    dist.barrier()
    again = Toy(LM, job_of(rank, num_nodes, Path(folder), attempt=1))
    report = again.system.restore()
    restored = again.holds(report.iteration)
    again.system.close()
    return [report.iteration, list(report.sources), restored, list(report.damaged)]


def test_a_damaged_file_is_named_and_the_peer_has_the_state(tmp_path: Path) -> None:
    first, second = run_ranks(damaged, 2, str(tmp_path))
    assert first == [3, ["peer", "local"], True, ["rank 0's copy of iteration 3 on rank 0"]]
    assert second == [3, ["peer", "local"], True, []]


def all_killed(rank: int, num_nodes: int, folder: str) -> list[Any]:
    """No worker can write what it has in memory, so what is left are the files that are written now and then."""
    toy = Toy(LM, job_of(rank, num_nodes, Path(folder)))
    toy.train(1, 301)
    toy.system.drain(5.0)
    toy.system._manager._disarm_exit_flush()
    toy.system.close()
    files = left_files(toy.job)
    dist.barrier()
    again = Toy(LM, job_of(rank, num_nodes, Path(folder), attempt=1))
    report = again.system.restore()
    restored = again.holds(report.iteration)
    again.system.close()
    return [len(files), report.iteration, list(report.sources), restored]


@pytest.mark.slow
def test_if_all_workers_are_killed_at_once_the_last_periodic_files_are_restored(tmp_path: Path) -> None:
    for num_files, iteration, sources, restored in run_ranks(all_killed, 2, str(tmp_path)):
        assert num_files <= 3
        assert (iteration, sources, restored) == (299, ["local", "local"], True)


@pytest.mark.parametrize(
    ("num_nodes", "replicas", "complaint"), [(3, 2, "an even number of nodes"), (4, 3, "--replicas 1, or 2")]
)
def test_what_the_library_cannot_pair_is_refused(tmp_path: Path, num_nodes: int, replicas: int, complaint: str) -> None:
    job = job_of(0, num_nodes, tmp_path, replicas=replicas)
    with pytest.raises(ConfigError, match=complaint):
        load_system(LM)().attach(job, FlatState({}))


def test_links_in_user_space_are_refused_with_what_to_do(tmp_path: Path) -> None:
    job = dataclasses.replace(job_of(0, 2, tmp_path), routes={1: cast(PacedRoute, object())})
    with pytest.raises(ConfigError, match=r"cluster\.links=namespaces"):
        load_system(LM)().attach(job, FlatState({}))
