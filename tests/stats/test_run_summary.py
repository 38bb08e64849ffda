"""What the summary makes of hand-made samples; every expected figure can be checked by head."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from capricorn.config.cluster import ClusterConfig
from capricorn.config.resolve import load_model
from capricorn.config.scenario import PersistConfig, Scenario, SystemConfig, TrainConfig
from capricorn.records.samples import (
    EVENTS,
    ITERATIONS,
    RECOVERIES,
    EventSample,
    IterationSample,
    RecoverySample,
    append,
    read_run,
)
from capricorn.stats.run_samples import SETTLING
from capricorn.stats.run_summary import summarize
from tests.support.sources import ROOT


def scenario(iterations: int, warmup: int = 0, ranks: int = 2) -> Scenario:
    return Scenario(
        model=load_model("mixtral-tiny"),
        train=TrainConfig(iterations=iterations, warmup=warmup),
        cluster=ClusterConfig(nodes=2, ranks_per_node=ranks // 2),
    )


def without_checkpoints(iterations: int, warmup: int = 0) -> Scenario:
    return scenario(iterations, warmup).model_copy(update={"system": SystemConfig(every=0)})


def sample(iteration: int, rank: int = 0, attempt: int = 0, **fields: Any) -> IterationSample:
    usual = {
        "at_s": 0.0, "duration_s": 1.0, "stall_s": 0.1, "loss": 5.0, "tokens": 100, "requested": True,
        "latest_complete": iteration, "completed": (iteration,),
    }  # fmt: skip
    return IterationSample.model_validate({"iteration": iteration, "rank": rank, "attempt": attempt} | usual | fields)


def resume(folder: Path, iteration: int, attempt: int = 1) -> None:
    append(folder / EVENTS, EventSample(event="resumed", at_s=0, attempt=attempt, rank=0, iteration=iteration))


def recovery(resumed_iteration: int, lost_iterations: int) -> RecoverySample:
    phases = dict.fromkeys(("detect_s", "restart_s", "agree_s", "fetch_s", "load_s", "first_iteration_s"), 0.5)
    return RecoverySample(
        attempt=1, what="kill", detected_at_s=0.0, resumed_iteration=resumed_iteration,
        lost_iterations=lost_iterations, sources=["local", "peer"], **phases,
    )  # fmt: skip


def write(folder: Path, *samples: IterationSample) -> Path:
    for each in samples:
        append(folder / ITERATIONS, each)
    return folder


def both_ranks(*iterations: int, attempt: int = 0, **fields: Any) -> list[IterationSample]:
    return [sample(i, rank, attempt, **fields) for i in iterations for rank in range(2)]


def test_an_iteration_lasts_as_long_as_on_its_slowest_rank(tmp_path: Path) -> None:
    for i in range(1, 5):
        fast, slow = sample(i, 0, duration_s=i, requested=False), sample(i, 1, duration_s=10 * i, stall_s=0.2)
        write(tmp_path, fast, slow.model_copy(update={"requested": False}))
    summary, verdict = summarize(tmp_path, without_checkpoints(4, warmup=1))
    assert verdict == "ok"
    assert summary["iterations"] == 4
    assert summary["iteration_s_p50"] == 30  # of 20, 30, 40
    assert summary["iteration_s_p95"] == pytest.approx(39)
    assert summary["iteration_s_p99"] == pytest.approx(39.8)
    assert summary["stall_s_p50"] == summary["stall_s_max"] == 0.2
    assert summary["tokens_per_s"] == pytest.approx(3 * 200 / 90)


def test_warm_up_and_the_first_checkpoints_are_left_out_and_the_very_first_is_reported_apart(tmp_path: Path) -> None:
    write(tmp_path, *both_ranks(1, 2, duration_s=50, requested=False), *both_ranks(3, duration_s=20, stall_s=9))
    write(tmp_path, *both_ranks(4, 5, duration_s=20, stall_s=3), *both_ranks(6, 7, duration_s=2, stall_s=1))
    summary, _ = summarize(tmp_path, scenario(7, warmup=2))
    assert summary["measured_iterations"] == 2
    assert summary["iteration_s_p50"] == 2
    assert summary["stall_s_max"] == 1
    assert summary["first_stall_s"] == 9


def test_a_system_of_few_checkpoints_has_settled_after_the_last_of_them(tmp_path: Path) -> None:
    for i in range(1, 9):
        requested = i in (3, 6)
        write(tmp_path, *both_ranks(i, duration_s=20 if i < 7 else 2, requested=requested))
    assert summarize(tmp_path, scenario(8, warmup=1))[0]["measured_iterations"] == 2


def test_a_warm_up_that_is_longer_than_settling_counts(tmp_path: Path) -> None:
    write(tmp_path, *both_ranks(*range(1, 11)))
    assert summarize(tmp_path, scenario(10, warmup=6))[0]["measured_iterations"] == 4


def test_a_run_of_one_iteration_still_has_a_summary(tmp_path: Path) -> None:
    summary, verdict = summarize(write(tmp_path, *both_ranks(1)), scenario(1))
    assert (summary["iteration_s_p50"], verdict) == (1, "ok")


def test_the_last_attempt_of_a_redone_iteration_counts(tmp_path: Path) -> None:
    write(tmp_path, *both_ranks(1, 2, 3, duration_s=9, loss=9), sample(4, 0, duration_s=99))
    write(tmp_path, *both_ranks(3, 4, attempt=1, duration_s=2, loss=4, sent_bytes=10))
    append(tmp_path / RECOVERIES, recovery(resumed_iteration=2, lost_iterations=1))
    summary, verdict = summarize(tmp_path, scenario(4, warmup=2))
    assert verdict == "ok"
    assert (summary["iterations"], summary["iteration_s_p50"], summary["final_loss"]) == (4, 2, 4)
    assert (summary["recoveries"], summary["lost_iterations"], summary["recovery_s"]) == (1, 1, 3)
    assert summary["sent_bytes"] == 40


def test_what_was_rolled_back_and_not_redone_is_not_done(tmp_path: Path) -> None:
    write(tmp_path, *both_ranks(1, 2, 3, 4), *both_ranks(3, attempt=1))
    summary, verdict = summarize(tmp_path, scenario(5))
    assert summary["iterations"] == 3
    assert "stopped after 3 of 5 iterations" in verdict


def test_what_was_rolled_back_before_an_interrupt_is_not_done(tmp_path: Path) -> None:
    write(tmp_path, *both_ranks(1, 2, 3, 4))
    resume(tmp_path, 2)
    assert summarize(tmp_path, scenario(5))[0]["iterations"] == 2


def test_an_iteration_that_was_restored_is_done_though_a_rank_died_before_its_sample(tmp_path: Path) -> None:
    write(tmp_path, *both_ranks(1), sample(2, 0, completed=()), *both_ranks(3, attempt=1))
    resume(tmp_path, 2)
    summary, verdict = summarize(tmp_path, scenario(3))
    assert (summary["iterations"], summary["requested"], summary["effective"], verdict) == (3, 3, 3, "ok")


def test_a_last_iteration_that_only_its_checkpoint_shows_is_done(tmp_path: Path) -> None:
    write(tmp_path, *both_ranks(1, 2))
    resume(tmp_path, 3)
    assert summarize(tmp_path, scenario(3))[1] == "ok"


def test_an_iteration_that_one_rank_did_not_finish_is_not_done(tmp_path: Path) -> None:
    summary, verdict = summarize(write(tmp_path, *both_ranks(1, 2), sample(3, 0)), scenario(3))
    assert (summary["iterations"], summary["requested"]) == (2, 2)
    assert verdict == "stopped after 2 of 3 iterations"


def test_fewer_effective_than_requested_is_said_in_the_verdict(tmp_path: Path) -> None:
    for i in range(1, 21):
        write(tmp_path, *both_ranks(i, latest_complete=max(0, i - 3), completed=[i - 3] if i > 3 else []))
    summary, verdict = summarize(tmp_path, scenario(20))
    assert (summary["requested"], summary["effective"]) == (20, 17)
    assert summary["replica_lag_p50"] == summary["replica_lag_max"] == 3
    assert verdict == "effective checkpoints 17 of 20 requested"


def test_every_second_iteration_requested_counts_only_those(tmp_path: Path) -> None:
    for i in range(1, 7):
        write(tmp_path, *both_ranks(i, requested=i % 2 == 0, latest_complete=i - i % 2, completed=[i][i % 2 :]))
    summary, verdict = summarize(tmp_path, scenario(6))
    assert (summary["requested"], summary["effective"], verdict) == (3, 3, "ok")


def test_a_checkpoint_skipped_in_between_is_not_effective(tmp_path: Path) -> None:
    write(tmp_path, *both_ranks(1), *both_ranks(2, completed=()), *both_ranks(3))
    assert summarize(tmp_path, scenario(3))[1] == "effective checkpoints 2 of 3 requested"


def test_a_checkpoint_completed_after_the_last_iteration_is_effective(tmp_path: Path) -> None:
    write(tmp_path, *both_ranks(1), *both_ranks(2, latest_complete=1, completed=()))
    append(tmp_path / EVENTS, EventSample(event="finished", at_s=0, attempt=0, rank=1, iteration=2, completed=(2,)))
    assert summarize(tmp_path, scenario(2))[1] == "ok"


def test_a_redone_iteration_must_become_complete_again(tmp_path: Path) -> None:
    write(tmp_path, *both_ranks(1, 2, 3), *both_ranks(2, attempt=1, completed=()), *both_ranks(3, attempt=1))
    resume(tmp_path, 1)
    assert summarize(tmp_path, scenario(3))[1] == "effective checkpoints 2 of 3 requested"


def test_a_checkpoint_that_was_restored_was_complete(tmp_path: Path) -> None:
    write(tmp_path, *both_ranks(1), *both_ranks(2, completed=()), *both_ranks(3, attempt=1))
    resume(tmp_path, 2)
    assert summarize(tmp_path, scenario(3))[1] == "ok"


def test_system_none_requests_nothing(tmp_path: Path) -> None:
    none = scenario(2).model_copy(update={"system": SystemConfig(name="none")})
    summary, verdict = summarize(write(tmp_path, *both_ranks(1, 2, latest_complete=0, completed=())), none)
    assert (summary["requested"], summary["first_stall_s"], verdict) == (0, None, "ok")


def test_no_complete_checkpoint_is_never_ok(tmp_path: Path) -> None:
    summary, verdict = summarize(write(tmp_path, *both_ranks(1, 2, latest_complete=0, completed=())), scenario(2))
    assert summary["effective"] == 0
    assert verdict == "no checkpoint became complete"


def test_a_run_without_checkpoints_is_ok_and_has_no_lag(tmp_path: Path) -> None:
    samples = both_ranks(1, 2, requested=False, latest_complete=0, completed=(), stall_s=0)
    summary, verdict = summarize(write(tmp_path, *samples), without_checkpoints(2))
    assert (summary["requested"], summary["effective"], summary["replica_lag_p50"], verdict) == (0, 0, None, "ok")


def test_a_run_in_which_no_checkpoint_came_due_is_not_ok(tmp_path: Path) -> None:
    write(tmp_path, *both_ranks(1, 2, requested=False, latest_complete=0, completed=()))
    _, verdict = summarize(tmp_path, scenario(2))
    assert verdict == "no checkpoint came due in 2 iterations: train longer, or make them more often"


@pytest.mark.parametrize(
    ("every", "counted", "due", "verdict"),
    [
        (2, {"persisted": 1}, 3, "ok"),
        (2, {"failed_persists": 1}, 3, "persisted 0 of 3 checkpoints that were due: 6 failed"),
        (2, {"skipped_persists": 1}, 3, "persisted 0 of 3 checkpoints that were due: 0 failed"),
        (4, {}, 1, "persisted 0 of 1 checkpoints that were due: 0 failed"),
        (7, {}, 0, "no checkpoint came due for the persistent tier: train longer, or persist more often"),
        (0, {}, None, "ok"),
    ],
)
def test_a_run_that_was_to_persist_and_persisted_nothing_has_a_verdict_of_its_own(
    every: int, counted: dict[str, int], due: int | None, verdict: str, tmp_path: Path
) -> None:
    write(tmp_path, *both_ranks(1, 2, 3, 4, 5, 6, **counted))
    summary, said = summarize(tmp_path, scenario(6).model_copy(update={"persist": PersistConfig(every=every)}))
    assert (summary["due_persists"], said) == (due, verdict)


def test_a_record_that_lacks_a_rank_names_it_and_is_not_ok(tmp_path: Path) -> None:
    write(tmp_path, *(sample(i, rank=1) for i in range(1, 5)))
    summary, verdict = summarize(tmp_path, scenario(4).model_copy(update={"persist": PersistConfig(every=2)}))
    assert (summary["iterations"], summary["due_persists"]) == (0, None)
    assert verdict.startswith("no record of rank 0; stopped after 0 of 4 iterations")


def test_memory_is_the_sum_of_each_ranks_peak(tmp_path: Path) -> None:
    write(tmp_path, sample(1, 0, rss_bytes=5), sample(1, 1, rss_bytes=1), sample(2, 0, rss_bytes=2))
    write(tmp_path, sample(2, 1, rss_bytes=3))
    (tmp_path / "store.json").write_text('{"store_bytes": 77}')
    summary, _ = summarize(tmp_path, scenario(2))
    assert (summary["peak_rss_bytes"], summary["peak_rss_rank_bytes"], summary["store_bytes"]) == (8, 5, 77)


def test_a_last_line_cut_by_a_kill_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, *both_ranks(1, 2))
    with (tmp_path / ITERATIONS).open("a") as file:
        file.write(sample(3).model_dump_json()[:40])
    assert summarize(tmp_path, scenario(3))[0]["iterations"] == 2


def test_damaged_lines_are_left_out_and_named_and_the_rest_is_read(tmp_path: Path) -> None:
    write(tmp_path, *both_ranks(1, 2, 3))
    whole, _ = summarize(tmp_path, scenario(3))
    for name in (ITERATIONS, EVENTS):
        path = tmp_path / name
        path.write_text("{}\n" + (path.read_text() if path.exists() else ""))
    summary, _ = summarize(tmp_path, scenario(3))
    assert summary.pop("notes") == [f"{name}: 1 line is damaged and left out (1)" for name in (ITERATIONS, EVENTS)]
    assert not whole.pop("notes")
    assert summary == whole


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_told_and_is_no_fault_of_the_run(loss: float, tmp_path: Path) -> None:
    write(tmp_path, *both_ranks(1, loss=1.0), *both_ranks(2, 3, loss=loss))
    summary, verdict = summarize(tmp_path, scenario(3))
    assert verdict == "ok"
    assert summary["final_loss"].hex() == loss.hex()
    assert summary["not_finite_from"] == 2
    assert summary["notes"] == ["the loss is not finite from iteration 2 on"]


def test_a_loss_that_is_not_finite_and_was_rolled_back_is_forgotten(tmp_path: Path) -> None:
    resume(tmp_path, 1)
    write(tmp_path, *both_ranks(1), *both_ranks(2, loss=math.nan), *both_ranks(2, 3, attempt=1))
    summary, _ = summarize(tmp_path, scenario(3))
    assert (summary["not_finite_from"], summary["notes"]) == (None, [])


def test_a_run_that_did_nothing_has_a_summary_that_is_json(tmp_path: Path) -> None:
    summary, verdict = summarize(tmp_path, scenario(3))
    assert verdict == "stopped after 0 of 3 iterations"
    assert "NaN" not in json.dumps(summary)


PUBLISHED = sorted(path.parent for path in (ROOT / "results" / "published").glob("*/run.json"))


def test_the_summaries_of_published_runs_are_still_those_they_were_published_with() -> None:
    same_rule = []
    for folder in PUBLISHED:
        record = read_run(folder)
        summary, _ = summarize(folder, record.config, record.environment.num_cpus)
        # Some runs were summarised when a system was taken to settle later: theirs are figures of other iterations.
        if summary["measured_iterations"] == record.summary["measured_iterations"]:
            same_rule.append(folder.name)
            assert {key: summary[key] for key in record.summary} == record.summary, folder.name
    assert len(same_rule) > 20


def test_figures_are_those_of_a_table_of_the_samples(tmp_path: Path) -> None:
    draw = random.Random(0)
    for i, rank in [(i, rank) for i in range(1, 31) for rank in draw.sample(range(8), 8)]:
        changing = {
            "duration_s": draw.uniform(0.1, 3), "stall_s": draw.uniform(0, 0.5), "loss": draw.uniform(1, 11),
            "tokens": draw.randrange(5000), "sent_bytes": draw.randrange(10**9), "rss_bytes": draw.randrange(10**10),
        }  # fmt: skip
        write(tmp_path, sample(i, rank, **changing))
    table = pd.read_json(tmp_path / ITERATIONS, lines=True, precise_float=True)
    steady = table[table["iteration"] > SETTLING].groupby("iteration")
    duration_s, stall_s = steady["duration_s"].max(), steady["stall_s"].max()
    summary, verdict = summarize(tmp_path, scenario(30, ranks=8))
    assert verdict == "ok"
    expected = {
        **{f"iteration_s_p{p}": duration_s.quantile(p / 100) for p in (50, 95, 99)},
        **{f"stall_s_p{p}": stall_s.quantile(p / 100) for p in (50, 95)},
        "stall_s_max": stall_s.max(),
        "tokens_per_s": steady["tokens"].sum().sum() / duration_s.sum(),
        "sent_bytes_per_s": steady["sent_bytes"].sum().sum() / duration_s.sum(),
        "peak_rss_bytes": table.groupby("rank")["rss_bytes"].max().sum(),
        "first_stall_s": table[table["iteration"] == 1]["stall_s"].max(),
    }
    assert {key: summary[key] for key in expected} == expected
    assert summary["final_loss"] == pytest.approx(table[table["iteration"] == 30]["loss"].mean(), rel=1e-12)
