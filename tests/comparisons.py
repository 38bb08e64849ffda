"""Run folders written by hand, for comparisons of them: made-up samples, and the record that goes with them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from capricorn.cluster import ClusterConfig
from capricorn.config import Scenario, SystemConfig, TrainConfig
from capricorn.harness import machine
from capricorn.records import ITERATIONS, IterationSample, Mode, RunRecord, append, write_run
from capricorn.report.summary import summarize
from capricorn.resolve import load_model

ENVIRONMENT = machine.environment("cpu")


def scenario_of(system: str = "capricorn", iterations: int = 12, **sections: Any) -> Scenario:
    """Two ranks that train a tiny model on the CPU."""
    parts = {"train": TrainConfig(iterations=iterations, warmup=2), "system": SystemConfig(name=system)}
    cluster = ClusterConfig(nodes=2, ranks_per_node=1, device="cpu")
    return Scenario.model_validate({"model": load_model("mixtral-tiny"), "cluster": cluster} | parts | sections)


def sample_of(iteration: int, rank: int, seconds: float, **fields: Any) -> IterationSample:
    """Complete at once; the loss depends on iteration and rank alone."""
    usual = {
        "attempt": 0, "at_s": float(iteration), "duration_s": seconds, "stall_s": seconds / 8, "tokens": 100,
        "loss": 5 - iteration / 100 + rank / 1000, "sent_bytes": 1000 * iteration + rank, "requested": True,
        "latest_complete": iteration, "completed": (iteration,), "rss_bytes": 10**6 + iteration,
    }  # fmt: skip
    return IterationSample.model_validate({"iteration": iteration, "rank": rank} | usual | fields)


def write_folder(
    out: Path, run_id: str, scenario: Scenario, *, pace: float = 1.0, seed: int = 0, mode: Mode = "live",
    fields: Callable[[int, int], dict[str, Any]] = lambda iteration, rank: {}, **record: Any,
) -> Path:  # fmt: skip
    """A finished run whose iterations take about `pace` seconds; `fields` changes samples by iteration and rank."""
    draw = random.Random(seed)
    folder = out / run_id
    folder.mkdir(parents=True)
    for iteration in range(1, scenario.train.iterations + 1):
        for rank in range(scenario.topology.world_size):
            seconds = pace * draw.uniform(0.9, 1.1)
            append(folder / ITERATIONS, sample_of(iteration, rank, seconds, **fields(iteration, rank)))
    (folder / "store.json").write_text(json.dumps({"store_bytes": 7000 + seed}))
    return write_record(folder, scenario, mode=mode, **record)


def write_record(folder: Path, scenario: Scenario, *, mode: Mode = "live", **fields: Any) -> Path:
    """The record of the samples in the folder."""
    summary, verdict = summarize(folder, scenario)
    usual = {
        "run_id": folder.name, "started_at": "2026-11-30T10:00:00+00:00", "mode": mode, "system": scenario.system.name,
        "seed": scenario.train.seed, "config": scenario, "environment": ENVIRONMENT, "summary": summary,
        "verdict": verdict,
    }  # fmt: skip
    write_run(folder, RunRecord.model_validate(usual | fields))
    return folder
