"""The small values of a training: what a checkpoint of other ranks makes of them, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from capricorn.errors import ConfigError
from capricorn.systems.flat_state import FlatState, SavedValues, Values
from capricorn.trainer.data import Batches
from capricorn.trainer.training_state import training_state

CPU = torch.device("cpu")


class NoOptimizer:
    """Owns nothing."""

    owned_tensors = aliases = dict

    def publish(self) -> None: ...


class Job:
    """The ranks of a job, with a position and random states of their own."""

    def __init__(self, folder: Path, num_ranks: int, batch_size: int = 2, *, num_tokens: int = 1000, **other: int):
        self.tokens = folder / f"tokens{num_tokens}.npy"
        np.save(self.tokens, np.arange(num_tokens, dtype=np.uint16))
        options = {"seq_len": 8, "seed": 3} | other
        self.batches = [Batches(self.tokens, rank, num_ranks, batch_size, **options) for rank in range(num_ranks)]

    def state(self, rank: int) -> FlatState:
        return training_state(NoOptimizer(), self.batches[rank], CPU)  # type: ignore[arg-type]

    def saved(self, iteration: int, seed: int = 5) -> SavedValues:
        """What a checkpoint of the iteration has."""
        values: list[Values] = []
        for rank, batches in enumerate(self.batches):
            batches.position = iteration * len(self.batches) * batches.batch_size
            torch.manual_seed(seed + rank)
            values.append({key: value.clone() for key, value in self.state(rank)._capture().items()})
        return SavedValues(iteration, len(values), lambda rank: values[rank])

    def go_on(self, saved: SavedValues, rank: int) -> Values:
        reshard = self.state(rank).reshard
        assert reshard is not None
        return reshard(saved)


def rng_of(values: Values) -> bytes:
    return bytes(values["rng"].tolist())


def test_as_many_ranks_keep_their_random_states(tmp_path: Path) -> None:
    saved = Job(tmp_path, 3).saved(4)
    kept = [Job(tmp_path, 3, batch_size=5).go_on(saved, rank) for rank in range(3)]
    assert [rng_of(values) for values in kept] == [rng_of(saved.of_rank(rank)) for rank in range(3)]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_other_ranks_draw_random_states_that_follow_from_seed_iteration_and_rank_alone(
    tmp_path: Path, num_ranks: int
) -> None:
    def drawn(iteration: int = 4, seed: int = 5) -> list[bytes]:
        job, saved = Job(tmp_path, num_ranks), Job(tmp_path, 3).saved(iteration, seed)
        return [rng_of(job.go_on(saved, rank)) for rank in range(num_ranks)]

    first = drawn()
    torch.rand(7)
    assert drawn() == first, "two resumes give the same"
    assert len({*first, *drawn(iteration=5), *drawn(seed=9)}) == 3 * num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [1, 5])
def test_the_position_is_that_of_the_job_whatever_its_shape(tmp_path: Path, num_ranks: int, batch_size: int) -> None:
    saved = Job(tmp_path, 3, batch_size=2).saved(7)
    going_on = Job(tmp_path, num_ranks, batch_size)
    assert [int(going_on.go_on(saved, rank)["sequences"]) for rank in range(num_ranks)] == [7 * 6] * num_ranks


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"num_tokens": 1001}, "give the --data that"),
        ({"seq_len": 9}, r"give the model\.seq_len that"),
        ({"seed": 4}, "give the --seed that"),
        ({"seq_len": 9, "seed": 4}, r"give the model\.seq_len, --seed that"),
    ],
)
def test_a_position_in_other_sequences_is_refused_by_name(
    tmp_path: Path, num_ranks: int, other: dict[str, int], named: str
) -> None:
    saved = Job(tmp_path, 2).saved(4)
    with pytest.raises(ConfigError, match=named):
        Job(tmp_path, num_ranks, **other).go_on(saved, 0)  # type: ignore[arg-type]


def test_a_checkpoint_of_an_earlier_version_counted_the_batches_of_each_rank(tmp_path: Path) -> None:
    def older(values: Values) -> dict[str, Tensor]:
        return {"rng": values["rng"], "position": torch.tensor(7)}

    now = Job(tmp_path, 3).saved(7)
    saved = SavedValues(7, 3, lambda rank: older(now.of_rank(rank)))
    for num_ranks in (3, 2):
        taken = Job(tmp_path, num_ranks).go_on(saved, 0)
        assert int(taken["sequences"]) == 7 * 3 * 2
        assert (rng_of(taken) == rng_of(saved.of_rank(0))) == (num_ranks == 3)


@pytest.mark.parametrize("cut", [lambda values: {}, lambda values: {"rng": values["rng"]}, lambda values: 7])
def test_a_checkpoint_that_is_of_no_such_training_is_refused(
    tmp_path: Path, cut: Callable[[Values], Values]
) -> None:  # fmt: skip
    now = Job(tmp_path, 2).saved(7)
    with pytest.raises(ConfigError, match="no random state and data position"):
        Job(tmp_path, 2).go_on(SavedValues(7, 2, lambda rank: cut(now.of_rank(rank))), 0)
