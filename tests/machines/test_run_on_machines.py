"""A command on several machines: one run, one record, and what comes back when a rank, a node or a machine is lost."""

from __future__ import annotations

import platform
import signal
from pathlib import Path

import pytest

from tests.support.machines import ended, free_port, left_in, machines
from tests.support.runs import Run, assert_ok, assert_same_losses, faults, run

LONG = ("--iterations", "60", "--warmup", "0")


@pytest.fixture(scope="session")
def long_reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same work on one machine, without a failure."""
    return run(tmp_path_factory.mktemp("long"), *LONG)


def test_a_killed_rank_a_lost_node_and_a_lost_machine_are_one_run_with_one_record(
    tmp_path: Path, long_reference: Run
) -> None:
    failures = faults("kill@rank=1,iteration=6", "node-loss@node=1,iteration=12")
    with machines(tmp_path, 3, *LONG, *failures, nnodes="2:3") as live:
        head, lost, spare = live
        head.wait_iteration(20)
        for process in lost.processes():
            process.send_signal(signal.SIGKILL)
        done, took_over = head.finish(), spare.finish()
    assert_ok(done)
    assert_same_losses(done, long_reference)
    assert took_over.exit_code == 0, took_over.stderr
    assert took_over.folder is None
    assert [line.partition(",")[0] for line in took_over.stdout.splitlines()] == [
        "machine 2: a spare", "machine 2: node 1"
    ]  # fmt: skip
    assert done.record["environment"]["other_hosts"] == [platform.node()]
    assert done.summary["store_bytes"] > 1.5 * long_reference.summary["store_bytes"] / 2
    assert [recovery.what for recovery in done.recoveries][2:] == ["rank 1: node 1 was lost"]
    assert len(done.recoveries) == 3
    assert max(done.lost) <= 1
    assert done.sources[1:] == [["local", "peer"], ["local", "peer"]]
    logs = {path.name for path in (tmp_path / "machine0").glob("*/log/*")}
    assert {"node0.log", "node1.log"} <= logs
    assert {path.name for path in (tmp_path / "stores1").iterdir()}, "killed machines leave their store, for `clean`"
    assert not list((tmp_path / "stores2").iterdir())


def test_interrupting_the_first_machine_ends_all_of_them(tmp_path: Path) -> None:
    with machines(tmp_path, 2, "--iterations", "100000") as live:
        head, other = live
        head.wait_iteration(3)
        head.interrupt(signal.SIGINT)
        first, second = head.finish(), other.finish()
    assert first.exit_code == 130
    assert second.exit_code == 1
    assert "machine 0 was interrupted" in second.stderr
    assert first.folder is not None
    assert not left_in(tmp_path)


def test_a_system_that_writes_files_needs_a_folder_that_machines_share_and_then_works(
    tmp_path: Path, reference: Run
) -> None:
    where = ("--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    refused = run(tmp_path / "alone", "--system", "torch-save", *where)
    assert refused.exit_code == 2
    assert "--shared-dir" in refused.stderr
    options = ("--system", "torch-save", "--shared-dir", tmp_path / "shared", *faults("node-loss@node=1,iteration=9"))
    with machines(tmp_path, 2, *options) as live:
        done, _ = ended(live)
    assert_ok(done)
    assert_same_losses(done, reference)
    assert not list((tmp_path / "shared").rglob("checkpoints"))


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (("--set", "store.root=/no/such/folder"), "machine 1 ("),
        pytest.param(("--data", "{text}"), "reads other data than the others", marks=pytest.mark.slow),
    ],
)
def test_what_a_machine_lacks_or_has_otherwise_is_one_line_on_all_and_nothing_is_left(
    own: tuple[str, str], said: str, tmp_path: Path
) -> None:
    (text := tmp_path / "other.txt").write_text("words of another text " * 4000)
    option, value = own
    with machines(tmp_path, 2, own=((), (option, value.format(text=text)))) as live:
        runs = ended(live)
    for each in runs:
        assert each.exit_code == 2, each.stderr
        assert said in each.stderr.splitlines()[-1]
        assert each.folder is None
    assert not left_in(tmp_path)
    assert not list((tmp_path / "machine0").iterdir())
