"""Whether a run into which a fault was injected is what it would have been without, and what that took. Pure.

Judges records; knows neither how faults are injected nor which were asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias, get_args

from pydantic import BeforeValidator, Field, model_validator

from capricorn.campaign.outcomes import RunOutcome
from capricorn.config.fault_kinds import DISK, kind_of
from capricorn.config.fault_spec import FaultSpec
from capricorn.config.fields import FrozenModel
from capricorn.config.scenario import Scenario
from capricorn.errors import CapricornError
from capricorn.faults.persisted import num_due
from capricorn.records.failures import injected
from capricorn.records.samples import RECOVERY_PHASES, RecoverySample
from capricorn.systems.registry import find
from capricorn.systems.settings import settings_of
from capricorn.units import Seconds

VerdictName: TypeAlias = Literal[
    "PASS", "LOST_WORK", "SILENT_DIVERGENCE", "HARD_FAIL", "NOTHING_LEFT", "NOT_TRIGGERED"
]  # fmt: skip
VERDICTS: Final[tuple[VerdictName, ...]] = get_args(VerdictName)
OLD_VERDICTS: Final = {"NOT_STRUCK": "NOT_TRIGGERED"}
"""The names of today by those in older records."""
Verdict: TypeAlias = Annotated[VerdictName, BeforeValidator(lambda name: OLD_VERDICTS.get(name, name))]
PERSISTENT: Final = "persistent"
HANG: Final = "hang:"
"""How the failure begins of a run that was ended since its time was over."""


class Reference(FrozenModel):
    """What a run shows without a fault."""

    run_id: str
    losses: tuple[tuple[str, ...], ...]
    """Losses by rank and iteration, from the first; as hexadecimal floats, which are exact."""
    digests: tuple[str, ...]
    """Digests of the state after the last iteration, by rank."""
    wall_s: Seconds
    """From start to end, processes and all."""


class Judgement(FrozenModel):
    """What came of one fault."""

    verdict: Verdict
    survives: bool
    """Whether a complete copy of some checkpoint outlived the fault."""
    detail: str
    """What happened, in words."""
    lost_iterations: int = 0
    """Iterations that had finished and were done again, of all recoveries together."""
    allowed_iterations: int = 0
    """How many a recovery may lose with the tier it came from."""
    recovery_s: Seconds | None = None
    """All phases of all recoveries; None if there was none."""
    phases_s: dict[str, Seconds] = Field(default_factory=dict)
    """Duration of each phase, of all recoveries together."""
    tier: str = ""
    """Where the state came from; `start` is the initial state."""
    run_id: str = ""
    wall_s: Seconds = 0.0
    mode: str = "live"

    @model_validator(mode="before")
    @classmethod
    def _read_older(cls, values: Any) -> Any:
        """Returns the values with the verdict of today: older records tell a failure of nobody by `survives` alone."""
        if not isinstance(values, Mapping) or values.get("verdict") != "HARD_FAIL" or values.get("survives", True):
            return values
        return {**values, "verdict": _failed(str(values.get("detail", "")), has_copy=False)}


def reference_of(outcome: RunOutcome, scenario: Scenario) -> Reference:
    """Returns what the undisturbed run showed.

    Raises:
        CapricornError: it did not come to its end, some rank left no record, or nothing was persisted that was to be.
    """
    if outcome.failure:
        raise CapricornError(f"the run without failures did not come to its end: {outcome.failure}")
    if _persisted_nothing(outcome, scenario):
        raise CapricornError(f"the run without failures persisted none of its checkpoints: {outcome.run_id}")
    ranks, iterations = range(scenario.topology.world_size), range(1, scenario.train.iterations + 1)
    losses = {(s.rank, s.iteration): s.loss.hex() for s in outcome.samples}
    digests = _digests(outcome)
    missing = [rank for rank in ranks if rank not in digests or any((rank, i) not in losses for i in iterations)]
    if missing:
        raise CapricornError(f"rank {missing[0]} of the run without failures left no whole record: {outcome.run_id}")
    return Reference(
        run_id=outcome.run_id,
        losses=tuple(tuple(losses[rank, iteration] for iteration in iterations) for rank in ranks),
        digests=tuple(digests[rank] for rank in ranks),
        wall_s=outcome.wall_s,
    )


def _persisted_nothing(outcome: RunOutcome, scenario: Scenario) -> bool:
    """Returns whether checkpoints were to go to the persistent tier, came due, and none of them arrived."""
    every, is_on = scenario.persist.every, scenario.system.every and find(scenario.system.name).replicates
    is_due = bool(every and is_on) and scenario.train.iterations >= every
    num_persisted = sum(each.persisted for each in outcome.samples) + sum(each.persisted for each in outcome.events)
    return is_due and not num_persisted


def difference(ours: Reference, theirs: Reference) -> str:
    """Returns in words the first loss or state in which two undisturbed runs differ; nothing if they are equal."""
    for rank, (mine, other) in enumerate(zip(ours.losses, theirs.losses, strict=True)):
        for iteration, (loss, expected) in enumerate(zip(mine, other, strict=True), 1):
            if loss != expected:
                return _differs(rank, iteration, loss, expected)
    unequal = [rank for rank, pair in enumerate(zip(ours.digests, theirs.digests, strict=True)) if len(set(pair)) > 1]
    return f"the last state of rank {unequal[0]} differs" if unequal else ""


def judge(fault: FaultSpec, scenario: Scenario, outcome: RunOutcome, reference: Reference) -> Judgement:
    """Returns the verdict on a run into which the fault was injected.

    Args:
        fault: what was to be injected.
        scenario: of the run.
        outcome: what the run left.
        reference: losses and last state of the same work without a fault.
    """
    recoveries, left = _completed(outcome), survives(fault, scenario, outcome.persisted)
    allowed = [allowed_iterations(scenario, recovery, _usable(fault, outcome)) for recovery in recoveries]
    phases = {phase: _rounded(sum(each.phases_s[phase] for each in recoveries)) for phase in RECOVERY_PHASES}
    verdict, reason = _verdict(outcome, reference, allowed, has_copy=left)
    lost = sum(recovery.lost_iterations for recovery in recoveries)
    return Judgement(
        verdict=verdict,
        survives=left,
        detail="; ".join(filter(None, (reason, *_history(outcome)))),
        lost_iterations=lost,
        allowed_iterations=max(allowed, default=0),
        recovery_s=_rounded(sum(phases.values())) if recoveries else None,
        phases_s=phases if recoveries else {},
        tier="+".join(sorted({tier for recovery in recoveries for tier in tiers_of(recovery)})),
        run_id=outcome.run_id,
        wall_s=_rounded(outcome.wall_s),
        mode="emulated" if scenario.emulation else "live",
    )


def _rounded(duration_s: Seconds) -> Seconds:
    """Returns the time in whole microseconds: campaigns are long, and clocks no better."""
    return round(duration_s, 6)


def _verdict(
    outcome: RunOutcome, reference: Reference, allowed: Sequence[int], *, has_copy: bool
) -> tuple[VerdictName, str]:
    """Returns the verdict, and the reason for any but PASS."""
    if outcome.failure:
        return _failed(outcome.failure, has_copy=has_copy), outcome.failure
    if divergence := _divergence(outcome, reference):
        return "SILENT_DIVERGENCE", divergence
    if not injected(outcome.events):
        return "NOT_TRIGGERED", "the moment of the fault did not come"
    for recovery, most in zip(_completed(outcome), allowed, strict=True):
        if recovery.lost_iterations > most:
            return "LOST_WORK", f"{recovery.lost_iterations} finished iterations done again, {most} allowed"
    return "PASS", ""


def _failed(failure: str, *, has_copy: bool) -> VerdictName:
    """Returns the verdict on a run that ended early: where nothing survived, nobody goes on, but nobody may hang."""
    return "HARD_FAIL" if has_copy or failure.startswith(HANG) else "NOTHING_LEFT"


# --- equal, bit for bit ------------------------------------------------------------------------------------------


def _divergence(outcome: RunOutcome, reference: Reference) -> str:
    """Returns in words the first loss or state that is not the reference's; nothing if all are."""
    expected = {
        (rank, iteration): loss
        for rank, losses in enumerate(reference.losses)
        for iteration, loss in enumerate(losses, 1)
    }
    for sample in outcome.samples:
        if sample.loss.hex() != expected.get((sample.rank, sample.iteration)):
            found = expected.get((sample.rank, sample.iteration), "nothing")
            return _differs(sample.rank, sample.iteration, sample.loss.hex(), found)
    # A rank that dies between an iteration and its record may still be restored to that iteration.
    excused = {recovery.resumed_iteration for recovery in outcome.recoveries}
    recorded = {(sample.rank, sample.iteration) for sample in outcome.samples}
    for rank, iteration in sorted(expected.keys() - recorded):
        if iteration not in excused:
            return f"rank {rank} left no record of iteration {iteration}"
    digests = _digests(outcome)
    wrong = [rank for rank, digest in enumerate(reference.digests) if digests.get(rank) != digest]
    return f"the last state of rank {wrong[0]} is not that of the undisturbed run" if wrong else ""


