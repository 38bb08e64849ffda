"""What is told of an emulation's faithfulness, and when it stands for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from capricorn.config.cluster import ClusterConfig
from capricorn.config.resolve import load_model
from capricorn.config.scenario import Scenario, TrainConfig
from capricorn.records.samples import CPU, LINKS, PACE, CpuSample, LinkSample, PaceSample, append
from capricorn.sizing.scale import scale
from capricorn.stats.fidelity import fidelity, fidelity_faults

CLUSTER = ClusterConfig(name="mine", device="cpu", attention_s=0.02, expert_s=0.03, rate_bytes_per_s=25e6)
EMULATED = scale(Scenario(model=load_model("mixtral-tiny"), cluster=CLUSTER, train=TrainConfig(warmup=1)))


def write_pace(folder: Path, iteration: int, *, kept: int, overrun: int) -> None:
    errors_s = [0.001 * number for number in range(1, kept + 1)]
    overruns_s = {f"gate.{number}.forward": 0.5 for number in range(overrun)}
    append(
        folder / PACE,
        PaceSample(iteration=iteration, rank=0, attempt=0, errors_s=errors_s, overruns_s=overruns_s),
    )


def test_links_are_told_as_parts_of_their_rate(tmp_path: Path) -> None:
    for source, rate in enumerate((24e6, 25.5e6)):
        sample = LinkSample(source=source, target=1 - source, bytes_per_s=rate, round_trip_s=1e-4 * (1 + source))
        append(tmp_path / LINKS, sample)
    figures = fidelity(tmp_path, EMULATED, num_cpus=2)
    assert figures["link_rate_frac_min"] == pytest.approx(0.96)
    assert figures["link_rate_frac_max"] == pytest.approx(1.02)
    assert figures["round_trip_s_p50"] == pytest.approx(1.5e-4)


@pytest.mark.parametrize(("overrun", "is_valid"), [(5, True), (6, False)])
def test_a_run_is_invalid_when_more_than_a_twentieth_of_its_ops_overran(
    tmp_path: Path, overrun: int, is_valid: bool
) -> None:
    write_pace(tmp_path, 2, kept=100 - overrun, overrun=overrun)
    figures = fidelity(tmp_path, EMULATED, num_cpus=2)
    assert figures["overrun_frac"] == pytest.approx(overrun / 100)
    assert (fidelity_faults(figures) == []) == is_valid


@pytest.mark.parametrize(("rate", "is_valid"), [(24e6, True), (23e6, False), (27e6, False)])
def test_a_run_is_invalid_when_a_link_missed_its_rate(tmp_path: Path, rate: float, is_valid: bool) -> None:
    append(tmp_path / LINKS, LinkSample(source=0, target=1, bytes_per_s=rate, round_trip_s=1e-4))
    assert (fidelity_faults(fidelity(tmp_path, EMULATED, num_cpus=2)) == []) == is_valid


def test_a_run_without_checkpoints_has_nothing_underway(tmp_path: Path) -> None:
    system = EMULATED.system.model_copy(update={"every": 0})
    off = fidelity(tmp_path, EMULATED.model_copy(update={"system": system}), num_cpus=2)
    assert off["buffers_s"] is None
    assert fidelity(tmp_path, EMULATED, num_cpus=2)["buffers_s"] == pytest.approx((262144 + 2 * 131072) / 25e6)


def test_the_fault_names_the_figure_and_what_to_do(tmp_path: Path) -> None:
    write_pace(tmp_path, 2, kept=1, overrun=1)
    assert "invalid: 50.0% of the paced ops" in fidelity_faults(fidelity(tmp_path, EMULATED, 2))[0]


def test_warm_up_counts_neither_for_nor_against(tmp_path: Path) -> None:
    write_pace(tmp_path, 1, kept=0, overrun=50)
    write_pace(tmp_path, 2, kept=10, overrun=0)
    figures = fidelity(tmp_path, EMULATED, num_cpus=2)
    assert (figures["paced_ops"], figures["overrun_frac"]) == (10, 0.0)
    assert figures["pace_error_s_p50"] == pytest.approx(0.0055)


def test_cpu_time_is_told_as_a_part_of_all_cores(tmp_path: Path) -> None:
    append(tmp_path / CPU, CpuSample(duration_s=10.0, ours_s=5.0, others_s=1.0))
    figures = fidelity(tmp_path, EMULATED, num_cpus=2)
    assert (figures["cpu_ours_frac"], figures["cpu_others_frac"]) == (pytest.approx(0.25), pytest.approx(0.05))


def test_an_interrupted_emulation_without_samples_has_no_figures_and_no_fault(tmp_path: Path) -> None:
    figures = fidelity(tmp_path, EMULATED, num_cpus=2)
    assert figures["overrun_frac"] is None
    assert fidelity_faults(figures) == []


def test_a_live_run_has_none_of_it(tmp_path: Path) -> None:
    live = fidelity(tmp_path, Scenario(model=load_model("mixtral-tiny")), num_cpus=2)
    assert set(live) == {"cpu_ours_frac", "cpu_others_frac"}
    assert fidelity_faults(live) == []
