"""The summary and the verdict of a run, computed from its raw samples and from nothing else."""

from __future__ import annotations

import json
from math import isfinite
from pathlib import Path
from typing import Any, TypeAlias

from capricorn.config.scenario import Scenario
from capricorn.errors import ConfigError
from capricorn.files import failure, read_text
from capricorn.records.failures import injected
from capricorn.records.samples import EventSample, IterationSample
from capricorn.stats.fidelity import fidelity, fidelity_faults
from capricorn.stats.numbers import quantile, ratio, total
from capricorn.stats.planner_stats import planning
from capricorn.stats.run_samples import RunSamples, grouped
from capricorn.systems.registry import recorded

PERSISTS = ("persisted", "failed_persists", "skipped_persists")
STORE = "store.json"
"""Written by the launcher: `{"store_bytes": n}`, the largest size of all stores of the run."""

Summary: TypeAlias = dict[str, Any]


def summarize(run_dir: Path, scenario: Scenario, num_cpus: int = 1) -> tuple[Summary, str]:
    """Returns the summary of a run folder, finished or not, and its verdict: `ok`, or what is wrong in one sentence.

    `num_cpus` is what the shares of CPU time refer to.

    Raises:
        ConfigError: a file of the folder is damaged.
    """
    return summary_of(RunSamples.read(run_dir, scenario), run_dir, scenario, num_cpus)


def summary_of(run: RunSamples, run_dir: Path, scenario: Scenario, num_cpus: int) -> tuple[Summary, str]:
    """Returns the summary and the verdict of samples that have been read from a run folder.

    Args:
        run: the samples.
        run_dir: the folder they were read from, which also holds the size of the store and the emulation's samples.
        scenario: what the run was.
        num_cpus: what the shares of CPU time refer to.

    Raises:
        ConfigError: another file of the folder is damaged.
    """
    summary: Summary = {"iterations": run.num_done, **_times(run), **_checkpoints(run), **_recoveries(run)}
    summary |= {"due_persists": _due_persists(run, scenario)}
    summary |= _moved(run) | _memory(run, run_dir) | planning(run.measured) | fidelity(run_dir, scenario, num_cpus)
    said = verdict(summary, scenario)
    if unheard := _unheard(run, scenario):
        said = "; ".join([f"no record of rank {', '.join(map(str, unheard))}", *([said] if said != "ok" else [])])
    return summary | _remarks(run), said


def _unheard(run: RunSamples, scenario: Scenario) -> list[int]:
    """Returns the ranks that have left no sample, where others have: those of a machine whose records are elsewhere."""
    heard = {sample.rank for sample in run.samples}
    return sorted(set(range(scenario.topology.world_size)) - heard) if heard else []


def verdict(summary: Summary, scenario: Scenario) -> str:
    """Returns `ok`, or every way in which the run fell short of what was asked for."""
    asked, faults = scenario.train.iterations, []
    if summary["iterations"] < asked:
        faults.append(f"stopped after {summary['iterations']} of {asked} iterations")
    elif scenario.system.every and scenario.system.name != "none" and not summary["requested"]:
        faults.append(f"no checkpoint came due in {asked} iterations: train longer, or make them more often")
    if summary["requested"] and not summary["effective"]:
        faults.append("no checkpoint became complete")
    elif summary["effective"] < summary["requested"]:
        faults.append(f"effective checkpoints {summary['effective']} of {summary['requested']} requested")
    faults += _persist_faults(summary)
    if summary["faults_triggered"] < len(scenario.faults):
        faults.append(f"faults that were triggered {summary['faults_triggered']} of {len(scenario.faults)}")
    is_measured = scenario.cluster.is_measured
    faults += fidelity_faults(summary, "give longer ops" if is_measured else "set cluster.iteration_s higher")
    return "; ".join(faults) or "ok"


def _persist_faults(summary: Summary) -> list[str]:
    """Returns what is wrong if checkpoints were to go to the persistent tier and none of them arrived."""
    due = summary["due_persists"]
    if due is None or summary["persisted"]:
        return []
    if not due:
        return ["no checkpoint came due for the persistent tier: train longer, or persist more often"]
    return [f"persisted 0 of {due} checkpoints that were due: {summary['failed_persists']} failed"]