def _digests(outcome: RunOutcome) -> dict[int, str]:
    """Returns by rank the digest of the last state, as its newest start told it."""
    finished = sorted((e for e in outcome.events if e.event == "finished"), key=lambda event: event.attempt)
    return {event.rank: event.state_digest for event in finished}


def _differs(rank: int, iteration: int, loss: str, expected: str) -> str:
    return f"loss of rank {rank} in iteration {iteration} is {_decimal(loss)} and should be {_decimal(expected)}"


def _decimal(loss: str) -> str:
    return loss if loss == "nothing" else repr(float.fromhex(loss))


# --- lost work ---------------------------------------------------------------------------------------------------


def allowed_iterations(scenario: Scenario, recovery: RecoverySample, persisted: Sequence[int] = ()) -> int:
    """Returns how many iterations a recovery may do again; `persisted` is what the persistent tier could give.

    One checkpoint at a time is on its way, and is complete when the next is made (`max_lost` 2: the one after it):
    so of checkpoints every N iterations the newest complete one is at most 2 N - 1 behind. The same holds for the
    persistent tier, on top of the memory, unless checkpoints were skipped since its writer was busy: then the newest
    that is persisted is what it has to give.
    """
    system = scenario.system
    if not system.every:
        return 0
    behind = (1 + system.max_lost) * system.every - 1
    if PERSISTENT in recovery.sources and not find(system.name).writes_files:
        reached = recovery.resumed_iteration + recovery.lost_iterations
        behind = max(behind + 2 * scenario.persist.every - 1, reached - max(persisted, default=reached))
    return behind + (0 if recovery.resumed_iteration else first_iteration(scenario) - 1)


