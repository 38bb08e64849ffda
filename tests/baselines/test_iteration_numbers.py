"""The numbers of iterations with every system that saves: from 0 on, and nothing is done with those out of order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from capricorn.conformance.subject import under_test
from capricorn.conformance.toy_job import ToyRank, make_folder
from capricorn.errors import OrderError
from capricorn.systems.registry import SYSTEMS
from tests.support.spawn import run_ranks

OUT_OF_ORDER = (2, 1, 0, -1, 3.0, True, "3", torch.tensor(3), 1 << 63, None)
"""After iteration 2."""
SAVING = [name for name, entry in SYSTEMS.items() if entry.is_installed and entry.kind != "nothing"]
WITH_PROCESS = {"torch-checkpointing"}


def from_zero(rank: int, num_ranks: int, folder: str, system: str) -> dict[str, Any]:
    """Saves iteration 0 alone, restores it, goes on with numpy's numbers to 2, and tries what is out of order."""
    subject, place = under_test(system, timeout_s=20.0), Path(folder)
    if rank == 0:
        make_folder(place, subject)
    dist.barrier()
    toy = ToyRank(subject, rank, place)
    first = toy.system.first_iteration
    for iteration in range(first + 1):
        toy.iterate(iteration)
    toy.system.drain(20.0)
    told: dict[str, Any] = {"first": first, "latest": toy.system.latest_complete()}
    toy.system.close()
    dist.barrier()
    again = ToyRank(subject, rank, place, attempt=1)
    restored = again.restore()
    assert restored is not None
    told["restored"] = [restored["iteration"], restored["torn"], restored["foreign"]]
    for iteration in range(first + 1, first + 3):
        again.iterate(np.int64(iteration))  # type: ignore[arg-type]
    again.system.drain(20.0)
    staged, told["complaints"] = again.system.counters(), []
    before = (staged.staged_bytes, staged.sent_bytes, again.system.latest_complete())
    hooks = (again.system.before_update, again.system.after_update)
    for iteration in (again.system.iteration_order.last, *OUT_OF_ORDER[1:]):
        for hook in hooks:
            try:
                hook(iteration)  # type: ignore[arg-type]
            except OrderError as error:
                told["complaints"].append(str(error))
    try:
        again.system.restore()
    except OrderError as error:
        told["complaints"].append(str(error))
    again.system.drain(20.0)
    after = again.system.counters()
    told["is_unchanged"] = before == (after.staged_bytes, after.sent_bytes, again.system.latest_complete())
    told["last"] = before[2]
    again.system.close()
    return told


@pytest.mark.parametrize(
    "system", [pytest.param(each, marks=[pytest.mark.slow] if each in WITH_PROCESS else []) for each in SAVING]
)
def test_the_first_iteration_may_be_0_and_what_is_out_of_order_is_refused_before_it_is_saved(
    system: str, tmp_path: Path
) -> None:
    for told in run_ranks(from_zero, 2, str(tmp_path / "job"), system, deadline_s=100.0):
        first = told["first"]
        assert told["latest"] == first
        assert told["restored"] == [first, [], []]
        assert told["last"] == first + 2
        assert len(told["complaints"]) == 2 * len(OUT_OF_ORDER) + 1
        assert all(f"{first + 2}" in complaint for complaint in told["complaints"])
        assert told["is_unchanged"]
