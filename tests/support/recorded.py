"""Run folders made by hand, with samples of which every figure is known, and comparisons of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from capricorn.compare.comparison import Comparison, ComparisonRow
from capricorn.config.fields import validate
from capricorn.config.resolve import load_model
from capricorn.config.scenario import Scenario
from capricorn.records.samples import (
    ITERATIONS,
    LOADS,
    OPS,
    Environment,
    IterationSample,
    LoadSample,
    Mode,
    OpSample,
    RunRecord,
    append,
    write_run,
)
from capricorn.stats.run_summary import STORE, summarize

NUM_RANKS, NUM_ITERATIONS, WARMUP, SAMPLED_EVERY = 2, 12, 2, 5
LAYER_S = 0.01

ENVIRONMENT = Environment(
    versions={}, commit="", host="host", cpu="cpu", num_cpus=2, memory_bytes=1 << 30, device="cpu", kernel="Linux",
)  # fmt: skip


def scenario(system: str = "capricorn", **system_fields: Any) -> Scenario:
    """A tiny one on two nodes."""
    parts = {
        "model": load_model("mixtral-tiny"),
        "train": {"iterations": NUM_ITERATIONS, "warmup": WARMUP, "timeline_every": SAMPLED_EVERY},
        "cluster": {"nodes": NUM_RANKS, "ranks_per_node": 1, "device": "cpu"},
        "system": {"name": system, "every": 1} | system_fields,
    }
    return validate(Scenario, parts, "test")


def iteration_sample(iteration: int, rank: int = 0, **fields: Any) -> IterationSample:
    """Of iterations that take 100 ms."""
    done = {"requested": True, "latest_complete": iteration, "completed": [iteration]}
    usual = {
        "attempt": 0, "at_s": 1000 + 0.1 * iteration, "duration_s": 0.1, "stall_s": 0.002, "tokens": 128,
        "loss": 5.0 - 0.01 * iteration, "sent_bytes": 1000, "rss_bytes": 300_000_000,
    }  # fmt: skip
    return IterationSample.model_validate({"iteration": iteration, "rank": rank} | usual | done | fields)


def ops_of(iteration: int, rank: int = 0, *, chunks: Sequence[tuple[str, float, float]] = ()) -> list[OpSample]:
    """Two layers forward and backward, a reduction and an update, then the transfers: kind, begin and end."""
    kinds = [(layer, "forward", kind) for layer in (0, 1) for kind in ("attention", "dispatch", "expert", "combine")]
    kinds += [(-1, "forward", "head"), (-1, "backward", "reduce"), (-1, "forward", "update")]
    ops = [
        OpSample(iteration=iteration, rank=rank, layer=layer, direction=direction, kind=kind,
                 begin_s=number * LAYER_S / 2, end_s=(number + 1) * LAYER_S / 2)
        for number, (layer, direction, kind) in enumerate(kinds)
    ]  # fmt: skip
    return ops + [
        OpSample(iteration=iteration, rank=rank, layer=-1, direction="", kind=kind, begin_s=b, end_s=e, bytes=500)
        for kind, b, e in chunks
    ]


def write_run_folder(
    folder: Path, system: str = "capricorn", *, mode: Mode = "live", fields: Mapping[str, Any] | None = None
) -> Path:
    """A whole run of that system; `fields` go into each of its samples."""
    folder.mkdir(parents=True)
    config = scenario(system)
    chunks = [] if system == "none" else [("stage", 0.0, 0.004), ("send", 0.001, 0.02), ("send", 0.01, 0.03)]
    for iteration in range(1, NUM_ITERATIONS + 1):
        for rank in range(NUM_RANKS):
            append(folder / ITERATIONS, iteration_sample(iteration, rank, **(fields or {})))
            for op in ops_of(iteration, rank, chunks=chunks) if iteration % SAMPLED_EVERY == 0 else ():
                append(folder / OPS, op)
        for layer, busiest in ((0, 40), (1, 200)):
            load = LoadSample(iteration=iteration, layer=layer, tokens_per_expert=[busiest, *[56] * 7])
            append(folder / LOADS, load)
    (folder / STORE).write_text('{"store_bytes": 4000000}', encoding="utf-8")
    summary, verdict = summarize(folder, config)
    record = RunRecord(
        run_id=folder.name, started_at="2026-11-29T15:00:00Z", mode=mode, system=system, seed=0, config=config,
        environment=ENVIRONMENT, summary=summary, verdict=verdict,
    )  # fmt: skip
    write_run(folder, record)
    return folder


def row(label: str = "capricorn", **fields: Any) -> ComparisonRow:
    """A row in which everything is known."""
    usual = {
        "system": label.partition(":")[0], "iteration_s_p50": 0.123456789012345, "stall_s_p50": 0.00078125,
        "slowdown": 1.25, "slowdown_ci": (1.125, 1.375), "speedup_of_capricorn": 1.0625,
        "speedup_ci": (0.96875, 1.15625), "requested": 20, "effective": 19, "peak_rss_bytes": 1_490_000_001,
        "store_bytes": 737_000_003, "sent_bytes_per_iteration": 3075392.5, "tiers": ("local", "peer"), "notes": (),
        "runs": (f"run-{label}",),
    }  # fmt: skip
    return ComparisonRow.model_validate({"label": label} | usual | fields)


def comparison(*rows: ComparisonRow, **fields: Any) -> Comparison:
    """Of these rows."""
    usual = {
        "label": "", "mode": "live", "what": "mixtral-tiny, 2 nodes x 1 rank on cpu; 20 iterations, 1 repeat",
        "valid": True, "faults": (), "runs": tuple(run for each in rows for run in each.runs),
    }  # fmt: skip
    return Comparison.model_validate(usual | {"rows": rows} | fields)
