"""What is told of planning, from hand-made samples of two ranks; every expected figure can be checked by head."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from capricorn.config.cluster import ClusterConfig
from capricorn.config.resolve import load_model
from capricorn.config.scenario import Scenario, SystemConfig, TrainConfig
from capricorn.records.samples import ITERATIONS, OPS, Environment, IterationSample, OpSample, RunRecord, append
from capricorn.report.terminal.run_table import run_table
from capricorn.stats.run_summary import summarize

FIGURES = Path(__file__).parents[2] / "docs"
SCENARIO = Scenario(
    model=load_model("mixtral-tiny"),
    train=TrainConfig(iterations=7, warmup=1),
    cluster=ClusterConfig(nodes=2),
    system=SystemConfig(every=1),
)
PLANNED = {
    "plan_s": 0.001, "planned_bytes": 1000, "hidden_bytes": 900, "colliding_bytes": 75, "overflow_bytes": 25,
    "sent_bytes": 1000, "collision_s": 0.01, "overflow_s": 0.02, "drift": 0.1, "risk": 0.5, "idle_s": 1.5,
    "link_bytes_per_s": 500.0,
}  # fmt: skip
KEYS = {
    "profiled_frac", "replanned", "planning_s_p50", "planning_frac", "planned_bytes_per_iteration",
    "hidden_bytes_per_iteration", "colliding_bytes_per_iteration", "overflow_bytes_per_iteration", "hidden_frac",
    "colliding_frac", "overflow_frac", "partition_accuracy_frac", "collision_s_p50", "overflow_s_p50", "drift_p50",
    "risk_p50", "idle_s", "planned_link_bytes_per_s", "lower_bound_s",
}  # fmt: skip


def write(folder: Path, iteration: int, rank: int, **fields: Any) -> None:
    usual: dict[str, Any] = {"attempt": 0, "at_s": 0.0, "duration_s": 2.0, "stall_s": 0.0, "loss": 5.0, "tokens": 100}
    usual |= {"requested": True, "completed": (iteration,), "latest_complete": iteration}
    append(
        folder / ITERATIONS,
        IterationSample.model_validate({"iteration": iteration, "rank": rank} | usual | fields),
    )


def run(folder: Path, by_rank: dict[int, dict[str, Any]], by_iteration: dict[int, dict[str, Any]] | None = None) -> Any:
    """The summary of seven iterations, of which the last four are measured; `by_iteration` is of rank 1 alone."""
    for iteration in range(1, 8):
        for rank in range(2):
            fields = by_rank.get(rank, {})
            if rank == 1 and by_iteration is not None:
                fields = fields | by_iteration.get(iteration, {})
            write(folder, iteration, rank, **fields)
    return summarize(folder, SCENARIO)[0]


def planned(folder: Path, **of_rank_1: Any) -> Any:
    return run(folder, {0: PLANNED, 1: PLANNED | of_rank_1})


def shown(summary: dict[str, Any], width: int = 200) -> str:
    environment = Environment(
        versions={}, commit="", host="h", cpu="c", num_cpus=2, memory_bytes=1, device="cpu", kernel="6"
    )
    record = RunRecord(
        run_id="r1", started_at="2026-11-29T15:00:00Z", mode="live", system="capricorn", seed=0, config=SCENARIO,
        environment=environment, summary=summary, verdict="ok",
    )  # fmt: skip
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(run_table(record))
    return capture.get()


def test_a_run_without_planning_has_all_keys_and_no_row(tmp_path: Path) -> None:
    summary = run(tmp_path, {})
    assert summary.keys() >= KEYS
    assert {summary[key] for key in KEYS} == {0, None}
    assert summary["hidden_frac"] is summary["partition_accuracy_frac"] is summary["lower_bound_s"] is None
    assert not {"planning", "hidden"} & set(shown(summary).split())


def test_a_run_that_did_nothing_knows_nothing_of_planning(tmp_path: Path) -> None:
    summary, _ = summarize(tmp_path, SCENARIO)
    assert {summary[key] for key in KEYS} == {0, None}
    assert summary["profiled_frac"] is None


def test_an_iteration_is_profiled_or_replanned_when_one_rank_says_so(tmp_path: Path) -> None:
    summary = run(tmp_path, {}, {4: {"profiled": True}, 5: {"replanned": True}, 6: {"replanned": True}})
    assert (summary["profiled_frac"], summary["replanned"]) == (0.25, 2)


def test_warm_up_and_the_first_checkpoints_count_for_nothing(tmp_path: Path) -> None:
    fields = PLANNED | {"profiled": True, "replanned": True, "profile_s": 9.0}
    summary = run(tmp_path, {}, dict.fromkeys((1, 2, 3), fields))
    assert {summary[key] for key in KEYS} == {0, None}


def test_planning_costs_what_it_takes_the_slowest_rank(tmp_path: Path) -> None:
    costs = {4: {"profile_s": 0.03, "plan_s": 0.01}, 7: {"profile_s": 0.002, "plan_s": 0.004, "duration_s": 4.0}}
    summary = run(tmp_path, {0: {"plan_s": 0.002}}, costs)
    assert summary["planning_s_p50"] == pytest.approx(0.004)  # of 40, 2, 2, 6 ms
    assert summary["planning_frac"] == pytest.approx(0.050 / 10)


def test_bytes_are_of_an_iteration_on_all_ranks_and_their_parts_make_one(tmp_path: Path) -> None:
    summary = planned(tmp_path, hidden_bytes=700, colliding_bytes=225, overflow_bytes=75)
    each = {fate: summary[f"{fate}_bytes_per_iteration"] for fate in ("planned", "hidden", "colliding", "overflow")}
    assert each == {"planned": 2000, "hidden": 1600, "colliding": 300, "overflow": 100}
    assert [summary[f"{fate}_frac"] for fate in ("hidden", "colliding", "overflow")] == [0.8, 0.15, 0.05]
    assert summary["partition_accuracy_frac"] == 0.8


def test_hiding_more_than_was_planned_on_one_rank_makes_up_for_nothing_on_another(tmp_path: Path) -> None:
    assert planned(tmp_path, planned_bytes=500)["partition_accuracy_frac"] == pytest.approx((900 + 500) / 1500)


def test_hiding_more_than_was_planned_in_one_iteration_makes_up_for_nothing_in_another(tmp_path: Path) -> None:
    fates = {4: {"planned_bytes": 400, "hidden_bytes": 1000}, 5: {"planned_bytes": 600, "hidden_bytes": 0}}
    assert run(tmp_path, {}, fates)["partition_accuracy_frac"] == 0.4


def test_losses_are_those_of_the_rank_that_lost_most(tmp_path: Path) -> None:
    summary = planned(tmp_path, collision_s=0.05, overflow_s=0.0, drift=0.3)
    assert (summary["collision_s_p50"], summary["overflow_s_p50"]) == (0.05, 0.02)
    assert (summary["drift_p50"], summary["risk_p50"]) == (0.3, 0.5)


def test_idle_time_is_that_of_the_rank_with_least_among_those_that_measured_it(tmp_path: Path) -> None:
    summary = run(
        tmp_path, {0: PLANNED, 1: PLANNED}, {i: {"idle_s": idle} for i, idle in ((4, 0.0), (5, 1.0), (6, 1.2))}
    )
    assert summary["idle_s"] == pytest.approx(1.35)  # of 1.5, 1.0, 1.2, 1.5
    assert summary["planned_link_bytes_per_s"] == 500


@pytest.mark.parametrize(
    ("of_rank_1", "bound_s"),
    [
        ({}, 0.5),  # 1000 bytes at 500 a second, in 1.5 s
        ({"sent_bytes": 2000}, 2.5),
        ({"idle_s": 1.0}, 1.0),
        ({"link_bytes_per_s": 250.0}, 2.5),
        ({"link_bytes_per_s": 0.0}, 0.5),  # unknown on that rank
    ],
)
def test_the_lower_bound_is_sending_less_idle_time_on_the_rank_where_it_is_most(
    tmp_path: Path, of_rank_1: dict[str, Any], bound_s: float
) -> None:
    assert planned(tmp_path, **of_rank_1)["lower_bound_s"] == pytest.approx(bound_s)


def test_without_a_plan_there_is_no_lower_bound(tmp_path: Path) -> None:
    unplanned = PLANNED | {"planned_bytes": 0}
    summary = run(tmp_path, {0: unplanned, 1: unplanned})
    assert summary["lower_bound_s"] is None
    assert (summary["idle_s"], summary["planned_link_bytes_per_s"]) == (1.5, 500)


def test_what_fits_the_idle_spans_has_a_lower_bound_of_zero_and_no_row_for_it(tmp_path: Path) -> None:
    fits = PLANNED | {"idle_s": 2.5}
    summary = run(tmp_path, {0: fits, 1: fits})
    assert summary["lower_bound_s"] == 0
    assert "lower bound" not in shown(summary)


def test_the_table_tells_of_planning_hiding_and_the_lower_bound(tmp_path: Path) -> None:
    text = shown(run(tmp_path, {0: PLANNED, 1: PLANNED}, {5: {"profiled": True, "replanned": True}}))
    assert "profiled 25% of iterations, 1 replan; took p50 1 ms, 0.05%" in text
    assert "90% of bytes, colliding 7.5%, overflow 2.5%; accuracy 0.9" in text
    assert "0.5 s an iteration cannot hide in 1.5 s of idle spans" in text


def test_the_table_keeps_to_sixty_columns(tmp_path: Path) -> None:
    assert max(map(len, shown(planned(tmp_path), width=60).splitlines())) <= 60


def test_the_figure_puts_all_ranks_on_one_clock(tmp_path: Path) -> None:
    """Rank 1 begins 0.5 s late; both see the dispatch end when it does, 3 s after the first began."""
    pytest.importorskip("matplotlib", reason="only the figures of docs/ need matplotlib")
    for rank, late_s in ((0, 0.0), (1, 0.5)):
        write(tmp_path, 1, rank, at_s=10.0 + 4, duration_s=4 - late_s, link_bytes_per_s=100.0)
        computes_s = (1.0, 2.0)[rank]
        for kind, begin_s, end_s in (
            ("attention", 0.0, computes_s),
            ("dispatch", computes_s, 3 - late_s),
            ("expert", 3 - late_s, 3.2 - late_s),
            ("combine", 3.2 - late_s, 3.6 - late_s),
            ("send", 0.0, 1.0),
        ):
            layer = {"layer": 0, "direction": "forward", "kind": kind, "bytes": 50 if kind == "send" else 0}
            sample = {"iteration": 1, "rank": rank, "begin_s": begin_s, "end_s": end_s}
            append(tmp_path / OPS, OpSample.model_validate(layer | sample))
    code = f"""
