"""The summary and the verdict of a run, computed from its raw samples and from nothing else."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pandas as pd

from capricorn.config.scenario import Scenario
from capricorn.errors import ConfigError
from capricorn.records.samples import (
    EVENTS,
    ITERATIONS,
    RECOVERIES,
    EventSample,
    IterationSample,
    RecoverySample,
    read_samples,
)
from capricorn.stats.fidelity import fidelity, fidelity_faults
from capricorn.stats.numbers import number, quantile, ratio
from capricorn.stats.planner_stats import planning

SETTLING = 3
"""Checkpoints after which a system is taken to have settled."""
PERSISTS = ("persisted", "failed_persists", "skipped_persists")
STORE = "store.json"
"""Written by the launcher: `{"store_bytes": n}`, the largest size of all stores of the run."""

Summary: TypeAlias = dict[str, Any]


def summarize(run_dir: Path, scenario: Scenario, num_cpus: int = 1) -> tuple[Summary, str]:
    """The summary of a run folder, finished or not, and its verdict: `ok`, or what is wrong in one sentence.

    `num_cpus` is what the shares of CPU time refer to.

    Raises:
        ConfigError: a file of the folder is damaged.
    """
    return summary_of(RunSamples.read(run_dir, scenario), run_dir, scenario, num_cpus)


def summary_of(run: RunSamples, run_dir: Path, scenario: Scenario, num_cpus: int) -> tuple[Summary, str]:
    """The same of samples that have been read from that folder.

    Raises:
        ConfigError: another file of the folder is damaged.
    """
    summary: Summary = {"iterations": run.num_done, **_times(run), **_checkpoints(run), **_recoveries(run)}
    summary |= _moved(run) | _memory(run, run_dir) | planning(run.measured) | fidelity(run_dir, scenario, num_cpus)
    return summary, verdict(summary, scenario)


def verdict(summary: Summary, scenario: Scenario) -> str:
    """`ok`, or every way in which the run fell short of what was asked for."""
    asked, faults = scenario.train.iterations, []
    if summary["iterations"] < asked:
        faults.append(f"stopped after {summary['iterations']} of {asked} iterations")
    if summary["requested"] and not summary["effective"]:
        faults.append("no checkpoint became complete")
    elif summary["effective"] < summary["requested"]:
        faults.append(f"effective checkpoints {summary['effective']} of {summary['requested']} requested")
    if summary["faults_struck"] < len(scenario.faults) and not scenario.launch.nnodes:
        faults.append(f"faults that struck {summary['faults_struck']} of {len(scenario.faults)}")
    is_measured = scenario.cluster.is_measured
    faults += fidelity_faults(summary, "give longer ops" if is_measured else "set cluster.iteration_s higher")
    return "; ".join(faults) or "ok"


@dataclass(frozen=True, slots=True)
class RunSamples:
    """The samples of a run: all of them, those that count, and the same folded over ranks."""

    raw: list[IterationSample]
    samples: pd.DataFrame
    """Every sample of every attempt, `raw` as a table."""
    lasting: pd.DataFrame
    """Of these what counts: one row per rank and iteration done, of its last attempt."""
    iterations: pd.DataFrame
    """One row per iteration done, indexed by it: its last attempt, folded over ranks."""
    steady: pd.DataFrame
    """The iterations after warm-up and after the first checkpoints, by which a system settles."""
    measured: pd.DataFrame
    """The samples of which `steady` was folded."""
    recoveries: list[RecoverySample]
    events: list[EventSample]

    @classmethod
    def read(cls, run_dir: Path, scenario: Scenario) -> RunSamples:
        raw = list(read_samples(run_dir / ITERATIONS, IterationSample))
        events = list(read_samples(run_dir / EVENTS, EventSample))
        samples = _frame(raw, scenario)
        lasting = _lasting(samples, _newest_start(samples, events), _num_ranks(samples, scenario))
        iterations = _over_ranks(lasting)
        steady = _steady(iterations, scenario)
        return cls(
            raw=raw,
            samples=samples,
            lasting=lasting,
            iterations=iterations,
            steady=steady,
            measured=lasting[lasting["iteration"].isin(steady.index)],
            recoveries=list(read_samples(run_dir / RECOVERIES, RecoverySample)),
            events=events,
        )

    @property
    def num_done(self) -> int:
        """Iterations done; the last of them may have been restored though no rank lived to record it."""
        recorded = 0 if self.iterations.empty else int(self.iterations.index.max())
        return max(recorded, _newest_start(self.samples, self.events).iteration)


class _Start(NamedTuple):
    """The newest start of the job, and the iteration it was restored to; 0 is the initial state."""

    attempt: int
    iteration: int


def _newest_start(samples: pd.DataFrame, events: list[EventSample]) -> _Start:
    starts = [_Start(event.attempt, event.iteration) for event in events if event.event == "resumed"]
    starts += [_Start(int(attempt), 0) for attempt in samples["attempt"].unique()]
    return max(starts, default=_Start(0, 0))


def _frame(raw: list[IterationSample], scenario: Scenario) -> pd.DataFrame:
    frame = pd.DataFrame([sample.model_dump() for sample in raw], columns=list(IterationSample.model_fields))
    # The trainer asks any system by the interval alone, also the one that keeps nothing.
    frame["requested"] = frame["requested"].astype(bool) & (scenario.system.name != "none")
    return frame


def _lasting(samples: pd.DataFrame, start: _Start, num_ranks: int) -> pd.DataFrame:
    """Samples of the iterations whose effect lasts: not redone, not rolled back, and done by every rank.

    A rank that was killed between an iteration and its sample did that iteration all the same, if it was restored.
    """
    newest = samples.loc[samples["attempt"] == start.attempt, "iteration"]
    reached = start.iteration if newest.empty else newest.max()
    kept = samples[samples["iteration"] <= reached].drop_duplicates(["attempt", "iteration", "rank"])
    kept = kept[kept["attempt"] == kept.groupby("iteration")["attempt"].transform("max")]
    ranks = kept.groupby("iteration")["rank"].transform("count")
    lasting: pd.DataFrame = kept[(ranks == num_ranks) | (kept["iteration"] <= start.iteration)]
    return lasting


def _num_ranks(samples: pd.DataFrame, scenario: Scenario) -> int:
    """Ranks whose samples belong in this folder: all, or on real machines those of one node at least."""
    if scenario.launch.nnodes:
        return max(int(samples["rank"].nunique()), scenario.topology.ranks_per_node)
    return scenario.topology.world_size


def _over_ranks(kept: pd.DataFrame) -> pd.DataFrame:
    """An iteration lasts as long as on its slowest rank, and its tokens are those of all."""
    return kept.groupby("iteration").agg(
        attempt=("attempt", "first"),
        duration_s=("duration_s", "max"), stall_s=("stall_s", "max"), loss=("loss", "mean"), tokens=("tokens", "sum"),
        sent_bytes=("sent_bytes", "sum"), requested=("requested", "any"), latest_complete=("latest_complete", "max"),
    )  # fmt: skip


def _steady(iterations: pd.DataFrame, scenario: Scenario) -> pd.DataFrame:
    """After warm-up and after the first checkpoints, unless nothing else was measured.

    The first one allocates and connects; by how it and the next ones leave, a planner comes to know the link.
    """
    measured = iterations[iterations.index > scenario.train.warmup]
    requested = iterations.index[iterations["requested"]][:SETTLING]
    later = measured[measured.index > requested[-1]] if len(requested) else measured
    return measured if later.empty else later


def _times(run: RunSamples) -> Summary:
    steady, requested = run.steady, run.iterations[run.iterations["requested"]]
    duration, stall = steady["duration_s"], steady["stall_s"]
    return {
        "measured_iterations": len(steady),
        **{f"iteration_s_p{p}": quantile(duration, p) for p in (50, 95, 99)},
        **{f"stall_s_p{p}": quantile(stall, p) for p in (50, 95)},
        "stall_s_max": number(stall.max()),
        "first_stall_s": number(requested["stall_s"].iloc[0]) if len(requested) else None,
        "slowdown": None,
        "tokens_per_s": ratio(steady["tokens"].sum(), duration.sum()),
        "final_loss": number(run.iterations["loss"].iloc[-1]) if len(run.iterations) else None,
    }


def _checkpoints(run: RunSamples) -> Summary:
    """Requested checkpoints, those of them that became complete everywhere, and how far the newest one lagged."""
    requested = [int(i) for i in run.iterations.index[run.iterations["requested"]]]
    complete = _complete(run)
    lag = run.steady.index - run.steady["latest_complete"] if requested else pd.Series(dtype=float)
    return {
        "requested": len(requested),
        "effective": sum(i in complete for i in requested),
        "failed_saves": int(run.samples["failed_saves"].sum()),
        **_persists(run),
        "replica_lag_p50": quantile(lag, 50),
        "replica_lag_max": number(lag.max()),
    }


def _persists(run: RunSamples) -> Summary:
    """Checkpoints on disk, as rank 0 saw them, which completes them; of all attempts."""
    sightings: list[IterationSample | EventSample] = [*run.raw, *run.events]
    first = [sighting for sighting in sightings if sighting.rank == 0]
    return {key: sum(getattr(sighting, key) for sighting in first) for key in PERSISTS}


def _complete(run: RunSamples) -> set[int]:
    """Iterations whose state, as last computed, became complete on all owners: seen then, or restored later."""
    sightings: list[IterationSample | EventSample] = [*run.raw, *run.events]
    seen = {(i, sighting.attempt) for sighting in sightings for i in sighting.completed}
    attempts = run.iterations["attempt"]
    last = dict(zip(map(int, attempts.index), map(int, attempts), strict=True))
    resumed = [event for event in run.events if event.event == "resumed"]
    restored = {event.iteration for event in resumed if event.attempt > last.get(event.iteration, event.attempt)}
    return {i for i, attempt in last.items() if (i, attempt) in seen} | restored


def _recoveries(run: RunSamples) -> Summary:
    phases = ("detect_s", "restart_s", "agree_s", "fetch_s", "load_s", "first_iteration_s")
    return {
        "recoveries": len(run.recoveries),
        "lost_iterations": sum(recovery.lost_iterations for recovery in run.recoveries),
        "recovery_s": float(sum(getattr(recovery, phase) or 0.0 for recovery in run.recoveries for phase in phases)),
        "faults_struck": sum(event.event == "fault" for event in run.events),
    }


def _moved(run: RunSamples) -> Summary:
    """Bytes of all attempts, redone iterations included, and their rate in the steady state."""
    return {
        **{key: sum(getattr(s, key) for s in (*run.raw, *run.events)) for key in ("staged_bytes", "sent_bytes")},
        "sent_bytes_per_s": ratio(run.steady["sent_bytes"].sum(), run.steady["duration_s"].sum()),
    }


def _memory(run: RunSamples, run_dir: Path) -> Summary:
    peaks = run.samples.groupby("rank")["rss_bytes"].max()
    return {
        "peak_rss_bytes": int(peaks.sum()),
        "peak_rss_rank_bytes": int(peaks.max()) if len(peaks) else 0,
        "store_bytes": _store_bytes(run_dir / STORE),
    }


def _store_bytes(path: Path) -> int | None:
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["store_bytes"])
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError):
        raise ConfigError(f"{path} is damaged: it does not give store_bytes") from None
