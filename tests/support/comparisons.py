"""Run folders written by hand, for comparisons of them: made-up samples, and the record that goes with them; and a
launcher that makes such folders instead of training.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeAlias

import pytest
from rich.console import Console

from capricorn.compare.comparison import Comparison, ComparisonRow
from capricorn.config.cluster import ClusterConfig
from capricorn.config.resolve import load_model
from capricorn.config.scenario import Scenario, SystemConfig, TrainConfig
from capricorn.launch import preflight as machine
from capricorn.launch.launcher import RunListener
from capricorn.records.samples import ITERATIONS, IterationSample, Mode, RunRecord, append, write_run
from capricorn.report.terminal.comparison_table import comparison_table
from capricorn.stats.run_summary import summarize
from tests.cli.test_cli import Launcher, cli

Runs: TypeAlias = dict[str, list[Path]]

ENVIRONMENT = machine.environment("cpu")


def scenario_of(
    system: str = "capricorn", iterations: int = 12, every: int = 1, replicas: int = 2, **sections: Any
) -> Scenario:
    """Two ranks that train a tiny model on the CPU."""
    settings = SystemConfig(name=system, every=every, replicas=replicas)
    parts = {"train": TrainConfig(iterations=iterations, warmup=2), "system": settings}
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


def write_runs(out: Path) -> Runs:
    """Two repeats each; gemini begins at iteration 5, and a rank of capricorn was killed after iteration 8."""
    paces = {"none": 1.0, "capricorn": 1.15, "gemini": 1.4}
    found: Runs = {}
    for number, (system, pace) in enumerate(paces.items()):
        for repeat in range(2):
            scenario = scenario_of(system)
            first = {"gemini": 5, "none": 99}.get(system, 1)

            def fields(iteration: int, rank: int, first: int = first) -> dict[str, Any]:
                return {} if iteration >= first else {"requested": False, "completed": (), "sent_bytes": 0}

            folder = write_folder(
                out, f"{system}-{repeat}", scenario, pace=pace, seed=10 * number + repeat, fields=fields
            )
            found.setdefault(system, []).append(folder)
    redone = found["capricorn"][1]
    for rank in range(2):
        for iteration in range(8, 13):
            append(redone / "iterations.jsonl", sample_of(iteration, rank, 1.3 + rank / 10, attempt=1))
    write_record(redone, scenario_of("capricorn"))
    return found


def rows_of(comparison: Comparison) -> dict[str, ComparisonRow]:
    return {row.label: row for row in comparison.rows}


def show(comparison: Comparison, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(comparison_table(comparison))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def finished(out: Path, *paces: float, system: str = "capricorn") -> list[Path]:
    return [
        write_folder(out, f"{system}{k}", scenario_of(system, iterations=22), pace=pace, seed=k)
        for k, pace in enumerate(paces)
    ]


# --- the command

PACES = {"none": 0.5, "capricorn": 0.55, "gemini": 0.75, "blocking": 1.0}
TINY = ("compare", "--model", "mixtral-tiny", "--iterations", "4", "--device", "cpu")
SYSTEMS = ("--systems", "none,capricorn,gemini:gemini.mu=0.9")


class Systems(Launcher):
    """Each system has its own pace; `ends` are raised in the run of that number, after two iterations."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: dict[int, BaseException] = {}
        self.drained: dict[int, BaseException] = {}
        """The same after the last iteration, whose checkpoint then misses."""
        self.lost: set[int] = set()
        """Numbers of the runs whose last checkpoint never becomes complete."""
        self.at_start: Callable[[], None] | None = None
        self.slower: dict[int, float] = {}

    @classmethod
    def installed(cls, monkeypatch: pytest.MonkeyPatch) -> Self:
        """In the place of the launcher, on a machine that suffices for all."""
        fake = cls()
        monkeypatch.setattr("capricorn.launch.launcher.launch", fake.launch)
        monkeypatch.setattr(machine, "require", lambda scenario: None)
        return fake

    def launch(self, scenario: Scenario, out: Path, listener: RunListener) -> Path:
        number = self.num_runs + 1
        self.end = self.ends.get(number)
        self.stop_after = 2 if self.end else None
        self.fields = {"duration_s": PACES[scenario.system.name] * self.slower.get(number, 1.0)}
        if self.at_start:
            self.at_start()
        run_dir = super().launch(scenario, out, listener)
        if number in self.lost | self.drained.keys():
            self._lose_last(run_dir, scenario)
        if number in self.drained:
            raise self.drained[number]
        return run_dir

    def _lose_last(self, run_dir: Path, scenario: Scenario) -> None:
        path = run_dir / ITERATIONS
        samples = [IterationSample.model_validate_json(line) for line in path.read_text().splitlines()]
        path.unlink()
        for each in samples:
            is_last = each.iteration == scenario.train.iterations
            append(path, each.model_copy(update={"completed": ()}) if is_last else each)
        self._write(run_dir, scenario)

    @property
    def order(self) -> list[str]:
        return [scenario.system.name for scenario in self.scenarios]


def compared(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> dict[str, Any]:
    """What the command prints as JSON."""
    assert cli(*arguments, "--json") == code
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def folder_of(out: Path) -> Path:
    """The folder of the only comparison."""
    (found,) = out.glob("*-compare-*")
    return found
