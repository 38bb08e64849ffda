"""What checkpoints are worth where failures come at random: formulas that predict it, and what was measured. Pure.

ETTR, effective training time ratio: what the iterations take without checkpoints and failures / what they took.
"""

from __future__ import annotations

from math import sqrt

from capricorn.config.fault_spec import FaultSpec
from capricorn.config.fields import FrozenModel
from capricorn.errors import ConfigError
from capricorn.units import Seconds


def young_interval(checkpoint_s: Seconds, mtbf_s: Seconds) -> Seconds:
    """Returns the time between two checkpoints that wastes the least, to first order.

    Source: Young, CACM 1974: sqrt(2 delta M).
    """
    return sqrt(2 * checkpoint_s * mtbf_s)


def expected_ettr(interval_s: Seconds, checkpoint_s: Seconds, recovery_s: Seconds, mtbf_s: Seconds) -> float:
    """Returns the useful part of the time: (1 - (tau / 2 + R) / M) / (1 + delta / tau), or 0 if that is negative.

    A failure costs half an interval on average, and the recovery; a checkpoint costs what it blocks.

    Raises:
        ConfigError: there is no time between two checkpoints.
    """
    if interval_s <= 0:
        raise ConfigError(f"checkpoints every {interval_s:g} s make no sense; give a time above 0")
    return max(0.0, 1 - (interval_s / 2 + recovery_s) / mtbf_s) / (1 + checkpoint_s / interval_s)


def wasted_s(checkpoint_s: Seconds, interval_s: Seconds, retrieve_s: Seconds) -> Seconds:
    """Returns what a failure wastes on average: t_ckpt + 1 / (2 f) + t_retrieve, with a checkpoint every 1 / f.

    Source: Gemini, SOSP'23, section 2.2, where t_ckpt is the time until a checkpoint is complete; it cannot be longer
    than the interval, since one is on its way at a time.

    Raises:
        ConfigError: checkpoints come faster than they are made.
    """
    if interval_s < checkpoint_s:
        raise ConfigError(
            f"checkpoints of {checkpoint_s:g} s cannot come every {interval_s:g} s; use a longer interval"
        )
    return checkpoint_s + interval_s / 2 + retrieve_s


def iterations_between(interval_s: Seconds, iteration_s: Seconds, num_iterations: int) -> int:
    """Returns the interval in whole iterations: at least one, and no more than there are."""
    return max(1, min(num_iterations, round(interval_s / iteration_s)))


class MeasuredEconomics(FrozenModel):
    """One system under the schedule: what its run took, what of that was wasted, and what the formulas predict."""

    system: str
    """Label of the system."""
    every: int
    """Iterations between two checkpoints."""
    checkpoint_s: Seconds
    """Blocking time of one checkpoint, in a short run with one in every iteration."""
    complete_s: Seconds
    """From the end of an iteration until its checkpoint was complete, there."""
    iteration_s: Seconds = 0.0
    """Duration of an iteration without checkpoints and failures, right before and after the run."""
    failure: str = ""
    """What ended the run early; then nothing was measured."""
    run_id: str = ""
    mode: str = "live"
    wall_s: Seconds = 0.0
    """From where all ranks were ready to the end of the last iteration."""
    num_failures: int = 0
    redone_iterations: int = 0
    redone_s: Seconds = 0.0
    """Iterations that were done again, and the broken off part of those in which a failure came."""
    recovery_s: Seconds = 0.0
    """From failures until the state was restored."""
    checkpointing_s: Seconds = 0.0
    """What is left of the wasted time: stalls, and iterations that took longer beside checkpoints."""
    ettr: float | None = None
    predicted_ettr: float | None = None
    """With the interval, the blocking time and the mean recovery that were measured."""
    predicted_wasted_s: Seconds | None = None
    """By Gemini's formula, of one failure."""


class Economics(FrozenModel):
    """What a campaign with failures at random times came to."""

    mtbf_s: Seconds
    node_loss_frac: float
    iteration_s: Seconds | None = None
    """Duration of an iteration without checkpoints and failures, by which the schedule is drawn; None before that."""
    schedule: tuple[FaultSpec, ...] = ()
    rows: tuple[MeasuredEconomics, ...] = ()
