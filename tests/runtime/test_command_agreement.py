"""Machines that were told to run something else: found out before anything is trained, and named."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from capricorn.errors import ConfigError
from capricorn.runtime.command_agreement import check_agreement, explain, facts
from capricorn.systems.settings import override
from tests.support.recorded import scenario
from tests.support.runs import Run, run
from tests.support.spawn import run_ranks

MACHINES = ("launch.nnodes=2", "launch.rdzv_endpoint=head:29500")


def agree(rank: int, num_ranks: int, changes: tuple[str, ...]) -> str:
    """What a rank hears whose machine has another number, another store, and if it is not the first, these changes."""
    own = (f"launch.node_rank={rank}", f"store.root=/mnt/{rank}")
    group = dist.group.WORLD
    assert group is not None
    try:
        check_agreement(group, override(scenario(), (*MACHINES, *own, *(changes if rank else ()))))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ((), ""),
        (("train.seed=7",), "train.seed is 0 on machine 0 and 7 on machine 1; give the same command on all machines"),
        (("system.name=none",), "system.name is capricorn on machine 0 and none on machine 1"),
        (("cluster.ranks_per_node=2",), "cluster.ranks_per_node is 1 on machine 0 and 2 on machine 1"),
        (("train.lr=1", "train.beta1=0", "train.beta2=0", "train.seed=3"), "; train.lr is "),
        (("train.lr=1", "train.beta1=0", "train.beta2=0", "train.seed=3"), ", and 1 more differ; "),
    ],
)
def test_what_differs_between_machines_is_told_in_one_line_on_all_of_them(changes: tuple[str, ...], told: str) -> None:
    first, *others = run_ranks(agree, 2, changes)
    assert others == [first]
    assert told in first
    assert bool(first) == bool(told)
    assert "\n" not in first


def test_versions_and_failures_count_too() -> None:
    mine = facts(override(scenario(), MACHINES))
    assert {"python", "torch", "capricorn-bench", "--fault", "model.name", "planner.spans"} <= mine.keys()
    other = mine | {"torch": "0.1", "--fault": ["kill@rank=1,iteration=5"]}
    text = explain([(0, mine), (0, mine), (3, other)])
    assert f"torch is {mine['torch']} on machine 0 and 0.1 on machine 3" in text
    assert "--fault is not set on machine 0 and ['kill@rank=1,iteration=5'] on machine 3" in text


def start(folder: Path, machine: int, port: int, *options: str) -> Run:
    where = ("--nnodes", "2", "--node-rank", str(machine), "--rdzv-endpoint", f"127.0.0.1:{port}")
    (folder / f"stores{machine}").mkdir()
    store = ("--set", f"store.root={folder / f'stores{machine}'}")
    return run(folder / f"out{machine}", "--iterations", "8", *where, *store, *options, deadline_s=200.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "option", [("--seed", "2"), ("--model", "gpt-moe-tiny"), ("--system", "gemini"), ("--ckpt", "every-2")]
)
def test_two_machines_that_were_told_something_else_both_say_so_and_leave_no_store(
    option: tuple[str, str], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(lambda machine: start(tmp_path, machine, port, *(option * machine)), (0, 1)))
    for each in ended:
        assert each.exit_code == 2, each.stderr
        assert "on machine 0 and" in each.stderr.splitlines()[-1]
    assert not [path for machine in (0, 1) for path in (tmp_path / f"stores{machine}").iterdir()]
