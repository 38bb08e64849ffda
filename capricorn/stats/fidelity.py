"""Figures of how faithful an emulation was, computed from its raw samples."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from capricorn.config.scenario import Scenario
from capricorn.emulation.route import QUANTUM_BYTES
from capricorn.emulation.testbed import PACED
from capricorn.records.samples import CPU, LINKS, PACE, CpuSample, LinkSample, PaceSample, read_samples
from capricorn.stats.numbers import quantile
from capricorn.units import BytesPerSecond, Seconds

MAX_RATE_ERROR = 0.05
"""The share by which a link may miss its rate."""
MAX_OVERRUN_FRAC = 0.05
"""The share of paced ops that may take longer than their model; beyond it a run stands for nothing."""

Fidelity: TypeAlias = dict[str, Any]


def fidelity(run_dir: Path, scenario: Scenario, num_cpus: int) -> Fidelity:
    """Returns the CPU time by whom; of an emulation also its links against their rate and its paced ops against their
    durations.
    """
    emulation = scenario.emulation
    cpu = _cpu(list(read_samples(run_dir / CPU, CpuSample)), num_cpus)
    if emulation is None:
        return cpu
    links = list(read_samples(run_dir / LINKS, LinkSample))
    rates = [link.bytes_per_s / emulation.link_bytes_per_s for link in links]
    return {
        "rho": emulation.rho,
        "link_bytes_per_s": emulation.link_bytes_per_s,
        "link_rate_frac_min": min(rates, default=None),
        "link_rate_frac_max": max(rates, default=None),
        "buffers_s": _buffers_s(scenario, emulation.link_bytes_per_s),
        "round_trip_s_p50": quantile([link.round_trip_s for link in links], 50),
        **_pacing(list(read_samples(run_dir / PACE, PaceSample)), scenario.train.warmup),
        **cpu,
    }


def _buffers_s(scenario: Scenario, link_bytes_per_s: BytesPerSecond) -> Seconds | None:
    """Returns how long the link takes for the bytes underway: those sent in one go, and those that its socket holds.

    The kernel doubles what a socket asks for. Links paced in user space take a quantum at a time, and none ahead.
    """
    system = scenario.system
    if system.name == "none" or system.every == 0:
        return None
    if scenario.cluster.links == PACED:
        return QUANTUM_BYTES / link_bytes_per_s
    is_planned = system.name == "capricorn" and scenario.planner.spans != "none"
    at_once_bytes = scenario.planner.max_chunk_bytes if is_planned else system.block_bytes
    return (at_once_bytes + 2 * system.send_buffer_bytes) / link_bytes_per_s


def fidelity_faults(figures: Fidelity, advice: str = "set cluster.iteration_s higher") -> list[str]:
    """Returns in what ways an emulation does not stand for what it models; none if it does."""
    faults = []
    rates = [figures.get(f"link_rate_frac_{edge}") for edge in ("min", "max")]
    if any(rate is not None and abs(rate - 1) > MAX_RATE_ERROR for rate in rates):
        faults.append(f"invalid: links carried {rates[0]:.2f} to {rates[1]:.2f} of their rate; free the CPU")
    frac = figures.get("overrun_frac")
    if frac is not None and frac > MAX_OVERRUN_FRAC:
        faults.append(
            f"invalid: {frac:.1%} of the paced ops took longer than their model, more than {MAX_OVERRUN_FRAC:.0%}; "
            f"free the CPU or {advice}"
        )
    return faults


def _pacing(samples: list[PaceSample], warmup: int) -> Fidelity:
    measured = [sample for sample in samples if sample.iteration > warmup]
    errors_s = list(chain.from_iterable(sample.errors_s for sample in measured))
    overruns_s = list(chain.from_iterable(sample.overruns_s.values() for sample in measured))
    num_ops = len(errors_s) + len(overruns_s)
    return {
        "paced_ops": num_ops,
        "pace_error_s_p50": quantile(errors_s, 50),
        "pace_error_s_p99": quantile(errors_s, 99),
        "overrun_frac": len(overruns_s) / num_ops if num_ops else None,
        "overrun_s_p50": quantile(overruns_s, 50),
    }


def _cpu(samples: list[CpuSample], num_cpus: int) -> Fidelity:
    capacity_s = sum(sample.duration_s for sample in samples) * num_cpus
    ours_s, others_s = (sum(getattr(sample, key) for sample in samples) for key in ("ours_s", "others_s"))
    return {
        "cpu_ours_frac": ours_s / capacity_s if capacity_s else None,
        "cpu_others_frac": others_s / capacity_s if capacity_s else None,
    }
