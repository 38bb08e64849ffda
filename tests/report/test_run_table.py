"""What a terminal says of one run."""

from __future__ import annotations

import pytest

from capricorn.report.terminal.run_table import _persists


@pytest.mark.parametrize(
    ("summary", "told"),
    [
        ({}, None),
        ({"persisted": 0, "skipped_persists": 0, "failed_persists": 0, "due_persists": None}, None),
        ({"persisted": 6, "skipped_persists": 0, "failed_persists": 0, "due_persists": 6}, "6 complete"),
        ({"persisted": 4, "skipped_persists": 1, "failed_persists": 0, "due_persists": 6},
         "4 complete, 1 skipped while busy, 1 cut off"),
        ({"persisted": 0, "skipped_persists": 0, "failed_persists": 2, "due_persists": 3}, "2 failed, 1 cut off"),
        ({"persisted": 7, "skipped_persists": 0, "failed_persists": 0, "due_persists": 6}, "7 complete"),
    ],
)  # fmt: skip
def test_every_checkpoint_that_was_due_for_the_disk_is_accounted_for(
    summary: dict[str, int | None], told: str | None
) -> None:
    assert _persists(summary) == ([] if told is None else [("persistent tier", told)])
