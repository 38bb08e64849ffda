"""Settles what a system leaves to be tuned on the scenario itself, by a run of its own before the one that counts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from capricorn.config.scenario import Scenario
from capricorn.errors import CapricornError
from capricorn.launch.launcher import Launch, RunListener, launch
from capricorn.planner.gemini_planner import AUTO, SWEEP, UNPLANNED, GeminiStagedSettings, num_swept, swept_factor
from capricorn.records.samples import ITERATIONS, IterationSample, read_samples
from capricorn.systems.registry import find
from capricorn.systems.settings import settings_of, with_options
from capricorn.units import Seconds


def needs_tuning(scenario: Scenario) -> bool:
    """Returns whether a run of the scenario has to be preceded by `tune`."""
    tunes = find(scenario.system.name).tunes
    return bool(tunes) and getattr(settings_of(scenario), tunes) == AUTO


def tune(scenario: Scenario, out: Path, listener: RunListener, start: Launch = launch) -> tuple[Scenario, str]:
    """Returns the scenario with the factor mu that suits it best, and the run that showed it; empty if none was needed.

    Several factors are tried in turn, an iteration each; the one with the shortest median iteration is taken.

    Args:
        scenario: what is run.
        out: where the run's folder is made.
        listener: hears what happens.
        start: launches the run.

    Raises:
        CapricornError: that run failed.
    """
    if scenario.system.every == 0 or scenario.system.replicas == 1:
        return with_options(scenario, mu=1.0), ""
    folder = start(sweep_of(scenario), out, listener)
    durations_s = durations_by_factor(settings_of(scenario), read_samples(folder / ITERATIONS, IterationSample))
    if not durations_s:
        raise CapricornError(f"no iteration of {folder} was timed, so mu is not known; set system.options.mu")
    best = min(durations_s, key=lambda factor: median(durations_s[factor]))
    return with_options(scenario, mu=best, tuned_in=folder.name), folder.name


def sweep_of(scenario: Scenario) -> Scenario:
    """Returns the run in which the factors are tried: the same work, cut off when each has had its iterations."""
    config = settings_of(scenario)
    iterations = config.profile_iterations + UNPLANNED + num_swept(config) + 1
    train = scenario.train.model_copy(update={"iterations": iterations, "warmup": config.profile_iterations})
    system = scenario.system.model_copy(update={"every": 1})
    swept = scenario.model_copy(update={"train": train, "system": system, "faults": ()})
    return with_options(swept, mu=SWEEP)


def durations_by_factor(config: GeminiStagedSettings, samples: Iterable[IterationSample]) -> dict[float, list[Seconds]]:
    """By factor: how long the iterations were in which checkpoints left by a plan with it, on the slowest rank.

    A checkpoint leaves in the iteration after its own, and the first ones are not planned.

    Raises:
        CapricornError: some rank was started again, and planned anew.
    """
    slowest_s: dict[int, Seconds] = defaultdict(float)
    for sample in samples:
        if sample.attempt:
            raise CapricornError(
                "the run that tries the factors was started again, so it tells nothing; set system.options.mu"
            )
        slowest_s[sample.iteration] = max(slowest_s[sample.iteration], sample.duration_s)
    durations_s: dict[float, list[Seconds]] = defaultdict(list)
    for number in range(num_swept(config)):
        iteration = config.profile_iterations + UNPLANNED + number + 2
        if iteration in slowest_s:
            durations_s[swept_factor(number)].append(slowest_s[iteration])
    return dict(durations_s)
