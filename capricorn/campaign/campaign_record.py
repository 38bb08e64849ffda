"""What a campaign of injected faults is and how far it has come: its cases and their verdicts, as a record.

Starts nothing; knows no torch. Which cases there are is told by `cases`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, Self, TypeAlias

from pydantic import AliasChoices, BeforeValidator, Field

from capricorn.campaign.economics import Economics
from capricorn.campaign.verdict import Judgement, Reference
from capricorn.compare.compare_record import Variant
from capricorn.config.fault_kinds import Mount
from capricorn.config.fault_spec import FaultSpec
from capricorn.config.fields import FrozenModel, validate
from capricorn.config.scenario import Scenario
from capricorn.files import named
from capricorn.records.samples import read_record, write_record
from capricorn.systems.registry import find
from capricorn.systems.settings import override
from capricorn.units import format_seconds

SCHEMA_VERSION = 1
CAMPAIGN = "campaign.json"
CAPRICORN: Final = "capricorn"

AS_CONFIGURED, LINKS, PACED, PID_1 = "as-configured", "links", "paced", "pid-1"
OLD_TESTBEDS: Final = {"given": AS_CONFIGURED}
"""The names of today by those in older records, where a case had a `ground`."""
TestbedName: TypeAlias = Annotated[
    str,
    BeforeValidator(lambda name: OLD_TESTBEDS.get(name, name)),
    Field(pattern=r"^(as-configured|links|paced|pid-1)(@[1-9]\d*x[1-9]\d*)?$"),
]
"""Where a case runs: as it was asked for, over emulated links, so slowly that a disk keeps up, or with the launcher as
process 1 of a namespace; and `@2x1`, the nodes and the ranks of each, where a campaign has several shapes."""
OLD_NAME: Final = AliasChoices("testbed", "ground")


class Case(FrozenModel):
    """One fault under one system, and what came of it."""

    number: int
    """Number of the fault, from 0; the same under all systems."""
    system: str
    """Label of the system."""
    fault: FaultSpec
    repeat: int = 1
    testbed: TestbedName = Field(default=AS_CONFIGURED, validation_alias=OLD_NAME)
    mount: Mount = ""
    persist_every: int = 0
    """Iterations between two checkpoints on the persistent tier; 0 is none."""
    repro: str = ""
    """The command that repeats it."""
    judgement: Judgement | None = None
    """None until it was run."""

    @property
    def key(self) -> tuple[int, str, int]:
        return self.number, self.system, self.repeat


class NotRun(FrozenModel):
    """A kind of fault that cannot happen to a system, or on this machine."""

    system: str
    kind: str
    reason: str


class Undisturbed(FrozenModel):
    """A run without a fault; the first one on a testbed is the reference of all others there."""

    testbed: TestbedName = Field(validation_alias=OLD_NAME)
    system: str
    reference: Reference | None
    """None if it did not come to its end."""
    difference: str = ""
    """How its losses or state differ from the reference of the testbed; empty if they do not."""


class CampaignRecord(FrozenModel):
    """`campaign.json`: faults that were injected by one command; folders of runs lie beside its own."""

    schema_version: int = SCHEMA_VERSION
    campaign_id: str
    started_at: str
    """UTC, ISO 8601."""
    options: tuple[str, ...]
    """The options of the scenario as words of the command line."""
    scenarios: dict[TestbedName, Scenario]
    """By testbed; resolved, and what all systems share."""
    variants: tuple[Variant, ...]
    keep_runs: bool = False
    """Whether also the folders of runs that passed are kept."""
    cases: tuple[Case, ...] = ()
    not_run: tuple[NotRun, ...] = ()
    undisturbed: tuple[Undisturbed, ...] = ()
    economics: Economics | None = None

    @property
    def is_whole(self) -> bool:
        """Whether nothing of it is left to be run."""
        if self.economics is not None:
            return len(self.economics.rows) == len(self.variants)
        return all(case.judgement is not None for case in self.cases)

    def with_case(self, case: Case) -> Self:
        """Returns the record with that case in its place."""
        cases = tuple(case if old.key == case.key else old for old in self.cases)
        return self.model_copy(update={"cases": cases})

    def with_undisturbed(self, run: Undisturbed) -> Self:
        return self.model_copy(update={"undisturbed": (*self.undisturbed, run)})

    def reference_of(self, testbed: TestbedName) -> Reference | None:
        """Returns the losses and state without a fault; None if no run has shown them yet."""
        runs = (run.reference for run in self.undisturbed if run.testbed == testbed)
        return next((reference for reference in runs if reference is not None), None)

    def scenario_of(self, case: Case) -> Scenario:
        """Returns what the case runs; what is mounted for it is still to be set."""
        return scenario_of(self.scenarios, self.variant(case.system), case)

    def undisturbed_scenario(self, testbed: TestbedName, system: str) -> Scenario:
        """Returns what that system runs there without a fault."""
        return self.variant(system).of(self.scenarios[testbed])

    def variant(self, label: str) -> Variant:
        return next(each for each in self.variants if each.label == label)


def testbed_name(place: str, shape: str) -> TestbedName:
    """Returns the name of a testbed: `links`, or `links@3x1` for one shape of several."""
    return f"{place}@{shape}" if shape else place


def place_of(testbed: TestbedName) -> str:
    """Returns the name of a testbed without its shape."""
    return testbed.partition("@")[0]


def shape_of(testbed: TestbedName) -> str:
    """Returns the shape of a testbed, `3x1`; empty if the campaign has but one."""
    return testbed.partition("@")[2]


def scenario_of(scenarios: Mapping[TestbedName, Scenario], variant: Variant, case: Case) -> Scenario:
    """Returns the scenario of a case, with its fault and its persistent tier."""
    scenario = variant.of(scenarios[case.testbed])
    settings = [f"persist.every={case.persist_every}"]
    if case.mount in ("store", "disk") and find(variant.system).writes_files:
        settings.append("system.options.medium=tmpfs")
    return validate(Scenario, override(scenario, settings).model_dump() | {"faults": (case.fault,)}, "the case")


def read_campaign(folder: Path) -> CampaignRecord:
    """Returns the record in the folder of a campaign.

    Raises:
        ConfigError: there is none, it is damaged, or a newer version has written what this one cannot read, or would
            lose when it goes on.
    """
    return read_record(folder / CAMPAIGN, CampaignRecord, SCHEMA_VERSION, "campaign", goes_on=True)


def write_campaign(folder: Path, record: CampaignRecord) -> None:
    """Writes `campaign.json` so that a reader sees the old one or the new one, never a part.

    In one line, as it may hold thousands of cases.

    Raises:
        CapricornError: there is no room for it.
    """
    with named(f"make {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    write_record(folder / CAMPAIGN, record, indent=None)


def counts(cases: Iterable[Case]) -> dict[str, int]:
    """Returns how many cases have come to each verdict."""
    totals: dict[str, int] = {}
    for case in cases:
        if case.judgement is not None:
            totals[case.judgement.verdict] = totals.get(case.judgement.verdict, 0) + 1
    return totals


def must_pass(case: Case) -> bool:
    """Returns whether a case counts: it was Capricorn's, and something was left to go on with."""
    is_ours = case.system.partition(":")[0] == CAPRICORN
    return is_ours and case.judgement is not None and case.judgement.verdict != "NOTHING_LEFT"


