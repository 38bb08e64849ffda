"""What the run of a case has left behind, and the times that its samples tell. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from capricorn.campaign.economics import MeasuredEconomics, expected_ettr, wasted_s
from capricorn.errors import CapricornError
from capricorn.records.failures import injected
from capricorn.records.samples import RECOVERY_PHASES, EventSample, IterationSample, RecoverySample
from capricorn.units import Seconds


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """What a run has left behind."""

    run_id: str
    samples: Sequence[IterationSample]
    events: Sequence[EventSample]
    recoveries: Sequence[RecoverySample]
    wall_s: Seconds
    failure: str = ""
    """What ended it early, in one sentence."""

    @property
    def persisted(self) -> tuple[int, ...] | None:
        """Checkpoints complete on the persistent tier when the fault was injected, ascending; None if not known."""
        return next((event.on_disk for event in self.events if event.event == "fault"), None)


def mean_iteration_s(samples: Sequence[IterationSample], warmup: int) -> Seconds:
    """Returns the time from the end of one iteration to the end of the next on the slowest rank.

    Raises:
        CapricornError: fewer than two iterations were recorded after warm-up.
    """
    ends = _ends(sample for sample in samples if sample.iteration > warmup)
    if len(ends) < 2:
        raise CapricornError("the run without checkpoints and failures has too few iterations to be timed; use more")
    first, last = min(ends), max(ends)
    return (ends[last] - ends[first]) / (last - first)


def mean_stall_s(samples: Iterable[IterationSample]) -> Seconds:
    """Returns how long an iteration waits for checkpoints on the slowest rank, where one is made in each."""
    stalls: dict[int, Seconds] = {}
    for sample in samples:
        if sample.requested:
            stalls[sample.iteration] = max(stalls.get(sample.iteration, 0.0), sample.stall_s)
    return fmean(stalls.values()) if stalls else 0.0


def mean_complete_s(samples: Sequence[IterationSample]) -> Seconds:
    """Returns the time from the end of an iteration to the end of the one in which its checkpoint was complete."""
    ends = _ends(samples)
    seen: dict[int, Seconds] = {}
    for sample in samples:
        for iteration in sample.completed:
            seen[iteration] = min(seen.get(iteration, sample.at_s), sample.at_s)
    delays = [max(0.0, at_s - ends[iteration]) for iteration, at_s in seen.items() if iteration in ends]
    return fmean(delays) if delays else 0.0


def measured(
    planned: MeasuredEconomics, outcome: RunOutcome, *, iteration_s: Seconds, num_iterations: int, mtbf_s: Seconds
) -> MeasuredEconomics:
    """Returns the system with what its run under the schedule came to.

    Args:
        planned: the system, and how often it was to make a checkpoint.
        outcome: its run with all failures.
        iteration_s: what an iteration takes without checkpoints and failures.
        num_iterations: iterations of the run.
        mtbf_s: the mean time between two failures.
    """
    facts = {"run_id": outcome.run_id, "failure": outcome.failure, "iteration_s": iteration_s}
    if outcome.failure:
        return planned.model_copy(update=facts)
    begin_s = max(e.at_s for e in outcome.events if e.event == "ready" and e.attempt == 0)
    wall_s = max(sample.at_s for sample in outcome.samples) - begin_s
    recovery_s = sum(map(_way_back_s, outcome.recoveries))
    redone = _redone(outcome.samples)
    redone_s = sum(redone) + sum(_broken_off_s(each, outcome, begin_s) for each in outcome.recoveries)
    useful_s = num_iterations * iteration_s
    mean_recovery_s = recovery_s / len(outcome.recoveries) if outcome.recoveries else 0.0
    interval_s = planned.every * iteration_s
    return planned.model_copy(
        update=facts
        | {
            "wall_s": wall_s,
            "num_failures": len(injected(outcome.events)),
            "redone_iterations": len(redone),
            "redone_s": redone_s,
            "recovery_s": recovery_s,
            "checkpointing_s": wall_s - useful_s - redone_s - recovery_s,
            "ettr": useful_s / wall_s,
            "predicted_ettr": expected_ettr(interval_s, planned.checkpoint_s, mean_recovery_s, mtbf_s),
            "predicted_wasted_s": wasted_s(min(planned.complete_s, interval_s), interval_s, mean_recovery_s),
        }
    )


def _ends(samples: Iterable[IterationSample]) -> dict[int, Seconds]:
    """Returns by iteration when the last rank was through with it."""
    ends: dict[int, Seconds] = {}
    for sample in samples:
        ends[sample.iteration] = max(ends.get(sample.iteration, 0.0), sample.at_s)
    return ends


def _way_back_s(recovery: RecoverySample) -> Seconds:
    """Returns the time from the failure until the state was restored."""
    total: Seconds = sum(getattr(recovery, phase) or 0.0 for phase in RECOVERY_PHASES[:-1])
    return total


def _redone(samples: Iterable[IterationSample]) -> list[Seconds]:
    """Returns for each finished iteration that did not last how long it took on the slowest rank."""
    took: dict[tuple[int, int], Seconds] = {}
    for sample in samples:
        key = (sample.iteration, sample.attempt)
        took[key] = max(took.get(key, 0.0), sample.duration_s)
    newest = dict(sorted(took))
    return [duration_s for (iteration, attempt), duration_s in took.items() if attempt != newest[iteration]]


def _broken_off_s(recovery: RecoverySample, outcome: RunOutcome, begin_s: Seconds) -> Seconds:
    """Returns how long the iteration in which the failure came had lasted."""
    failed_s = recovery.detected_at_s - recovery.detect_s
    ends = [sample.at_s for sample in outcome.samples if sample.at_s <= failed_s]
    starts = [e.at_s for e in outcome.events if e.event in ("ready", "resumed") and e.at_s <= failed_s]
    return failed_s - max([*ends, *starts, begin_s], default=failed_s) if failed_s > begin_s else 0.0
