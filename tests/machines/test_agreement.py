"""Machines that were told to run something else: found out before anything is started, and named on all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from capricorn.machines.agreement import OF_A_MACHINE, difference, facts_of
from capricorn.systems.settings import flat_settings, override
from tests.support.machines import ended, left_in, machines
from tests.support.recorded import scenario

MACHINES = ("launch.nnodes=2", "launch.rdzv_endpoint=head:29500")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ((), ""),
        (("train.seed=7",), "train.seed is 0 on machine 0 and 7 on machine 3; give the same command on all machines"),
        (("system.name=none",), "system.name is capricorn on machine 0 and none on machine 3"),
        (("cluster.ranks_per_node=2",), "cluster.ranks_per_node is 1 on machine 0 and 2 on machine 3"),
        (("train.lr=1", "train.beta1=0", "train.beta2=0", "train.seed=3"), "; train.lr is "),
        (("train.lr=1", "train.beta1=0", "train.beta2=0", "train.seed=3"), ", and 1 more differ; "),
    ],
)
def test_what_differs_is_told_in_one_line(changes: tuple[str, ...], told: str) -> None:
    mine = facts_of("run", [override(scenario(), MACHINES)], repeats=1)
    own = ("launch.node_rank=1", "store.root=/mnt/1", "data.path=/mnt/data")
    theirs = facts_of("run", [override(scenario(), (*MACHINES, *own, *changes))], repeats=1)
    text = difference(mine, 3, theirs)
    assert told in text
    assert bool(text) == bool(told)
    assert "\n" not in text


def test_commands_versions_failures_and_the_systems_of_a_comparison_count_too() -> None:
    mine = facts_of("compare", [scenario(), override(scenario(), ["system.name=none"])], repeats=[3])
    assert mine["system.name"] == ["capricorn", "none"]
    assert {"python", "torch", "capricorn-bench", "--fault", "--repeats"} <= mine.keys()
    other = mine | {"torch": "0.1", "--fault": ["kill@rank=1,iteration=5"], "the command": "run"}
    text = difference(mine, 1, other)
    assert f"torch is {mine['torch']} on machine 0 and 0.1 on machine 1" in text
    assert "--fault is not set on machine 0 and ['kill@rank=1,iteration=5'] on machine 1" in text
    assert "the command is compare on machine 0 and run on machine 1" in text


def test_only_settings_that_there_are_are_left_to_each_machine() -> None:
    assert flat_settings(scenario()).keys() >= OF_A_MACHINE


@pytest.mark.parametrize(
    "option",
    [
        ("--seed", "2"),
        *(
            pytest.param(option, marks=pytest.mark.slow)
            for option in (
                ("--model", "gpt-moe-tiny"), ("--system", "gemini"), ("--ckpt", "every-2"), ("--repeats", "2"),
                ("--fault", "kill@rank=1,iteration=5"),
            )
        ),
    ],
)  # fmt: skip
def test_machines_that_were_told_something_else_all_say_so_and_leave_nothing(
    option: tuple[str, str], tmp_path: Path
) -> None:
    with machines(tmp_path, 2, own=((), option)) as live:
        runs = ended(live)
    for each in runs:
        assert each.exit_code == 2, each.stderr
        assert "on machine 0 and" in each.stderr.splitlines()[-1]
        assert each.folder is None
    assert runs[0].stderr.splitlines()[-1] == runs[1].stderr.splitlines()[-1]
    assert not left_in(tmp_path)
