"""The examples do what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_loop_of_ones_own_goes_on_after_a_kill_as_if_nothing_had_happened() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "3"]
    ended = subprocess.run(
        [*command, "examples/own_loop.py"],
        cwd=ROOT,
        env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    resumed = re.findall(r"rank \d goes on after iteration (\d+)", ended.stdout)
    assert resumed in (["28", "28"], ["29", "29"])
    assert ended.stdout.count("newest complete checkpoint 50") == 2
