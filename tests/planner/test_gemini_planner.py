"""Gemini: its partition, its planner, its data path, and the search for its factor."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
import torch.distributed as dist
from capricorn.baselines.gemini import Gemini, GeminiStaged
from hypothesis import given
from hypothesis import strategies as st

from capricorn.config.fields import validate
from capricorn.config.resolve import load_model
from capricorn.config.scenario import Scenario
from capricorn.errors import CapricornError, ConfigError
from capricorn.launch import tuning
from capricorn.launch.launcher import RunListener
from capricorn.planner.gemini_planner import (
    FACTORS,
    UNPLANNED,
    GeminiPlanner,
    GeminiSettings,
    num_swept,
    partition,
    swept_factor,
)
from capricorn.planner.link_model import LinkModel
from capricorn.planner.plan import Plan
from capricorn.records.samples import append
from capricorn.runtime.save.live_source import CutStager, LiveSource
from capricorn.runtime.save.staging import CpuStager
from capricorn.runtime.store.slot import Layout, Slot, checksum
from capricorn.systems.flat_state import FlatState
from capricorn.systems.settings import settings_of, with_options
from tests.planner.test_profile import profile
from tests.runtime.test_planned_system import Training
from tests.stats.test_run_summary import sample
from tests.support.plans import overflow_bytes
from tests.support.spawn import run_ranks
from tests.support.states import staged_blocks

KIB = 1 << 10
LINK = LinkModel(0.001, 1e6)
SPANS = st.lists(st.floats(0, 0.2), max_size=20)
LINKS = st.builds(LinkModel, st.floats(0, 0.01), st.floats(1e3, 1e8))
INPUTS = st.fixed_dictionaries(
    {
        "spans_s": SPANS,
        "link": LINKS,
        "shard_bytes": st.integers(0, 1 << 21),
        "num_remote": st.integers(0, 3),
        "buffer_bytes": st.integers(16 * KIB, 1 << 20),
        "num_buffers": st.integers(2, 8),
        "mu": st.floats(0.05, 1.0),
    }
)


def cut(spans_s: list[float], link: LinkModel = LINK, **settings: Any) -> Plan:
    usual = {"shard_bytes": 100_000, "num_remote": 1, "buffer_bytes": 40_000, "num_buffers": 4, "mu": 1.0}
    return partition(spans_s, link, **(usual | settings))


# --- partition ---------------------------------------------------------------------------------------------------


@given(INPUTS)
def test_the_chunks_tile_the_shard_once_for_each_remote_replica(given_: dict[str, Any]) -> None:
    chunks = partition(**given_).chunks
    copies = range(given_["num_remote"]) if given_["shard_bytes"] else range(0)
    assert [copy for copy, _ in _by_copy(chunks)] == list(copies)
    for _, own in _by_copy(chunks):
        ends = [0, *(chunk.offset + chunk.num_bytes for chunk in own)]
        assert [chunk.offset for chunk in own] == ends[:-1]
        assert ends[-1] == given_["shard_bytes"]


def _by_copy(chunks: Any) -> list[tuple[int, list[Any]]]:
    copies = list(dict.fromkeys(chunk.replica for chunk in chunks))
    return [(copy, [chunk for chunk in chunks if chunk.replica == copy]) for copy in copies]


@given(INPUTS)
def test_no_span_but_the_last_is_filled_beyond_its_part(given_: dict[str, Any]) -> None:
    plan, link = partition(**given_), given_["link"]
    took_s: Counter[int] = Counter()
    for chunk in plan.chunks:
        took_s[chunk.span] += link.transfer_s(chunk.num_bytes)
    for index, span_s in enumerate(given_["spans_s"][:-1]):
        assert took_s[index] <= given_["mu"] * span_s * (1 + 1e-9) + 1e-12


@given(INPUTS)
def test_no_chunk_is_larger_than_a_sub_buffer(given_: dict[str, Any]) -> None:
    most = given_["buffer_bytes"] // given_["num_buffers"]
    assert all(0 < chunk.num_bytes <= most for chunk in partition(**given_).chunks)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("length_s", [0.0005, 0.001, 0.0010000001])
def test_spans_no_longer_than_the_latency_are_left_and_do_not_loop_for_ever(length_s: float) -> None:
    plan = cut([length_s] * 5 + [1.0])
    assert {chunk.span for chunk in plan.chunks} == {5}


def test_a_span_gets_shorter_by_what_was_put_in_it() -> None:
    # Two whole sub-buffers take 11 ms each, of the third 2 ms less its latency are left.
    plan = cut([0.024, 1.0])
    assert [chunk.num_bytes for chunk in plan.chunks if chunk.span == 0] == [10_000, 10_000, 1000]


def test_what_does_not_fit_goes_into_the_last_span_whatever_its_length() -> None:
    plan = cut([0.011, 0.0001])
    assert sum(chunk.num_bytes for chunk in plan.chunks if chunk.span == 1) == 90_000
    assert plan.limits[1].num_bytes == 90_000
    assert overflow_bytes(plan) == 0


def test_as_many_copies_are_sent_as_there_are_remote_replicas_and_not_one_more() -> None:
    for num_remote in (1, 2, 3):
        copies = Counter(chunk.replica for chunk in cut([0.5] * 40, num_remote=num_remote).chunks)
        assert copies == Counter(dict.fromkeys(range(num_remote), 10))


def test_a_smaller_factor_leaves_more_for_later_spans() -> None:
    whole, half = (cut([0.022, 0.022, 1.0], mu=mu) for mu in (1.0, 0.5))
    assert [limit.num_bytes for limit in whole.limits] == [20_000, 20_000, 60_000]
    assert [limit.num_bytes for limit in half.limits] == [10_000, 10_000, 80_000]


# --- planner -----------------------------------------------------------------------------------------------------


def planner(mu: float | str = 0.7, **config: Any) -> GeminiPlanner:
    settings = GeminiSettings.model_validate({"mu": mu, "profile_iterations": 3, "buffer_bytes": 40_000} | config)
    return GeminiPlanner(settings, rank=0, num_remote=1, shard_bytes=100_000)


def watched(mu: float | str = 0.7) -> GeminiPlanner:
    one = planner(mu)
    for factor in (1.0, 2.0, 3.0):
        assert one.wants_profile(1)
        one.observe(profile({str(op): (factor, factor) for op in profile({}).ops}))
    return one


def test_the_first_iterations_are_profiled_and_no_other() -> None:
    one = planner()
    assert [one.wants_profile(iteration) for iteration in range(1, 7)] == [True] * 3 + [False] * 3


def test_spans_are_the_means_of_the_profiled_iterations() -> None:
    lengths = [profile({str(op): (f, f) for op in profile({}).ops}).own_span_s(0) for f in (1.0, 2.0, 3.0)]
    limits = watched().plan(4, LINK).limits
    assert [limit.end_s for limit in limits] == pytest.approx([fmean(each) for each in zip(*lengths, strict=True)])


def test_a_rank_goes_by_its_own_gaps_not_by_its_stragglers() -> None:
    measured = profile({"attention.0.forward": (1.0, 5.0)})
    assert measured.own_span_s(0)[0] == 2.0
    assert measured.own_span_s(1)[0] == 6.0
    assert measured.span_s()[0][0] == 6.0


def test_the_plan_stays_whatever_the_loads_do() -> None:
    one = watched()
    before = one.plan(4, LINK)
    for iteration in range(5, 30):
        one.on_routed(0, (iteration, 0))
        one.note(iteration, 10.0, 0.0)
        assert not one.wants_profile(iteration)
        assert one.plan(iteration, LINK) == before
        assert not one.replanned


def test_without_a_profile_or_a_measured_link_all_goes_as_soon_as_it_can() -> None:
    for one, link in ((planner(), LINK), (watched(), None)):
        plan = one.plan(4, link)
        assert plan.limits == ()
        assert sum(chunk.num_bytes for chunk in plan.chunks) == 100_000


def test_a_sweep_tries_each_factor_as_often_and_the_first_plan_not_at_all() -> None:
    tried = Counter(map(swept_factor, range(num_swept(GeminiSettings()))))
    assert set(tried) == set(FACTORS)
    assert len(set(tried.values())) == 1
    one = watched("sweep")
    assert [one.plan(4 + number, LINK).limits for number in range(UNPLANNED)] == [()] * UNPLANNED
    slow = LinkModel(0.0, 1e4)
    plans = [one.plan(9 + number, slow) for number in range(len(FACTORS))]
    first = [plan.limits[0].num_bytes for plan in plans]
    assert first == sorted(first)
    assert first[0] < first[-1]


@pytest.mark.parametrize("mu", [0.0, -0.5, 1.01])
def test_a_factor_out_of_range_is_refused(mu: float) -> None:
    with pytest.raises(ConfigError, match="safety factor"):
        validate(GeminiSettings, {"mu": mu}, "gemini")


@pytest.mark.parametrize("num_buffers", [2000, 40])
def test_sub_buffers_of_nearly_nothing_are_refused(num_buffers: int) -> None:
    with pytest.raises(ConfigError, match="a smaller"):
        validate(GeminiSettings, {"buffer_bytes": "32KiB", "num_buffers": num_buffers}, "gemini")


# --- direct path -------------------------------------------------------------------------------------------------


def odd_state() -> FlatState:
    torch.manual_seed(1)
    tensors = {
        "a": torch.randn(50_001),
        "b": torch.randn(64, 96).t(),  # with gaps, and over several blocks
        "c": torch.randint(0, 99, (7,), dtype=torch.int16),
        "d": torch.tensor(3.5),
        "e": torch.randn(0),
        "f": torch.randn(33_333).to(torch.bfloat16),
    }
    return FlatState(tensors, capture=lambda: {"position": torch.tensor(9)})


@pytest.mark.parametrize("buffer_bytes", [1, 40_000, 1 << 30])
@pytest.mark.parametrize("num_buffers", [2, 5])
def test_the_live_source_reads_what_a_slot_would_hold(tmp_path: Path, buffer_bytes: int, num_buffers: int) -> None:
    state = odd_state()
    layout = Layout(state.num_bytes, 4096, state.digest)
    slot = Slot(tmp_path / "slot", 0, layout)
    list(staged_blocks(CpuStager(state, [slot]), slot))
    cpu = torch.device("cpu")
    live = LiveSource(state, layout, cpu, buffer_bytes=buffer_bytes, num_buffers=num_buffers)
    for change in (0.0, 1.0):
        state.tensors["a"].add_(change)
        list(staged_blocks(CpuStager(state, [slot]), slot))
        live.begin()
        for index in range(layout.num_blocks):
            block = layout.block(index)
            middle = (block.start + block.stop) // 2
            assert bytes(live.view(block.start, middle)) == bytes(slot.payload[block.start : middle])
            assert bytes(live.view(middle, block.stop)) == bytes(slot.payload[middle : block.stop])
            assert live.checksum(index) == checksum(slot.payload[block])


def test_the_local_copy_is_made_while_training_communicates_and_at_no_other_time(tmp_path: Path) -> None:
    state = odd_state()
    slot = Slot(tmp_path / "slot", 0, Layout(state.num_bytes, 4096, state.digest))
    stager = CutStager(CpuStager(state, [slot]), patience_s=0.01)
    blocks = staged_blocks(stager, slot)
    begin = time.monotonic()
    assert next(blocks) == 0
    assert time.monotonic() - begin >= 0.01  # shut, so only patience let it pass
    stager.open()
    assert list(blocks) == list(range(1, slot.layout.num_blocks))


class Job(Training):
    """A training under Gemini, whose profile is short."""

    def __init__(
        self, rank: int, num_nodes: int, folder: str, system: type[Any], attempt: int = 0, **config: Any
    ) -> None:
        gemini = GeminiSettings(mu=0.7, profile_iterations=3, buffer_bytes=256 * KIB)
        super().__init__(rank, num_nodes, Path(folder), attempt, system=system, options=gemini, **config)


def save_and_restore(rank: int, num_nodes: int, folder: str, system: type[Any], replicas: int) -> dict[str, Any]:
    job = Job(rank, num_nodes, folder, system, replicas=replicas)
    planned = job.run(1, 12)
    waiting = job.system._commit_tracker.pending is not None
    job.system.drain(10.0)
    completed = job.system.take_completed()
    job.system.close()
    job.system.close()
    dist.barrier()
    if rank == 0:
        for path in job.folder.iterdir():
            path.unlink()
    again = Job(rank, num_nodes, folder, system, attempt=1, replicas=replicas)
    report = again.system.restore()
    exact = torch.equal(again.weights, again.weights_of(report.iteration))
    again.run(report.iteration + 1, report.iteration + 2)
    again.system.drain(10.0)
    latest = again.system.latest_complete()
    again.system.close()
    return {
        "completed": completed, "restored": report.iteration, "exact": exact, "latest": latest, "waiting": waiting,
        "planned": planned, "first": job.system.first_iteration, "first_again": again.system.first_iteration,
        "sources": list(report.sources),
    }  # fmt: skip


@pytest.mark.parametrize("system", [Gemini, GeminiStaged])
@pytest.mark.parametrize(("num_nodes", "replicas"), [(2, 2), pytest.param(3, 3, marks=pytest.mark.slow)])
def test_what_was_saved_after_the_profile_is_restored_bit_for_bit(
    tmp_path: Path, system: type[Any], num_nodes: int, replicas: int
) -> None:
    for result in run_ranks(save_and_restore, num_nodes, str(tmp_path), system, replicas):
        assert result["first"] == 4
        assert result["completed"] == list(range(4, 13))
        assert (result["restored"], result["exact"], result["latest"]) == (12, True, 14)
        assert result["sources"] == ["peer"] + ["local"] * (num_nodes - 1)
        assert result["first_again"] == 0  # there is something to lose by then
        assert [plan.profiled for plan in result["planned"]] == [True] * 3 + [False] * 9
        assert sum(plan.replanned for plan in result["planned"]) == 1


def update_at_once(rank: int, num_nodes: int, folder: str) -> bool:
    """Whether each update found all of the state before on its way out."""
    job = Job(rank, num_nodes, folder, Gemini)
    out = []
    for iteration in range(1, 9):
        job.run(iteration, iteration)
        job.system.before_update(iteration + 1)
        save = job.system._commit_tracker.pending
        out.append(save is None or save.is_settled)
    job.system.drain(10.0)
    job.system.close()
    return all(out)


def test_the_update_waits_until_peers_have_all_of_the_live_state(tmp_path: Path) -> None:
    assert run_ranks(update_at_once, 2, str(tmp_path)) == [True, True]


def attach_untuned(rank: int, num_nodes: int, folder: str) -> str:
    try:
        Training(rank, num_nodes, Path(folder), system=Gemini)
    except ConfigError as error:
        return str(error)
    return "attached"


def test_a_job_without_a_factor_is_refused(tmp_path: Path) -> None:
    assert all("give a number" in message for message in run_ranks(attach_untuned, 2, str(tmp_path)))


# --- tuning ------------------------------------------------------------------------------------------------------


def scenario(system: str = "gemini", **system_fields: Any) -> Scenario:
    parts = {"model": load_model("mixtral-tiny"), "system": {"name": system} | system_fields}
    return Scenario.model_validate(parts)


def fake_launch(best: float) -> Any:
    """A sweep in which iterations are the shorter the nearer their factor is to `best`."""

    def launch(swept: Scenario, out: Path, listener: RunListener) -> Path:
        assert settings_of(swept).mu == "sweep"
        folder = out / "sweep"
        folder.mkdir()
        for iteration in range(1, swept.train.iterations + 1):
            # A checkpoint leaves in the iteration after its own; the first are those of 21 and 22, unplanned.
            factor = swept_factor(iteration - 24) if iteration >= 24 else 0.0
            for rank in range(2):
                took_s = 1.0 + abs(factor - best) * (1 + rank)
                append(folder / "iterations.jsonl", sample(iteration, rank, duration_s=took_s))
        return folder

    return launch


@pytest.mark.parametrize("best", FACTORS)
def test_the_factor_with_the_shortest_iterations_is_taken(tmp_path: Path, best: float) -> None:
    tuned, run_id = tuning.tune(scenario(), tmp_path, RunListener(), fake_launch(best))
    assert (settings_of(tuned).mu, settings_of(tuned).tuned_in, run_id) == (best, "sweep", "sweep")
    assert not tuning.needs_tuning(tuned)
    assert tuned.train == scenario().train


def test_nothing_is_tried_where_nothing_is_sent(tmp_path: Path) -> None:
    for fields in ({"replicas": 1}, {"every": 0}):
        tuned, run_id = tuning.tune(scenario(**fields), tmp_path, RunListener())
        assert (settings_of(tuned).mu, run_id) == (1.0, "")


def test_a_sweep_that_was_started_again_tells_nothing() -> None:
    with pytest.raises(CapricornError, match="started again"):
        tuning.durations_by_factor(GeminiSettings(), [sample(1), sample(1, attempt=1)])


def test_only_gemini_without_a_factor_is_tuned() -> None:
    assert tuning.needs_tuning(scenario())
    assert tuning.needs_tuning(scenario("gemini-staged"))
    assert not tuning.needs_tuning(scenario("capricorn"))
    fixed = with_options(scenario(), mu=0.5)
    assert not tuning.needs_tuning(fixed)


def test_the_sweep_ends_with_the_last_factor_tried() -> None:
    for rounds in (1, 2, 3):
        gemini = GeminiSettings(sweep_rounds=rounds)
        swept = tuning.sweep_of(with_options(scenario(), sweep_rounds=rounds))
        durations_s = tuning.durations_by_factor(gemini, [sample(i) for i in range(1, swept.train.iterations + 1)])
        assert {factor: len(each) for factor, each in durations_s.items()} == dict.fromkeys(FACTORS, 2 * rounds)
