"""Carries out what a campaign still misses, one run after the other, and writes down each verdict at once."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from capricorn.campaign.campaign_record import (
    AS_CONFIGURED,
    LINKS,
    PACED,
    PID_1,
    CampaignRecord,
    Case,
    TestbedName,
    Undisturbed,
    counts,
    outcome_line,
    place_of,
    remark_of,
    shape_of,
    write_campaign,
)
from capricorn.campaign.case_run import Say, Workplace
from capricorn.campaign.outcomes import RunOutcome
from capricorn.campaign.small_file_systems import needed_bytes, small_file_system
from capricorn.campaign.verdict import difference, judge, reference_of
from capricorn.compare.compare_runner import Watch
from capricorn.config.scenario import Scenario
from capricorn.errors import CapricornError
from capricorn.launch.interrupts import Interrupts
from capricorn.launch.launcher import Launch, shared_dir_of
from capricorn.systems.registry import find
from capricorn.systems.settings import override
from capricorn.units import Seconds

WHERE = {AS_CONFIGURED: "", LINKS: " over links", PACED: ", paced", PID_1: ", as process 1"}
"""What is printed of each place."""
PATIENCE_S, PATIENCE = 60.0, 10.0
"""A run hangs once it takes longer than this, plus so many times what an undisturbed one took."""


class CampaignRunner:
    """Carries out one record; folders of runs lie beside its own."""

    def __init__(
        self,
        folder: Path,
        record: CampaignRecord,
        watch: Watch,
        say: Say,
        number: int | None = None,
        *,
        start: Launch | None = None,
    ) -> None:
        """Makes ready to carry it out.

        Args:
            folder: of the record.
            record: what is asked for, and what of it is done.
            watch: makes the listener of each run.
            say: prints a line on each case.
            number: of the fault whose cases alone are run; all that are missing if there is none.
            start: launches a run; by default on this machine.
        """
        self._folder, self.record, self._number = folder, record, number
        self._place = Workplace(folder.parent, watch, say, start)
        self._took_s: list[Seconds] = []
        self._small: Path | None = None

    def run(self) -> None:
        """Makes all runs that are missing; one that fails is written down, and the others go on.

        Raises:
            CapricornError: no run shows what is without a failure, or the record cannot be written.
            KeyboardInterrupt: it was interrupted; what was finished is written down.
        """
        with Interrupts() as interrupts, self._place:
            asked = [case for case in self.record.cases if self._number in (None, case.number)]
            left = [case for case in asked if case.judgement is None]
            for case in left:
                for system in self._without_reference(case.testbed, left):
                    interrupts.check()
                    self._run_undisturbed(case.testbed, system)
                interrupts.check()
                self._run_case(case)

    # --- without a failure ---------------------------------------------------------------------------------------

    def _without_reference(self, testbed: TestbedName, left: Sequence[Case]) -> list[str]:
        """Returns the systems that have cases there and have not yet run there without a failure."""
        done = {run.system for run in self.record.undisturbed if run.testbed == testbed}
        needed = dict.fromkeys(case.system for case in left if case.testbed == testbed)
        return [system for system in needed if system not in done]

    def _run_undisturbed(self, testbed: TestbedName, system: str) -> None:
        scenario = self.record.undisturbed_scenario(testbed, system)
        shape = f" on {shape_of(testbed)}" if shape_of(testbed) else ""
        what = f"{system} without a failure{shape}{WHERE[place_of(testbed)]}"
        run_dir, outcome = self._place.run(scenario, lambda: what, as_pid_1=place_of(testbed) == PID_1)
        run = Undisturbed(testbed=testbed, system=system, **self._shown(testbed, scenario, outcome))
        self._write(self.record.with_undisturbed(run))
        self._drop(run_dir, is_fine=not run.difference)
        self._place.say(f"{what}: {run.difference or 'ok'}", is_news=bool(run.difference))

    def _shown(self, testbed: TestbedName, scenario: Scenario, outcome: RunOutcome) -> dict[str, Any]:
        """Returns what the run showed, and how it differs from the reference that is known."""
        try:
            reference = reference_of(outcome, scenario)
        except CapricornError as error:
            return {"reference": None, "difference": str(error)}
        known = self.record.reference_of(testbed)
        return {"reference": reference, "difference": difference(reference, known) if known is not None else ""}

    # --- with one ------------------------------------------------------------------------------------------------

    def _run_case(self, case: Case) -> None:
        reference = self.record.reference_of(case.testbed)
        if reference is None:
            raise CapricornError(f"no run without a failure came to its end: {self.record.undisturbed[-1].difference}")
        scenario = self._placed(case, self.record.scenario_of(case))
        run_dir, outcome = self._place.run(
            scenario,
            lambda: self._heading(case),
            limit_s=PATIENCE_S + PATIENCE * reference.wall_s,
            out=self._small_file_system() if case.mount == "records" else None,
            as_pid_1=place_of(case.testbed) == PID_1,
        )
        judged = case.model_copy(update={"judgement": judge(case.fault, scenario, outcome, reference)})
        self._took_s.append(outcome.wall_s)
        self._write(self.record.with_case(judged))
        if case.mount == "records" and run_dir is not None and (remark_of(judged) or self.record.keep_runs):
            shutil.copytree(run_dir, self._folder.parent / run_dir.name)  # before its file system is emptied
        self._drop(run_dir, is_fine=not remark_of(judged))
        self._drop(Path(scenario.persist.dir) if scenario.persist.dir else None, is_fine=not remark_of(judged))
        self._drop(shared_dir_of(scenario, outcome.run_id), is_fine=not remark_of(judged))
        self._place.say(f"{self._place_of(case)}: {outcome_line(judged)}", is_news=bool(remark_of(judged)))

    def _placed(self, case: Case, scenario: Scenario) -> Scenario:
        """Returns the scenario with its stores in their place: on a small file system, or apart from other cases."""
        is_in_store = case.mount == "disk" and find(scenario.system.name).writes_files
        if case.mount == "store" or is_in_store:
            return override(scenario, [f"store.root={self._small_file_system()}"])
        is_small = case.mount == "disk"
        parent = self._small_file_system() if is_small else Path(scenario.persist.dir)
        if not (is_small or scenario.persist.dir):
            return scenario
        folder = parent / self.record.campaign_id
        shutil.rmtree(folder, ignore_errors=True)  # or the case would go on from where another one ended
        return override(scenario, [f"persist.dir={folder}"])

    def _small_file_system(self) -> Path:
        """Returns the small file system of all cases, emptied."""
        if self._small is None:
            variants = (each.label for each in self.record.variants)
            pairs = product(self.record.scenarios, variants)
            needed = max(needed_bytes(self.record.undisturbed_scenario(*pair)) for pair in pairs)
            self._small = self._place.enter(small_file_system(needed))
        for rest in self._small.iterdir():
            shutil.rmtree(rest, ignore_errors=True)
        return self._small

    # --- both ----------------------------------------------------------------------------------------------------

    def _write(self, record: CampaignRecord) -> None:
        self.record = record
        write_campaign(self._folder, record)

    def _drop(self, run_dir: Path | None, *, is_fine: bool) -> None:
        """Removes the folder of a run of which nothing more is to be seen."""
        if run_dir is not None and is_fine and not self.record.keep_runs:
            shutil.rmtree(run_dir, ignore_errors=True)

    def _place_of(self, case: Case) -> str:
        number = next(at for at, each in enumerate(self.record.cases, 1) if each.key == case.key)
        return f"case {number} of {len(self.record.cases)}"

    def _heading(self, case: Case) -> str:
        so_far = ", ".join(f"{count} {verdict}" for verdict, count in counts(self.record.cases).items())
        parts = [f"{self._place_of(case)}: {case.system}, {case.fault}", so_far, self._left()]
        return "; ".join(filter(None, parts))

    def _left(self) -> str:
        num_left = sum(case.judgement is None for case in self.record.cases)
        return f"about {max(1, round(fmean(self._took_s) * num_left / 60))} min left" if self._took_s else ""
