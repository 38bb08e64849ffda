"""The recoveries of a run, put together from its events and samples: what failed, and how long each phase took."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from capricorn.records.failures import cause_of, injected
from capricorn.records.samples import (
    EVENTS,
    ITERATIONS,
    RECOVERIES,
    EventSample,
    IterationSample,
    RecoverySample,
    append,
    read_samples,
)


def write_recoveries(run_dir: Path) -> None:
    """Writes `recoveries.jsonl` of a run folder that has none yet."""
    events = list(read_samples(run_dir / EVENTS, EventSample))
    samples = list(read_samples(run_dir / ITERATIONS, IterationSample))
    for recovery in recoveries_of(events, samples):
        append(run_dir / RECOVERIES, recovery)


def recoveries_of(events: Sequence[EventSample], samples: Sequence[IterationSample]) -> list[RecoverySample]:
    """Returns a recovery for each attempt but the first that came to be ready, in order."""
    ready = sorted({event.attempt for event in events if event.event == "ready"})
    return [_recovery(before, attempt, events, samples) for before, attempt in pairwise(ready)]


def _recovery(
    before: int, attempt: int, events: Sequence[EventSample], samples: Sequence[IterationSample]
) -> RecoverySample:
    """Returns how `attempt` followed on the attempt `before`, which was the last to be ready."""
    faults = [e for e in injected(events) if before <= e.attempt < attempt]
    since = [e for e in events if before <= e.attempt < attempt]
    failures = [e for e in since if e.event == "failed"]
    ready_s = min(e.at_s for e in events if e.event == "ready" and e.attempt == attempt)
    detected_s = min((e.at_s for e in failures), default=faults[-1].at_s if faults else ready_s)
    # The last one before it was noticed: earlier ones may have done no harm.
    before_it = [e for e in faults if e.at_s <= detected_s]
    causes = [max(before_it, key=lambda event: event.at_s)] if before_it else faults
    fault_s = min((e.at_s for e in causes), default=detected_s)
    resumed = next((e for e in events if e.event == "resumed" and e.attempt == attempt), None)
    iteration = resumed.iteration if resumed is not None else 0
    first = [s.duration_s for s in samples if s.attempt == attempt and s.iteration == iteration + 1]
    return RecoverySample(
        attempt=attempt,
        what=causes[0].detail if causes else cause_of(since) or "unknown",
        detected_at_s=detected_s,
        resumed_iteration=iteration,
        lost_iterations=max(0, _reached(before, events, samples) - iteration),
        sources=resumed.sources if resumed is not None else (),
        detect_s=max(0.0, detected_s - fault_s),
        restart_s=max(0.0, ready_s - detected_s),
        agree_s=resumed.agree_s if resumed is not None else 0.0,
        fetch_s=resumed.fetch_s if resumed is not None else 0.0,
        load_s=resumed.load_s if resumed is not None else 0.0,
        first_iteration_s=max(first, default=None),
    )


def _reached(attempt: int, events: Iterable[EventSample], samples: Iterable[IterationSample]) -> int:
    """Returns the last iteration that some rank had finished, or was restored to, in that attempt."""
    restored = [e.iteration for e in events if e.event == "resumed" and e.attempt == attempt]
    return max([s.iteration for s in samples if s.attempt == attempt] + restored, default=0)