def _usable(fault: FaultSpec, outcome: RunOutcome) -> tuple[int, ...]:
    """Returns those checkpoints on the persistent tier that the fault did not damage."""
    persisted = outcome.persisted or ()
    return persisted[:-1] if fault.where == DISK else persisted


def first_iteration(scenario: Scenario) -> int:
    """Returns the first iteration that a system would checkpoint: some watch the training before."""
    watches = find(scenario.system.name).profiles_first
    return settings_of(scenario).profile_iterations + 1 if watches else 1


def tiers_of(recovery: RecoverySample) -> set[str]:
    """Returns the tiers that the state of a recovery came from."""
    return set(recovery.sources) or {"start"}


def _history(outcome: RunOutcome) -> Iterator[str]:
    """Yields in words what was restored from where, and what was skipped."""
    skipped = {event.attempt: event.detail for event in outcome.events if event.event == "resumed" and event.detail}
    for recovery in _completed(outcome):
        if not recovery.sources:
            yield "started anew from the initial state"
            continue
        ranks = _by_tier(recovery.sources)
        told = f", {skipped[recovery.attempt]}" if recovery.attempt in skipped else ""
        yield f"back to {recovery.resumed_iteration} from {ranks}{told}"


def _completed(outcome: RunOutcome) -> list[RecoverySample]:
    """Returns the recoveries after which training went on, or some state had been restored."""
    trained = {sample.attempt for sample in outcome.samples}
    return [recovery for recovery in outcome.recoveries if recovery.sources or recovery.attempt in trained]


def _by_tier(sources: Sequence[str]) -> str:
    """Returns `local (rank 0), peer (rank 1)`."""
    ranks: dict[str, list[str]] = {}
    for rank, tier in enumerate(sources):
        ranks.setdefault(tier, []).append(str(rank))
    return ", ".join(f"{tier} ({_ranks(each)})" for tier, each in ranks.items())


def _ranks(ranks: Sequence[str]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {' '.join(ranks)}"


# --- what a failure leaves ---------------------------------------------------------------------------------------


def survives(fault: FaultSpec, scenario: Scenario, persisted: Sequence[int] | None = None) -> bool:
    """Returns whether a complete copy of some checkpoint outlives the fault.

    `persisted` are those that were complete on the persistent tier when it came; where that was not recorded, None,
    they are taken to have been written in time.
    """
    system = scenario.system
    if not system.every or find(system.name).kind == "nothing":
        return False
    num_persisted = num_due(scenario, fault.iteration) if persisted is None else len(persisted)
    if fault.where == DISK:
        return num_persisted > 1  # the newest one is damaged, and all memory is gone
    if find(system.name).writes_files:
        return True
    loses = kind_of(fault.kind).loses
    is_last_copy = loses == "copy" and fault.where in ("", "slot") and system.replicas == 1
    if loses == "group" or is_last_copy:
        return num_persisted > 0
    return True
