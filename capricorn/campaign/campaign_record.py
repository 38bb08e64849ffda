"""What a campaign of injected failures is and how far it has come: its cases and their verdicts, as a record.

Starts nothing; knows no torch and none of the samples that runs record. Which cases there are is told by `cases`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, Literal, Self

from capricorn.campaign.economics import Economics
from capricorn.campaign.verdict import Judgement, Reference
from capricorn.compare.compare_record import Variant
from capricorn.config.fault_spec import FaultSpec
from capricorn.config.fields import FrozenModel, validate
from capricorn.config.scenario import Scenario
from capricorn.errors import CapricornError
from capricorn.records.samples import read_record, write_record
from capricorn.systems.registry import find
from capricorn.systems.settings import override

SCHEMA_VERSION = 1
CAMPAIGN = "campaign.json"
CAPRICORN: Final = "capricorn"

GroundName = Literal["given", "links", "paced"]
"""Where a case runs: as it was asked for, over emulated links, or so slowly that a disk keeps up."""
GIVEN: Final[GroundName] = "given"
Mount = Literal["", "store", "disk"]
"""What of a case lies on a small file system of its own: nothing, the memory store, or the slow tier."""


class Case(FrozenModel):
    """One failure under one system, and what came of it."""

    number: int
    """Of the failure, from 0; the same under all systems."""
    system: str
    """Its label."""
    fault: FaultSpec
    repeat: int = 1
    ground: GroundName = GIVEN
    mount: Mount = ""
    persist_every: int = 0
    """Iterations between two checkpoints on the slow tier; 0 is none."""
    repro: str = ""
    """The command that repeats it."""
    judgement: Judgement | None = None
    """None until it was run."""

    @property
    def key(self) -> tuple[int, str, int]:
        return self.number, self.system, self.repeat


class NotRun(FrozenModel):
    """Failures that cannot happen to a system, or on this machine."""

    system: str
    kind: str
    reason: str


class Undisturbed(FrozenModel):
    """A run without failures; the first one on a ground is the reference of all others there."""

    ground: GroundName
    system: str
    reference: Reference | None
    """None if it did not come to its end."""
    difference: str = ""
    """In what its losses or state are not those of the ground's reference; empty if they are."""


class CampaignRecord(FrozenModel):
    """`campaign.json`: failures that were injected by one command; folders of runs lie beside its own."""

    schema_version: int = SCHEMA_VERSION
    campaign_id: str
    started_at: str
    """UTC, ISO 8601."""
    options: tuple[str, ...]
    """Of the scenario, as they were given."""
    scenarios: dict[GroundName, Scenario]
    """By ground; resolved, and what all systems share."""
    variants: tuple[Variant, ...]
    keep_runs: bool = False
    """Whether also the folders of runs that passed are kept."""
    cases: tuple[Case, ...] = ()
    not_run: tuple[NotRun, ...] = ()
    undisturbed: tuple[Undisturbed, ...] = ()
    economics: Economics | None = None

    def with_case(self, case: Case) -> Self:
        """The same with that case in its place."""
        cases = tuple(case if old.key == case.key else old for old in self.cases)
        return self.model_copy(update={"cases": cases})

    def with_undisturbed(self, run: Undisturbed) -> Self:
        return self.model_copy(update={"undisturbed": (*self.undisturbed, run)})

    def reference_of(self, ground: GroundName) -> Reference | None:
        """What losses and state are without a failure; None if no run has shown it yet."""
        runs = (run.reference for run in self.undisturbed if run.ground == ground)
        return next((reference for reference in runs if reference is not None), None)

    def scenario_of(self, case: Case) -> Scenario:
        """What the case runs; what its ground mounts is still to be set."""
        return scenario_of(self.scenarios, self.variant(case.system), case)

    def undisturbed_scenario(self, ground: GroundName, system: str) -> Scenario:
        """The same system there without a failure."""
        return self.variant(system).of(self.scenarios[ground])

    def variant(self, label: str) -> Variant:
        return next(each for each in self.variants if each.label == label)


def scenario_of(scenarios: Mapping[GroundName, Scenario], variant: Variant, case: Case) -> Scenario:
    """The scenario of a case, with its failure and its slow tier."""
    scenario = variant.of(scenarios[case.ground])
    settings = [f"persist.every={case.persist_every}"]
    if case.mount and find(variant.system).writes_files:
        settings.append("system.options.medium=tmpfs")
    return validate(Scenario, override(scenario, settings).model_dump() | {"faults": (case.fault,)}, "the case")


def read_campaign(folder: Path) -> CampaignRecord:
    """The record of a campaign's folder.

    Raises:
        ConfigError: there is none, it is damaged, or it has another schema version.
    """
    return read_record(folder / CAMPAIGN, CampaignRecord, SCHEMA_VERSION, "campaign")


def write_campaign(folder: Path, record: CampaignRecord) -> None:
    """Writes `campaign.json` so that a reader sees the old one or the new one, never a part.

    Raises:
        CapricornError: there is no room for it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_record(folder / CAMPAIGN, record, indent=1)
    except OSError as error:
        raise CapricornError(f"cannot write {folder / CAMPAIGN}: {error.strerror}") from None


def counts(cases: Iterable[Case]) -> dict[str, int]:
    """By verdict how many cases have come to it."""
    totals: dict[str, int] = {}
    for case in cases:
        if case.judgement is not None:
            totals[case.judgement.verdict] = totals.get(case.judgement.verdict, 0) + 1
    return totals


def must_pass(case: Case) -> bool:
    """Whether the case counts: Capricorn, of which a copy survived, or which has gone on with something else."""
    judgement = case.judgement
    if judgement is None or case.system.partition(":")[0] != CAPRICORN:
        return False
    return judgement.survives or judgement.verdict == "SILENT_DIVERGENCE"


def succeeded(record: CampaignRecord) -> bool:
    """Whether Capricorn passed wherever it counts, and trained as it should without a failure."""
    missed = [case for case in record.cases if must_pass(case) and case.judgement and case.judgement.verdict != "PASS"]
    wrong = [run for run in record.undisturbed if run.system.partition(":")[0] == CAPRICORN and run.difference]
    return not missed and not wrong
