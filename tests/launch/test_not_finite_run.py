"""A run by the real command line whose losses are not finite: it trains on, and comes back bit for bit."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.support.runs import assert_ok, assert_same_losses, faults, run

WILD = ("--iterations", "20", "--set", "train.lr=1e30", "--set", "train.clip_norm=1e30",
        "--set", "train.lr_warmup_iterations=0")  # fmt: skip


@pytest.mark.slow
def test_a_state_that_is_not_finite_is_kept_and_restored_like_any_other(tmp_path: Path) -> None:
    reference = run(tmp_path / "reference", *WILD)
    ended = run(tmp_path / "killed", *WILD, *faults("kill@rank=1,iteration=11"))
    for each in (reference, ended):
        assert_ok(each)
        assert math.isnan(each.samples[-1].loss)
        assert each.folder is not None
        json.loads((each.folder / "run.json").read_text(), parse_constant=pytest.fail)
        first = each.summary["not_finite_from"]
        assert f"the loss is not finite from iteration {first} on; training goes on" in each.stdout.splitlines()
        assert f"the loss is not finite from iteration {first} on" in " ".join(each.summary["notes"])
    assert len(ended.recoveries) == 1
    assert ended.resumed[0] >= ended.summary["not_finite_from"]
    assert_same_losses(ended, reference)