import json, sys
from pathlib import Path
sys.path.insert(0, {str(FIGURES)!r})
from planner_figure import Timeline
timeline = Timeline.read(Path({str(tmp_path)!r}), 1)
both = range(2)
print(json.dumps([
    [[list(at) for _, at in timeline.ops(place)] for place in both],
    [[list(at) for _, at in timeline.moving(place)] for place in both],
    [[list(at) for at in timeline.idle_spans(place)] for place in both],
    [[list(at) for at, _ in timeline.sends[place]] for place in both],
]))
"""
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    ops, moving, idle, sends = json.loads(printed)
    assert ops[1] == [[0.5, 2.5], [2.5, 3.0], [3.0, 3.2], pytest.approx([3.2, 3.6])]
    for place in range(2):
        assert moving[place][0] == pytest.approx([2.5, 3.0])
        assert moving[place][1] == pytest.approx([3.2, 3.6])
        assert idle[place][0] == pytest.approx([0.5 * place, 2.5])
        assert idle[place][1] == pytest.approx([3.0, 3.2])
        assert sends[place] == [pytest.approx([0.5 * place, 0.5 * place + 1])]


def test_a_record_older_than_planning_still_has_a_table(tmp_path: Path) -> None:
    summary = {key: value for key, value in run(tmp_path, {}).items() if key not in KEYS}
    assert "planning" not in shown(summary).split()
