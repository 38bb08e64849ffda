"""What hiding checkpoints is worth: a scale model with none, blocking, planned or not, with a low class or without."""

from __future__ import annotations

import json
import subprocess
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.timing import ratio
from capricorn.process import PYTHON
from capricorn.units import format_seconds

ROUNDS = 3
FOLDER = "examples/clusters"
SETTINGS = (
    *("--cluster", f"{FOLDER}/measured.toml", "--model", f"{FOLDER}/moe16.toml", "--loads", "transient"),
    *("--iterations", "20", "--json"),
)
STREAM, LOW_CLASS = ("--set", "planner.spans=none"), ("--set", "cluster.qos=true")
WAYS = {
    "none": ("--system", "none"),
    "blocking": ("--system", "blocking"),
    "as fast as it goes, one queue": STREAM,
    "as fast as it goes, low class": (*STREAM, *LOW_CLASS),
    "planned, one queue": (),
    "planned, low class": LOW_CLASS,
}


def _run(way: str, out: str) -> dict[str, Any]:
    command = [*PYTHON, "capricorn.cli", "run", *WAYS[way], *SETTINGS, "--out", out]
    record: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return record


def main() -> None:
    """Prints iteration times relative to no checkpoint, each way once in every round."""
    records: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with TemporaryDirectory() as out:
        for count in range(ROUNDS):
            for way in WAYS if count % 2 else reversed(WAYS):
                records[way].append(_run(way, out))
    times = {way: [record["summary"]["iteration_s_p50"] for record in done] for way, done in records.items()}
    summary = records["none"][0]["summary"]
    losses = {record["summary"]["final_loss"] for done in records.values() for record in done}
    print(f"none: {', '.join(map(format_seconds, times['none']))}; rho {summary['rho']:.2f}")
    for way in list(WAYS)[1:]:
        print(f"{way}: {ratio(times[way], times['none'])} of none")
    print(f"final losses equal: {len(losses) == 1}")
