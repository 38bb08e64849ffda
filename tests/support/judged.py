"""What runs into which a fault was injected have left, made by hand, with losses and digests of which all is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from capricorn.campaign.outcomes import RunOutcome
from capricorn.campaign.verdict import Judgement, Reference, judge, reference_of
from capricorn.config.fault_spec import FaultSpec
from capricorn.config.scenario import Scenario
from capricorn.records.samples import EventSample, IterationSample, RecoverySample
from tests.support.recorded import NUM_ITERATIONS, NUM_RANKS, iteration_sample, scenario

KILL = FaultSpec.parse("kill@rank=1,iteration=7")


def sample(iteration: int, rank: int, attempt: int = 0, **fields: Any) -> IterationSample:
    """Its loss depends on iteration and rank alone."""
    usual = {"loss": 5 - iteration / 7 - rank / 1000, "attempt": attempt}
    return iteration_sample(iteration, rank, **usual | fields)


def event(name: str, rank: int = 0, attempt: int = 0, **fields: Any) -> EventSample:
    return EventSample.model_validate({"event": name, "at_s": 1000.0, "attempt": attempt, "rank": rank} | fields)


def recovery(resumed: int, lost: int, sources: Sequence[str] = ("local", "local"), **fields: Any) -> RecoverySample:
    phases = {"detect_s": 0.1, "restart_s": 0.2, "agree_s": 0.01, "fetch_s": 0.02, "load_s": 0.03}
    usual = {
        "attempt": 1, "what": str(KILL), "detected_at_s": 1000.7, "resumed_iteration": resumed,
        "lost_iterations": lost, "sources": tuple(sources), "first_iteration_s": 0.14,
    }  # fmt: skip
    return RecoverySample.model_validate(usual | phases | fields)


def digests(changed: Mapping[int, str] | None = None, attempt: int = 1) -> list[EventSample]:
    """The ends of all ranks, with the state that the undisturbed run had unless it is changed."""
    states = {rank: f"state{rank}" for rank in range(NUM_RANKS)} | dict(changed or {})
    return [event("finished", rank, attempt, state_digest=state) for rank, state in states.items()]


def undisturbed(config: Scenario | None = None) -> Reference:
    samples = [sample(i, rank) for i in range(1, NUM_ITERATIONS + 1) for rank in range(NUM_RANKS)]
    return reference_of(RunOutcome("reference", samples, digests(), (), 3.0), config or scenario())


def outcome(resumed: int = 6, reached: int = 7, persisted: tuple[int, ...] | None = None, **fields: Any) -> RunOutcome:
    """A run that had reached one iteration, went back to another and then on to the end."""
    spans = {0: range(1, reached + 1), 1: range(resumed + 1, NUM_ITERATIONS + 1)}
    samples = [sample(i, rank, attempt) for attempt, span in spans.items() for i in span for rank in range(NUM_RANKS)]
    usual: dict[str, Any] = {
        "run_id": "disturbed", "samples": samples, "events": [event("fault", 1, on_disk=persisted), *digests()],
        "recoveries": [recovery(resumed, reached - resumed)], "wall_s": 4.0,
    }  # fmt: skip
    return RunOutcome(**usual | fields)


def judged(disturbed: RunOutcome, fault: FaultSpec = KILL, config: Scenario | None = None) -> Judgement:
    return judge(fault, config or scenario(), disturbed, undisturbed())
