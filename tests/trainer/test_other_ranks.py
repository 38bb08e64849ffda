"""Training that goes on from the persistent tier on another number of ranks, compared with training that did not stop.

The global batch is the same throughout, so every iteration sees the same sequences in the same state. Only sums are cut
otherwise: over ranks, over the rows of an expert. Losses then agree to rounding, and bit for bit between jobs of one
shape that begin with one state, however they came to it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from capricorn.hooks import TrainerHook
from capricorn.runtime.persist.layout import folder_of
from capricorn.trainer.loop import StallMeter, Trainer
from tests.support.spawn import run_ranks
from tests.support.tiers import MODEL, Rank, writer

GLOBAL_BATCH = 12
SAVED, LAST = 4, 8
ROUNDING = 1e-5
"""Relative. Sums over other parts differ by some 1e-7; a near tie of the router that tips over, by more."""
MORE_SHAPES = [(2, 1), (1, 2), (2, 4), (4, 2), (3, 2), (4, 3), (1, 4), (3, 1)]
SHAPES = [
    (2, 3),  # experts as 4 + 4, then as 3 + 3 + 2
    *(pytest.param(*shape, marks=pytest.mark.slow) for shape in MORE_SHAPES),
]


class Learned(NamedTuple):
    """What a job, or one rank of it, has done."""

    losses: dict[int, float]
    """By iteration; of a job, the mean over ranks."""
    position: int
    notes: tuple[str, ...] = ()


def learn(me: Rank, first: int, last: int) -> Learned:
    """Trains these iterations, and keeps the state after `SAVED` in the persistent tier."""
    trainer = Trainer(
        me.model, me.optimizer, me.batches, torch.device("cpu"), StallMeter(TrainerHook()), TrainerHook()
    )  # fmt: skip
    losses = {}
    for iteration in range(first, last + 1):
        losses[iteration] = trainer.run(iteration).loss
        if iteration == SAVED:
            me.state.capture()
            assert writer(me)(iteration) == ""
            dist.barrier()
    return Learned(losses, me.batches.position)


def begin(rank: int, num_ranks: int, folder: str, model: str) -> Learned:
    """Training that does not stop."""
    return learn(Rank(rank, num_ranks, Path(folder), model, GLOBAL_BATCH // num_ranks), 1, LAST)


def go_on(rank: int, num_ranks: int, folder: str, model: str) -> tuple[Learned, Learned]:
    """Training that begins with what is in the persistent tier: put into place by the runtime, and by torch alone."""
    me = Rank(rank, num_ranks, Path(folder), model, GLOBAL_BATCH // num_ranks)
    system = me.attach(Path(folder) / "tier")
    report = system.restore()
    system.close()
    rng = torch.get_rng_state()
    by_runtime = learn(me, report.iteration + 1, LAST)._replace(notes=tuple(report.notes))
    other = Rank(rank, num_ranks, Path(folder), model, GLOBAL_BATCH // num_ranks)
    load_by_torch(other, folder_of(Path(folder) / "tier", SAVED))
    torch.set_rng_state(rng)
    return by_runtime, learn(other, SAVED + 1, LAST)


def load_by_torch(me: Rank, folder: Path) -> None:
    """Puts tensors into place by their names."""
    reader = dcp.FileSystemReader(folder)
    found = reader.read_metadata().state_dict_metadata
    state = {key: torch.empty(each.size, dtype=each.properties.dtype) for key, each in found.items()}  # type: ignore[union-attr]
    dcp.load(state, storage_reader=reader, no_dist=True)
    for key, tensor in me.tensors().items():
        # Counts of updates are named by the stack of experts that is updated in one; all are updated as often.
        tensor.copy_(state[key if key in state else "step/embedding.weight"])
    me.optimizer.publish()
    me.batches.position = SAVED * GLOBAL_BATCH


class Jobs:
    """Jobs of any number of ranks; those that do not stop are done once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.whole = cache(self._whole)

    def _whole(self, num_ranks: int, model: str = MODEL) -> Learned:
        return self._run(begin, num_ranks, model, self._folder(num_ranks, model))[0]

    def resumed(self, before: int, after: int, model: str = MODEL) -> list[Learned]:
        """Two jobs that go on from where others were: as `go_on` puts the state into place."""
        self.whole(before, model)
        folder = Path(tempfile.mkdtemp(dir=self._root))
        (folder / "tier").symlink_to(self._folder(before, model) / "tier")
        return self._run(go_on, after, model, folder)

    def _folder(self, num_ranks: int, model: str) -> Path:
        (folder := self._root / f"{model}-{num_ranks}").mkdir(exist_ok=True)
        return folder

    @staticmethod
    def _run(what: Callable[..., Any], num_ranks: int, model: str, folder: Path) -> list[Learned]:
        ranks = run_ranks(what, num_ranks, str(folder), model, deadline_s=100.0)
        ranks = [rank if what is go_on else (rank,) for rank in ranks]
        return [merged(job) for job in zip(*ranks, strict=True)]


def merged(ranks: Sequence[Learned]) -> Learned:
    """A job of its ranks, which agree in all but their losses."""
    assert len({each._replace(losses=None) for each in ranks}) == 1  # type: ignore[arg-type]
    return ranks[0]._replace(losses={i: fmean(each.losses[i] for each in ranks) for i in ranks[0].losses})


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("jobs"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("before", "after"), SHAPES)
def test_losses_are_those_of_training_that_did_not_stop(jobs: Jobs, before: int, after: int) -> None:
    resumed, by_torch = jobs.resumed(before, after)
    assert list(resumed.losses) == list(range(SAVED + 1, LAST + 1))
    assert resumed.notes == (f"spread from {before} ranks over {after}: random states are drawn anew",)
    for whole in (jobs.whole(before), jobs.whole(after)):
        assert resumed.position == whole.position == LAST * GLOBAL_BATCH
        expected = {iteration: whole.losses[iteration] for iteration in resumed.losses}
        assert resumed.losses == pytest.approx(expected, rel=ROUNDING)
    assert resumed.losses == by_torch.losses, "bit for bit those of the same shape from the same state"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (2, 1), (1, 2)])
def test_a_gate_that_draws_noise_draws_the_same_in_every_resume(jobs: Jobs, before: int, after: int) -> None:
    (first, by_torch), (second, _) = (jobs.resumed(before, after, "gpt-moe-tiny") for _ in range(2))
    assert first == second
    assert first.losses == by_torch.losses
    assert first.position == LAST * GLOBAL_BATCH