def _times(run: RunSamples) -> Summary:
    durations_s, stalls_s = [each.duration_s for each in run.steady], [each.stall_s for each in run.steady]
    return {
        "measured_iterations": len(run.steady),
        **{f"iteration_s_p{p}": quantile(durations_s, p) for p in (50, 95, 99)},
        **{f"stall_s_p{p}": quantile(stalls_s, p) for p in (50, 95)},
        "stall_s_max": max(stalls_s, default=None),
        "first_stall_s": next((each.stall_s for each in run.requested), None),
        "slowdown": None,
        "tokens_per_s": ratio(sum(each.tokens for each in run.steady), total(durations_s)),
        "final_loss": run.iterations[-1].loss if run.iterations else None,
    }


def _remarks(run: RunSamples) -> Summary:
    """Returns what is to be known of a run and does not speak against it.

    A loss that is not finite is none of its faults: how well a recipe trains is not what is measured, and checkpoints
    of such a state are kept and compared like any other.
    """
    first = next((each.iteration for each in run.iterations if not isfinite(each.loss)), None)
    notes = [] if first is None else [f"the loss is not finite from iteration {first} on"]
    return {"not_finite_from": first, "notes": [*notes, *run.notes]}


def _checkpoints(run: RunSamples) -> Summary:
    """Returns the requested checkpoints, those that became complete everywhere, and how far the newest one lagged."""
    complete = _complete(run)
    lags = [float(each.iteration - each.latest_complete) for each in run.steady] if run.requested else []
    return {
        "requested": len(run.requested),
        "effective": sum(each.iteration in complete for each in run.requested),
        "failed_saves": sum(sample.failed_saves for sample in run.samples),
        **_persists(run),
        "replica_lag_p50": quantile(lags, 50),
        "replica_lag_max": max(lags, default=None),
    }


def _sightings(run: RunSamples) -> list[IterationSample | EventSample]:
    """Returns all that says what became of checkpoints, of all attempts."""
    return [*run.samples, *run.events]


def _persists(run: RunSamples) -> Summary:
    """Returns the checkpoints of the persistent tier as rank 0 saw them, which completes them."""
    first = [sighting for sighting in _sightings(run) if sighting.rank == 0]
    return {key: sum(getattr(sighting, key) for sighting in first) for key in PERSISTS}


def _due_persists(run: RunSamples, scenario: Scenario) -> int | None:
    """Returns how many checkpoints were to go to the persistent tier; None if none was to, or rank 0 wrote elsewhere.

    One is due when `persist.every` iterations have passed since the last one.
    """
    every, entry = scenario.persist.every, recorded(scenario.system.name)
    is_seen = any(sighting.rank == 0 for sighting in _sightings(run))
    if not (every and scenario.system.every and entry is not None and entry.replicates and is_seen):
        return None
    return len({each.iteration // every for each in run.requested} - {0})


def _complete(run: RunSamples) -> set[int]:
    """Returns the iterations whose last computed state became complete on all owners: seen then, or restored later."""
    seen = {(i, sighting.attempt) for sighting in _sightings(run) for i in sighting.completed}
    last = {each.iteration: each.attempt for each in run.iterations}
    resumed = [event for event in run.events if event.event == "resumed"]
    restored = {event.iteration for event in resumed if event.attempt > last.get(event.iteration, event.attempt)}
    return {i for i, attempt in last.items() if (i, attempt) in seen} | restored


def _recoveries(run: RunSamples) -> Summary:
    return {
        "recoveries": len(run.recoveries),
        "lost_iterations": sum(recovery.lost_iterations for recovery in run.recoveries),
        "recovery_s": float(sum(seconds for recovery in run.recoveries for seconds in recovery.phases_s.values())),
        "faults_triggered": len(injected(run.events)),
    }


def _moved(run: RunSamples) -> Summary:
    """Returns the bytes of all attempts, redone iterations included, and their rate in the steady state."""
    sent_bytes = sum(each.sent_bytes for each in run.steady)
    return {
        **{key: sum(getattr(s, key) for s in _sightings(run)) for key in ("staged_bytes", "sent_bytes")},
        "sent_bytes_per_s": ratio(sent_bytes, total([each.duration_s for each in run.steady])),
    }


def _memory(run: RunSamples, run_dir: Path) -> Summary:
    peaks = [max(sample.rss_bytes for sample in each) for each in grouped(run.samples, "rank")]
    return {
        "peak_rss_bytes": sum(peaks),
        "peak_rss_rank_bytes": max(peaks, default=0),
        "store_bytes": _store_bytes(run_dir / STORE),
    }


def _store_bytes(path: Path) -> int | None:
    try:
        return int(json.loads(read_text(path))["store_bytes"])
    except FileNotFoundError:
        return None
    except OSError as error:
        raise failure(f"read {path}", error) from None
    except (ValueError, TypeError, KeyError):
        raise ConfigError(f"{path} is damaged: it does not give store_bytes") from None
