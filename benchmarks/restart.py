"""From a failure to the next finished iteration on mixtral-tiny: ranks from the fork server against torchrun."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.timing import ratio
from capricorn.process import PYTHON
from capricorn.records.samples import RECOVERIES, RECOVERY_PHASES, RecoverySample, read_samples
from capricorn.units import Seconds

ROUNDS = 5
WAYS = ("fork-server", "torchrun")
FAULTS = ("kill@rank=1,iteration=8", "kill-all@iteration=8", "node-loss@node=1,iteration=8")


def _phases(fault: str, way: str, out: str) -> list[Seconds]:
    command = [*PYTHON, "capricorn.cli", "run", "--model", "mixtral-tiny", "--iterations", "12"]
    command += ["--fault", fault, "--set", f"launch.restart={way}", "--out", out, "--json"]
    run_id = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)["run_id"]
    (recovery,) = read_samples(Path(out) / run_id / RECOVERIES, RecoverySample)
    return [getattr(recovery, phase) for phase in RECOVERY_PHASES]


def main() -> None:
    """Prints the phases of each way and the ratio of their sums."""
    with TemporaryDirectory() as out:
        for fault in FAULTS:
            measured: dict[str, list[list[Seconds]]] = {way: [] for way in WAYS}
            for count in range(ROUNDS):
                for way in WAYS if count % 2 else reversed(WAYS):
                    measured[way].append(_phases(fault, way, out))
            totals = {way: [sum(phases) for phases in rounds] for way, rounds in measured.items()}
            speedup = ratio(totals["torchrun"], totals["fork-server"])
            print(f"{fault}: torchrun / fork-server {speedup} over {ROUNDS} rounds")
            for way, rounds in measured.items():
                parts = [
                    f"{name.removesuffix('_s')} {median(part):.3f}"
                    for name, part in zip(RECOVERY_PHASES, zip(*rounds, strict=True), strict=True)
                ]
                print(f"  {way}: {median(totals[way]):.3f} s, worst {max(totals[way]):.3f} s: {', '.join(parts)}")