def succeeded(record: CampaignRecord) -> bool:
    """Returns whether Capricorn passed wherever it counts, and trained as it should without a fault."""
    missed = [case for case in record.cases if must_pass(case) and case.judgement and case.judgement.verdict != "PASS"]
    wrong = [run for run in record.undisturbed if run.system.partition(":")[0] == CAPRICORN and run.difference]
    return not missed and not wrong


# --- in words ----------------------------------------------------------------------------------------------------


def verdict_words(verdict: str, judgements: Sequence[Judgement]) -> str:
    """Returns `3 PASS` or `1 LOST_WORK(4)`."""
    most = f"({max(each.lost_iterations for each in judgements)})" if verdict == "LOST_WORK" else ""
    return f"{len(judgements)} {verdict}{most}"


def remark_of(case: Case) -> str:
    """Returns a line on a case that did not pass; nothing if it did or was not run."""
    judgement = case.judgement
    return "" if judgement is None or judgement.verdict == "PASS" else outcome_line(case)


def outcome_line(case: Case) -> str:
    """Returns `capricorn kill@rank=1,iteration=3: PASS, lost 1, recovery 1.4 s: back to 2 from local (ranks 0 1)`."""
    judgement = case.judgement
    if judgement is None:
        return f"{case.system} {case.fault}: not run yet"
    facts = [verdict_words(judgement.verdict, [judgement]).removeprefix("1 ")]
    if judgement.recovery_s is not None:
        facts += [f"lost {judgement.lost_iterations}", f"recovery {format_seconds(judgement.recovery_s)}"]
    shape = f" on {shape_of(case.testbed)}" if shape_of(case.testbed) else ""
    first = ", as process 1" if place_of(case.testbed) == PID_1 else ""
    tier = f"{shape}{first}, persistent tier every {case.persist_every}" if case.persist_every else f"{shape}{first}"
    detail = f": {judgement.detail}" if judgement.detail else ""
    return f"{case.system} {case.fault}{tier}: {', '.join(facts)}{detail}"
