"""Machines with a network, a memory and a name of their own: by IPv4, IPv6 and name, and one that is lost silently."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from tests.support.machines import free_port
from tests.support.namespaced import IPV4, IPV6, Machine, namespaced
from tests.support.runs import LiveRun, Run, assert_ok, assert_same_losses, faults, run

pytestmark = pytest.mark.slow
LONG = ("--iterations", "26", "--warmup", "0")
KILLS = ("kill@rank=0,iteration=6", "kill@rank=1,iteration=10", "kill@rank=0,iteration=14", "kill@rank=1,iteration=18",
         "kill@rank=1,iteration=22")  # fmt: skip


@contextlib.contextmanager
def started(
    folder: Path, machines: list[Machine], endpoint: str, nnodes: str, *options: str | Path
) -> Iterator[list[LiveRun]]:
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                LiveRun(
                    folder / f"out{each.number}", "--nnodes", nnodes, "--node-rank", str(each.number),
                    "--rdzv-endpoint", endpoint, *options, prefix=each.prefix,
                )
            )
            for each in machines
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("host", "options"),
    [
        ("head", ("--interface", IPV4.format(0) + "/24")),
        (IPV4.format(1), ()),
        (f"[{IPV6.format(1)}]", ()),
    ],
)
def test_two_machines_are_one_run_with_one_record_however_they_are_named(
    host: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    reference = run(tmp_path / "reference", *LONG)
    with (
        namespaced(tmp_path, 2) as machines,
        started(tmp_path, machines, f"{host}:{free_port()}", "2", *LONG, *options, *faults(*KILLS)) as live,
    ):
        first, second = (each.finish() for each in live)
    assert_ok(first)
    assert second.exit_code == 0, second.stderr
    assert_same_losses(first, reference)
    assert len(first.recoveries) == len(KILLS)
    outages_s = [outage_of(each) for each in first.recoveries]
    print(f"outages by {host}: {[round(each, 2) for each in outages_s]}, median {median(outages_s):.2f} s")
    assert second.folder is None


def outage_of(recovery: object) -> float:
    """From the failure to the end of the first iteration after it."""
    parts = ("detect_s", "restart_s", "agree_s", "fetch_s", "load_s", "first_iteration_s")
    return float(sum(getattr(recovery, part) or 0.0 for part in parts))


def longest_gap_s(done: Run) -> float:
    """The longest time in which rank 0 has finished no iteration, by its clock."""
    ends_s = sorted(sample.at_s for sample in done.samples if sample.rank == 0)
    return max(later - earlier for earlier, later in pairwise(ends_s))


@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_of_four_machines_a_spare_takes_the_place_of_one_that_is_lost(how: str, tmp_path: Path) -> None:
    long = ("--iterations", "120", "--warmup", "0")
    reference = run(tmp_path / "reference", *long, "--nodes", "3")
    with (
        namespaced(tmp_path, 4) as machines,
        started(tmp_path, machines, f"head:{free_port()}", "3:4", *long) as live,
    ):
        head, _, lost, _ = live
        head.wait_iteration(20)
        if how == "killed":
            for process in lost.processes():
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGKILL)
        else:
            machines[2].cut()
        done = head.finish()
        others = [live[1].finish(), live[3].finish()]
        gone: Run | None = lost.finish() if how == "cut off" else None
    assert_ok(done)
    assert_same_losses(done, reference)
    assert [each.exit_code for each in others] == [0, 0], [each.stderr for each in others]
    (recovery,) = done.recoveries
    assert recovery.what == ("rank 2: node 2 was lost" if how == "killed" else "rank 2: node 2 is frozen")
    assert set(recovery.sources) == {"local", "peer"}
    assert max(done.lost) <= 1
    print(f"{how}: {outage_of(recovery):.2f} s from its detection, {longest_gap_s(done):.2f} s without an iteration")
    if gone is not None:
        assert gone.exit_code == 1
        assert "machine 0 was lost" in gone.stderr
