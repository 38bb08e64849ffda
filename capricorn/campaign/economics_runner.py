"""Carries out what a campaign with failures at random times still misses: what is measured first, then each system."""

from __future__ import annotations

import shutil
from pathlib import Path
from statistics import fmean

from capricorn.campaign.campaign_record import AS_CONFIGURED, CampaignRecord, write_campaign
from capricorn.campaign.case_run import Say, Workplace
from capricorn.campaign.economics import Economics, MeasuredEconomics, iterations_between, young_interval
from capricorn.campaign.outcomes import RunOutcome, mean_complete_s, mean_iteration_s, mean_stall_s, measured
from capricorn.campaign.sampling import schedule
from capricorn.compare.compare_record import Variant
from capricorn.compare.compare_runner import Watch
from capricorn.config.scenario import Scenario
from capricorn.errors import CapricornError, ConfigError
from capricorn.launch.interrupts import Interrupts
from capricorn.launch.launcher import Launch
from capricorn.systems.registry import find
from capricorn.systems.settings import override
from capricorn.units import Seconds, format_seconds

SHORT = 100
"""Iterations at most of the runs that show how long an iteration takes, and what a checkpoint costs."""
WARMUP = 5
EVERY = "system.every"
PATIENCE_S, PATIENCE, PATIENCE_A_FAILURE_S = 60.0, 10.0, 30.0
"""A run hangs once it takes longer than this, plus so many times its iterations, plus so much for each failure."""


class EconomicsRunner:
    """Carries out one record; the runs lie beside its folder."""

    def __init__(
        self, folder: Path, record: CampaignRecord, watch: Watch, say: Say, *, start: Launch | None = None
    ) -> None:
        """Starts nothing yet; `run` does.

        Args:
            folder: of the campaign; its runs lie beside it.
            record: what is to be done, and how far it has come.
            watch: makes what listens to a run.
            say: shows a line to people.
            start: launches a run; by default on this machine.
        """
        self._folder, self.record = folder, record
        self._place = Workplace(folder.parent, watch, say, start)
        self._scenario = record.scenarios[AS_CONFIGURED]

    def run(self) -> None:
        """Makes all runs that are missing; a system that fails is written down, and the others go on.

        Raises:
            CapricornError: what an iteration takes cannot be measured, or no failure comes while the run lasts.
            KeyboardInterrupt: it was interrupted; what was finished is written down.
        """
        with Interrupts() as interrupts, self._place:
            if not self._economics.schedule:
                self._draw_schedule()
            done = {row.system for row in self._economics.rows}
            for variant in self.record.variants:
                interrupts.check()
                if variant.label not in done:
                    self._measure(variant)

    @property
    def _economics(self) -> Economics:
        assert self.record.economics is not None
        return self.record.economics

    def _draw_schedule(self) -> None:
        """Draws in which iterations failures come, by how long one takes without checkpoints and failures."""
        iteration_s = self._iteration_s()
        mtbf_s, frac = self._economics.mtbf_s, self._economics.node_loss_frac
        faults = schedule(self._scenario, mtbf_s, iteration_s, frac, self._scenario.train.seed)
        if not faults:
            lasts_s = self._scenario.train.iterations * iteration_s
            raise ConfigError(
                f"no failure comes in the {format_seconds(lasts_s)} that training lasts; "
                f"use more --iterations, or an --mtbf below {format_seconds(mtbf_s)}"
            )
        self._write(self._economics.model_copy(update={"iteration_s": iteration_s, "schedule": faults}))
        self._place.say(f"an iteration takes {format_seconds(iteration_s)}; {len(faults)} failures")

    def _iteration_s(self) -> Seconds:
        """Returns how long an iteration takes now without checkpoints and failures."""
        scenario = override(self._short(self._scenario), ["system.name=none"])
        outcome = self._run(scenario, "without checkpoints and failures")
        if outcome.failure:
            raise CapricornError(f"the run without checkpoints and failures did not come to its end: {outcome.failure}")
        return mean_iteration_s(outcome.samples, WARMUP)

    def _measure(self, variant: Variant) -> None:
        scenario = variant.of(self._scenario)
        planned = self._plan(variant, scenario)
        if not planned.failure:
            before_s = self._iteration_s()
            outcome = self._with_failures(override(scenario, [f"{EVERY}={planned.every}"]), variant)
            # A machine is not as fast at all times: what the run is measured by is measured around it.
            iteration_s = fmean((before_s, self._iteration_s()))
            num, mtbf_s = scenario.train.iterations, self._economics.mtbf_s
            planned = measured(planned, outcome, iteration_s=iteration_s, num_iterations=num, mtbf_s=mtbf_s)
        self._write(self._economics.model_copy(update={"rows": (*self._economics.rows, planned)}))
        ettr = planned.failure if planned.ettr is None else f"ETTR {planned.ettr:.3f}"
        self._place.say(f"{variant.label}, a checkpoint every {planned.every}: {ettr}", is_news=planned.ettr is None)

    def _with_failures(self, scenario: Scenario, variant: Variant) -> RunOutcome:
        """Makes the run of all iterations with all failures."""
        faults = self._economics.schedule
        limit_s = (
            PATIENCE_S + PATIENCE * scenario.train.iterations * self._planned_s + PATIENCE_A_FAILURE_S * len(faults)
        )
        what = f"{variant.label}, a checkpoint every {scenario.system.every}, {len(faults)} failures"
        return self._run(scenario.model_copy(update={"faults": faults}), what, limit_s)

    @property
    def _planned_s(self) -> Seconds:
        """Returns how long an iteration takes according to the schedule."""
        assert self._economics.iteration_s is not None
        return self._economics.iteration_s

    def _plan(self, variant: Variant, scenario: Scenario) -> MeasuredEconomics:
        """Returns what a checkpoint costs and how often one is made: files as Young says, unless configured."""
        outcome = self._run(override(self._short(scenario), [f"{EVERY}=1"]), f"{variant.label}, a short run")
        checkpoint_s = mean_stall_s(outcome.samples)
        is_told = any(each.startswith(f"{EVERY}=") for each in variant.assignments)
        every = scenario.system.every
        if find(scenario.system.name).writes_files and not is_told:
            interval_s = young_interval(checkpoint_s, self._economics.mtbf_s)
            every = iterations_between(interval_s, self._planned_s, scenario.train.iterations)
        return MeasuredEconomics(
            system=variant.label,
            every=every,
            checkpoint_s=checkpoint_s,
            complete_s=mean_complete_s(outcome.samples),
            failure=outcome.failure,
            mode="emulated" if scenario.emulation else "live",
        )

    def _short(self, scenario: Scenario) -> Scenario:
        iterations = min(SHORT, scenario.train.iterations)
        return override(scenario, [f"train.iterations={iterations}", "train.warmup=0"])

    def _run(self, scenario: Scenario, what: str, limit_s: Seconds | None = None) -> RunOutcome:
        run_dir, outcome = self._place.run(scenario, lambda: what, limit_s=limit_s)
        if run_dir is not None and not (outcome.failure or self.record.keep_runs):
            shutil.rmtree(run_dir, ignore_errors=True)
        return outcome

    def _write(self, economics: Economics) -> None:
        self.record = self.record.model_copy(update={"economics": economics})
        write_campaign(self._folder, self.record)
