"""Runs by the real command line, on mixtral-tiny: what survives which failure, and what an interrupted run leaves."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.mounts import tmpfs
from tests.support.runs import (
    DEADLINE_S,
    TINY,
    LiveRun,
    Run,
    assert_ok,
    assert_same_losses,
    command,
    faults,
    fill_up,
    flip_byte,
    polls,
    run,
)

GPT = ("--model", "gpt-moe-tiny")
FOUR_RANKS = ("--nodes", "2", "--ranks-per-node", "2")
PATIENCE_S = 15.0


def limited(num_files: int) -> tuple[str, ...]:
    """The start of a command line that lowers the limit of open files for what follows."""
    return ("bash", "-c", f'ulimit -n {num_files} && exec "$@"', "bash")


@pytest.fixture(scope="session")
def reference_of_four(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An uninterrupted run on two nodes of two ranks, with few open files."""
    return run(tmp_path_factory.mktemp("four"), *FOUR_RANKS, prefix=limited(256))


@pytest.fixture(scope="session")
def reference_of_gpt(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An uninterrupted run of a model whose router draws noise."""
    return run(tmp_path_factory.mktemp("gpt"), *GPT)


def test_the_launcher_begins_and_ends_a_run_without_what_is_slow_to_import(tmp_path: Path) -> None:
    arguments = ["run", *TINY, "--iterations", "3", "--warmup", "1", "--out", str(tmp_path), "--json"]
    code = f"""
import sys
from capricorn.cli.main import main
try:
    main({arguments})
finally:
    print("loaded:", [name for name in ("torch", "pandas", "matplotlib") if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=DEADLINE_S)
    assert json.loads(done.stdout)["summary"]["iterations"] == 3
    assert "loaded: []" in done.stderr


# --- workers and nodes that die


def test_a_killed_rank_resumes_where_it_was_and_prints_one_object(tmp_path: Path, reference: Run) -> None:
    ended = run(tmp_path, *faults("kill@rank=1,iteration=11"), "--json")
    assert_ok(ended)
    assert ended.json == ended.record
    assert ended.resumed == [10]
    assert ended.lost[0] <= 1
    assert [(each.resumed_iteration, each.lost_iterations) for each in ended.recoveries] == [(10, ended.lost[0])]
    assert ended.summary["requested"] == 20
    assert_same_losses(ended, reference)


def test_it_resumes_wherever_in_an_iteration_ranks_die_also_before_the_first_checkpoint(
    tmp_path: Path, reference: Run
) -> None:
    kills = (
        "kill@rank=1,iteration=1",
        "kill@rank=0,iteration=6,op=dispatch.1.backward",
        "kill-all@iteration=11,op=update.end",
        "kill@rank=1,iteration=16,op=after_update",
    )
    ended = run(tmp_path, *faults(*kills))
    assert_ok(ended)
    assert ended.num_triggered == len(kills)
    assert ended.resumed[0] == 0, "the initial state"
    assert ended.sources[1:] == [["local", "local"]] * 3
    assert max(ended.lost) <= 1
    assert_same_losses(ended, reference)


def test_a_lost_node_is_restored_from_its_peer_whichever_it_is(tmp_path: Path, reference: Run) -> None:
    ended = run(tmp_path, *faults("node-loss@node=1,iteration=7", "node-loss@node=0,iteration=14"))
    assert_ok(ended)
    assert ended.sources == [["local", "peer"], ["peer", "local"]]
    assert max(ended.lost) <= 1
    assert_same_losses(ended, reference)


@pytest.mark.slow
def test_noise_of_the_router_is_drawn_as_if_nothing_had_happened(tmp_path: Path, reference_of_gpt: Run) -> None:
    ended = run(tmp_path, *GPT, *faults("kill@rank=1,iteration=11,op=iteration_end"))
    assert_ok(reference_of_gpt)
    assert_ok(ended)
    assert all(iteration > 0 for iteration in ended.resumed)
    assert_same_losses(ended, reference_of_gpt)


@pytest.mark.slow
def test_a_node_of_several_ranks_is_restored_as_a_whole(tmp_path: Path, reference_of_four: Run) -> None:
    ended = run(tmp_path, *FOUR_RANKS, *faults("node-loss@node=1,iteration=11"))
    assert_ok(ended)
    assert ended.sources == [["local", "local", "peer", "peer"]]
    assert max(ended.lost) <= 1
    assert_same_losses(ended, reference_of_four)


def test_a_lost_node_without_replicas_ends_the_run_and_never_starts_over(tmp_path: Path, reference: Run) -> None:
    ended = run(tmp_path, "--replicas", "1", *faults("node-loss@node=1,iteration=9"), "--json")
    assert ended.exit_code == 1
    assert "no iteration survives on all ranks" in ended.stderr
    assert "rank 1 has no copy" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert "stopped after 8 of 20 iterations" in ended.json["verdict"]
    assert not [sample for sample in ended.samples if sample.attempt > 0]
    done = {(sample.rank, sample.iteration): sample.loss for sample in reference.samples}
    assert all(sample.loss == done[sample.rank, sample.iteration] for sample in ended.samples)


@pytest.mark.slow
def test_a_damaged_copy_is_named_and_fetched_from_the_peer(tmp_path: Path, reference: Run) -> None:
    ended = run(tmp_path, *faults("corrupt@rank=1,iteration=11"))
    assert_ok(ended)
    assert ended.sources == [["local", "peer"]]
    resumed = [event.detail for event in ended.events if event.event == "resumed"]
    assert all("rank 1's copy of iteration 10 on rank 1: damaged" in detail for detail in resumed)
    assert_same_losses(ended, reference)


def test_checkpointing_leaves_the_losses_as_they_are(tmp_path: Path, reference: Run) -> None:
    ended = run(tmp_path, "--system", "none")
    assert_ok(ended)
    assert_same_losses(ended, reference)


# --- interrupted runs


@pytest.mark.parametrize(
    "number", [signal.SIGINT, *(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGTERM, signal.SIGHUP))]
)
def test_an_interrupted_run_writes_what_it_measured_and_leaves_nothing(
    number: signal.Signals, tmp_path: Path, reference: Run
) -> None:
    with LiveRun(tmp_path, "--iterations", "5000", "--json") as live:
        live.wait_iteration(10)
        live.interrupt(number)
        ended = live.finish(deadline_s=30)
    assert ended.exit_code == 130
    assert "Traceback" not in ended.stderr
    assert ended.json == ended.record
    assert ended.record["verdict"].startswith("stopped after ")
    assert ended.summary["iterations"] >= 10
    expected = {(sample.rank, sample.iteration): sample.loss for sample in reference.samples}
    early = [sample for sample in ended.samples if sample.iteration <= 20]
    assert all(sample.loss == expected[sample.rank, sample.iteration] for sample in early)


@pytest.mark.parametrize("is_early", [True, False])
def test_a_signal_to_all_processes_at_once_as_of_slurm_is_an_interrupt_and_no_failure(
    is_early: bool, tmp_path: Path
) -> None:
    with LiveRun(tmp_path, "--iterations", "5000") as live:
        live.wait(lambda: live.folder, "the folder of the run") if is_early else live.wait_iteration(10)
        for process in live.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        ended = live.finish(deadline_s=30)
    assert ended.exit_code == 130, ended.stderr
    assert "takes its place" not in ended.stderr
    assert "error" not in ended.stderr
    assert ended.record["verdict"].startswith("stopped after ")


def test_a_killed_launcher_leaves_a_store_that_can_be_inspected_and_cleaned(tmp_path: Path) -> None:
    stores = tmp_path / "stores"
    stores.mkdir()
    with LiveRun(tmp_path / "out", "--iterations", "5000", "--set", f"store.root={stores}") as live:
        live.wait_iteration(5)
        cleaned = command("clean", "--root", stores)
        assert cleaned.exit_code == 0
        assert "live, kept" in cleaned.stdout
        assert command("inspect", live.store()).exit_code == 0
        known = max(sample.iteration for sample in live.samples())
        live.wait_iteration(known + 5)
        live.process.kill()
        assert any(not live.processes() for _ in polls(PATIENCE_S)), "processes outlive their launcher"
        complete = max(sample.latest_complete for sample in live.samples())

        inspected = command("inspect", live.store(), "--json")
        assert inspected.exit_code == 0
        assert max(inspected.json["iterations"]) >= complete > known - 5
        assert "left over" in command("inspect", live.store().name.removeprefix("capricorn-"), "--root", stores).stdout
        assert "removed" in command("clean", "--root", stores).stdout
        assert not any(stores.iterdir())


# --- machines that are too small or busy


def test_a_tmpfs_that_is_too_small_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with tmpfs("4M") as root:
        ended = run(tmp_path, "--set", f"store.root={root}")
        assert not any(root.iterdir())
    assert ended.exit_code == 2
    assert len(ended.stderr.splitlines()) == 1
    assert "4.19 MB" in ended.stderr
    assert ended.folder is None


@pytest.mark.slow
def test_a_tmpfs_that_fills_up_during_the_run_does_no_harm(tmp_path: Path, reference: Run) -> None:
    with tmpfs("64M") as root, LiveRun(tmp_path, "--set", f"store.root={root}") as live:
        live.wait_iteration(2)
        fill_up(root / "foreign")
        ended = live.finish()
    assert_ok(ended)
    assert_same_losses(ended, reference)


def test_a_taken_port_is_refused_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        ended = run(tmp_path, "--nnodes", "1", "--node-rank", "0", "--rdzv-endpoint", endpoint)
    assert ended.exit_code == 2
    assert len(ended.stderr.splitlines()) == 1
    assert endpoint in ended.stderr
    assert "in use" in ended.stderr


def test_a_real_node_is_handed_to_torchrun(tmp_path: Path, reference: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    where = ("--nnodes", "1", "--node-rank", "0", "--rdzv-endpoint", f"127.0.0.1:{port}")
    ended = run(tmp_path, *where, "--ranks-per-node", "2", "--replicas", "1")
    assert_ok(ended)
    assert_same_losses(ended, reference)


def test_few_open_files_suffice_and_too_few_are_refused(tmp_path: Path, reference_of_four: Run) -> None:
    assert_ok(reference_of_four)
    refused = run(tmp_path, *FOUR_RANKS, prefix=limited(100))
    assert refused.exit_code == 2
    assert "ulimit -n" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert refused.folder is None


# --- foreign and damaged records and stores


def assert_said_in_one_line(exit_code: int, target: Path, *words: str) -> None:
    done = command("inspect", target)
    assert done.exit_code == exit_code, done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr


@pytest.mark.parametrize("garbage", [b"", b"\x00\xff\xfe", b"{", b"[]", b'{"schema_version": 1}', b"null"])
def test_a_garbage_record_is_refused_in_one_line(garbage: bytes, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(garbage)
    assert_said_in_one_line(2, tmp_path, str(tmp_path / "run.json"))


def test_a_record_of_a_foreign_version_is_refused(tmp_path: Path, reference: Run) -> None:
    (tmp_path / "run.json").write_text(json.dumps(reference.record | {"schema_version": 99}))
    assert_said_in_one_line(2, tmp_path, "schema version is 99", "reads 1")


@pytest.fixture
def store(tmp_path: Path, reference: Run) -> Path:
    """A copy of the store that the uninterrupted run kept."""
    kept = Path(reference.record["config"]["store"]["root"]) / f"capricorn-{reference.record['run_id']}"
    return Path(shutil.copytree(kept, tmp_path / "capricorn-copy"))


def newest_slot(store: Path) -> tuple[Path, int]:
    """The slot on node 0 that holds rank 1's state after the last iteration, and its place among the copies."""
    copies = command("inspect", store, "--json").json["copies"]
    place = next(
        place
        for place, copy in enumerate(copies)
        if (copy["where"], copy["owner"], copy["iteration"]) == ("node0", 1, 20)
    )
    slots = sorted((store / "node0").glob("owner*.slot*"))
    return slots[place], place


def test_inspect_of_a_kept_store_verifies_all_copies(store: Path) -> None:
    done = command("inspect", store, "--json")
    assert done.exit_code == 0
    assert max(done.json["iterations"]) == 20
    assert len(done.json["copies"]) == 8
    assert all(copy["verified"] for copy in done.json["copies"])


def test_inspect_names_the_copy_in_which_a_byte_was_flipped(store: Path) -> None:
    slot, place = newest_slot(store)
    flip_byte(slot, slot.stat().st_size // 2)
    done = command("inspect", store, "--json")
    assert done.exit_code == 1
    bad = [copy for copy in done.json["copies"] if copy["verified"] is False]
    assert bad == [done.json["copies"][place]]
    assert (bad[0]["where"], bad[0]["owner"], bad[0]["iteration"]) == ("node0", 1, 20)
    assert 20 in done.json["iterations"], "the copy on the other node is intact"
    lines = [line for line in command("inspect", store).stdout.splitlines() if "NO" in line]
    assert len(lines) == 1
    assert "node0" in lines[0]


def test_inspect_of_a_store_in_which_all_copies_of_an_owner_are_damaged_calls_nothing_complete(store: Path) -> None:
    for slot in store.glob("node*/owner1.slot*"):
        flip_byte(slot, slot.stat().st_size - 4096)
    done = command("inspect", store, "--json")
    assert done.exit_code == 1
    assert done.json["iterations"] == []


def test_inspect_names_a_truncated_slot(store: Path) -> None:
    slot, place = newest_slot(store)
    os.truncate(slot, slot.stat().st_size - 5000)
    done = command("inspect", store, "--json")
    assert done.exit_code == 1
    assert done.json["copies"][place]["state"] == "damaged"
    assert (done.json["copies"][place]["where"], done.json["copies"][place]["owner"]) == ("node0", 1)
    assert sum(copy["state"] == "damaged" for copy in done.json["copies"]) == 1


@pytest.mark.parametrize("header", [b"", b"foreign!", bytes(4096), b"\xff" * 4096])
def test_a_slot_with_a_garbage_header_is_damaged(header: bytes, store: Path) -> None:
    slot, place = newest_slot(store)
    with slot.open("r+b") as file:
        if not header:
            file.truncate(0)
        file.write(header)
    done = command("inspect", store, "--json")
    assert done.exit_code == 1
    assert done.json["copies"][place]["state"] == "damaged"


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"{",
        b"[]",
        b'{"format": 99}',
        b'{"format": 1}',
        b'{"format": 1, "run_id": "x", "node": "y"}',
    ],
)
def test_a_store_whose_description_is_garbage_is_refused_in_one_line(garbage: bytes, store: Path) -> None:
    (store / "node1" / "node.json").write_bytes(garbage)
    assert_said_in_one_line(1, store, str(store / "node1"))


def test_a_foreign_file_in_a_store_does_not_hide_the_copies(store: Path) -> None:
    (store / "node0" / "ownerless.slot0").write_bytes(b"not ours")
    done = command("inspect", store, "--json")
    assert "Traceback" not in done.stderr
    assert 20 in done.json["iterations"]
