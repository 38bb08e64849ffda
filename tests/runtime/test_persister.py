"""The writer of the persistent tier beside training: what it holds up (nothing), and what it survives."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from capricorn.config.scenario import PersistConfig
from capricorn.errors import CapricornError, StoreError
from capricorn.runtime.persist.messages import Order, WriterTask
from capricorn.runtime.persist.persister import Persister, _Writer
from capricorn.runtime.persist.restore import PersistentTier
from capricorn.runtime.persist.survey import complete_in, survey_persistent_tier
from capricorn.runtime.persist.writer_process import WRITER_NAME, spawn_writer
from capricorn.runtime.replicating_system import ReplicatingSystem
from capricorn.runtime.save.staging import payload_of
from capricorn.runtime.store.node_store import NodeFacts, NodeStore
from capricorn.systems.interface import Counters
from tests.support.mounts import tmpfs
from tests.support.peers import job_of
from tests.support.processes import children_of, name_of
from tests.support.runs import fill_up
from tests.support.spawn import run_ranks
from tests.support.tiers import Rank, train

PATIENCE_S = 60.0
NODE = NodeFacts(format=1, run_id="run", node=0, num_nodes=1, ranks_per_node=1)


def writers() -> list[psutil.Process]:
    """Those of this process."""
    return [each for each in children_of(os.getpid()) if name_of(each) == WRITER_NAME]


def complaint_of(system: ReplicatingSystem) -> str:
    try:
        system.drain(PATIENCE_S)
    except CapricornError as error:
        return str(error)
    return ""


def persist_and_lose_memory(rank: int, num_ranks: int, folder: str) -> dict[str, Any]:
    """Trains to iteration 7, loses all memory, and goes on from the disk."""
    me, root, persist = Rank(rank, num_ranks, Path(folder)), Path(folder) / "tier", PersistConfig(every=3)
    root.mkdir(exist_ok=True)
    (left := root / ".tmp-iteration-00000002-9").mkdir(exist_ok=True)
    system = me.attach(root, 0, persist)
    for first in (1, 4, 7):
        train(me, system, first, first + 2 if first < 7 else 7)
        system.drain(PATIENCE_S)
    persisted = system.counters().persisted
    system.close()
    me.fill(99)
    again = me.attach(root, 1, persist)
    report = again.restore()
    wrong = me.wrong(report.iteration)
    train(me, again, report.iteration + 1, 9)
    again.drain(PATIENCE_S)
    again.close()
    return {
        "persisted": persisted,
        "restored": (report.iteration, list(report.sources), wrong),
        "complete": complete_in(survey_persistent_tier(root)),
        "left": [left.exists(), len(writers())],
        "lost": sorted(path.name for path in me.folder.glob(f"node{rank}-1*/owner{rank}.slot*")),
    }


def test_when_all_memory_is_lost_training_goes_on_from_the_disk(tmp_path: Path) -> None:
    for each in run_ranks(persist_and_lose_memory, 2, str(tmp_path), deadline_s=120, forks_writers=True):
        assert each["persisted"] == 2
        assert each["restored"] == (6, ["persistent", "persistent"], [])
        assert each["complete"] == [6, 9]
        assert each["left"] == [False, 0]
        assert len(each["lost"]) == 3, "a slot more, which may be pinned"


def stop_the_writer(rank: int, num_ranks: int, folder: str) -> dict[str, Any]:
    """Iteration 1 warms the writers up; that of rank 1 is stopped while it has iteration 2, and training goes on."""
    me, root = Rank(rank, num_ranks, Path(folder)), Path(folder) / "tier"
    root.mkdir(exist_ok=True)
    system = me.attach(root, 0, PersistConfig(every=1, keep=2))
    train(me, system, 1, 1)
    system.drain(PATIENCE_S)
    if rank == 1:
        writers()[0].send_signal(signal.SIGSTOP)
    train(me, system, 2, 9)
    system._finish(PATIENCE_S)
    skipped = system.counters().skipped_persists
    dist.barrier()
    if rank == 1:
        writers()[0].send_signal(signal.SIGCONT)
    complaint = complaint_of(system)
    system.close()
    loaded = me.attach(root, 1)
    assert PersistentTier(loaded.job, root, loaded._store, me.state).obtain(2, 0) == ""  # type: ignore[arg-type]
    slot = loaded._store.read(rank, 2)  # type: ignore[union-attr]
    assert slot is not None
    me.state.load(payload_of(slot))
    me.state.publish()
    wrong = me.wrong(2)
    loaded.close()
    return {
        "skipped": skipped,
        "complaint": complaint,
        "complete": complete_in(survey_persistent_tier(root)),
        "wrong": wrong,
    }


@pytest.mark.slow
def test_a_writer_that_hangs_holds_nothing_up_and_what_it_was_given_stays_as_it_was(tmp_path: Path) -> None:
    for each in run_ranks(stop_the_writer, 2, str(tmp_path), deadline_s=120):
        assert each == {"skipped": 7, "complaint": "", "complete": [1, 2], "wrong": []}


def kill_the_writer(rank: int, num_ranks: int, folder: str) -> dict[str, Any]:
    """Rank 1's writer is killed with iteration 2 in its hands; iteration 4 comes after all is settled."""
    me, root = Rank(rank, num_ranks, Path(folder)), Path(folder) / "tier"
    root.mkdir(exist_ok=True)
    system = me.attach(root, 0, PersistConfig(every=2, timeout_s=30.0))
    train(me, system, 1, 2)
    system._finish(PATIENCE_S)
    if rank == 1:
        os.kill(writers()[0].pid, signal.SIGKILL)
    complaint = complaint_of(system)
    dist.barrier()
    train(me, system, 3, 4)
    complaint_of(system)
    counters = system.counters()
    system.close()
    left = [path.name for path in root.iterdir()]
    return {"complaint": complaint, "counted": (counters.persisted, counters.failed_persists), "left": left}


@pytest.mark.slow
def test_a_killed_writer_costs_one_checkpoint_on_disk_and_is_replaced(tmp_path: Path) -> None:
    first, second = run_ranks(kill_the_writer, 2, str(tmp_path), deadline_s=120)
    assert first["counted"] == second["counted"] == (1, 1)
    assert first["left"] == second["left"] == ["iteration-00000004"]
    assert "iteration 2" in first["complaint"]
    assert "the writer has ended with code -9" in second["complaint"]


def fill_the_disk(rank: int, num_ranks: int, folder: str, root: str) -> dict[str, Any]:
    """The disk is full from iteration 3 to 4, and has room again from 5 on."""
    me, persist = Rank(rank, num_ranks, Path(folder)), PersistConfig(every=2, timeout_s=60.0)
    system, filling = me.attach(Path(root), 0, persist), Path(root) / ".filling"
    train(me, system, 1, 2)
    system.drain(PATIENCE_S)
    if rank == 0:
        fill_up(filling)
    dist.barrier()
    train(me, system, 3, 4)
    complaint, latest = complaint_of(system), system.latest_complete()
    free = os.statvfs(root).f_bavail
    dist.barrier()
    if rank == 0:
        filling.unlink()
    dist.barrier()
    train(me, system, 5, 6)
    complaint_of(system)
    counters = system.counters()
    system.close()
    return {
        "complaint": complaint, "latest": latest, "free": free,
        "counted": (counters.persisted, counters.failed_persists, counters.failed_saves),
    }  # fmt: skip


def test_a_full_disk_is_counted_told_and_freed_and_training_goes_on(tmp_path: Path) -> None:
    with tmpfs("24m") as root:
        results = run_ranks(fill_the_disk, 2, str(tmp_path), str(root), deadline_s=120)
        complete = complete_in(survey_persistent_tier(root))
        left = sorted(path.name for path in root.iterdir())
    for each in results:
        assert each["latest"] == 4, "in memory it is complete"
        assert each["counted"] == (2, 1, 0)
        assert "1 checkpoints were not persisted, the last one: iteration 4: " in each["complaint"]
    assert any("No space left" in each["complaint"] for each in results)
    assert complete == [2, 6]
    assert left == ["iteration-00000002", "iteration-00000006"]


# --- the messages of a writer

NOISE = """
import os, sys
print("a library says hello")
os.write(1, b"and so does its C part\\n")
sys.stdin.read()
"""


def task_in(folder: Path) -> WriterTask:
    return WriterTask(
        run_id="run", attempt=0, rank=0, num_nodes=1, ranks_per_node=1, model="", root=folder,
        layout=folder / "owner0.json", keep=2, timeout_s=5.0,
    )  # fmt: skip


def test_what_a_library_prints_and_reads_in_a_writer_is_not_between_it_and_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(NOISE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    order = Order(iteration=0, slot=tmp_path / "owner0.slot0")
    with closing(_Writer(partial(spawn_writer, task_in(tmp_path)))) as writer:
        writer.send(order)
        answer = writer.take(order, PATIENCE_S)
    assert answer is not None
    assert "owner0.json" in answer.failure, "it has read its order, and looked for what it is to write"


@pytest.mark.parametrize(
    ("says", "complaint"),
    [
        ("nonsense", "a damaged message came from the writer: b'nonsense'"),
        ("", "a damaged message came from the writer: b''"),
        ('{"iteration": 4', "a damaged message came from the writer"),
        ('{"iteration": 4}', "the writer answers to iteration 4, not 3"),
        (None, "the writer has ended with code 0"),
    ],
)
def test_a_message_that_makes_no_sense_is_said_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str | None, complaint: str
) -> None:
    program = tmp_path / "writer"
    act = "" if says is None else f"os.write(int(sys.argv[6]), {says.encode()!r} + b'\\n')\n"
    program.write_text(f"#!{sys.executable} -SE\nimport os, sys\n{act}")
    program.chmod(0o700)
    monkeypatch.setattr("capricorn.runtime.persist.writer_process.PYTHON", (str(program), "-P", "-m"))
    with closing(_Writer(partial(spawn_writer, task_in(tmp_path)))) as writer, pytest.raises(StoreError) as caught:
        writer.take(Order(iteration=3, slot=tmp_path / "slot"), PATIENCE_S)
    assert str(caught.value).startswith(complaint)


# --- when an iteration is due


@pytest.mark.parametrize(
    ("every", "trained", "restored", "due"),
    [
        (1, range(5), "nothing", [0, 1, 2, 3, 4]),
        (3, range(8), "nothing", [0, 3, 6]),
        (3, range(1, 8), "nothing", [3, 6]),
        (3, range(1000, 1007), "nothing", [1002, 1005]),
        (3, range(1, 20, 5), "nothing", [6, 11, 16]),
        (3, range(5, 10), 3, [6, 9]),
        (3, range(5, 10), None, [5, 6, 9]),
        (3, range(1, 7), 0, [3, 6]),
    ],
)
def test_every_nth_iteration_is_due_wherever_the_numbers_begin(
    tmp_path: Path, every: int, trained: range, restored: int | str | None, due: list[int]
) -> None:
    """`restored`: what was persisted by then of a job that goes on."""
    job, counters = job_of(0, 1, tmp_path), Counters()
    job = replace(job, persist=PersistConfig(every=every), persist_dir=tmp_path)
    persister = Persister(job, NodeStore(tmp_path, NODE), counters)
    if restored != "nothing":
        persister.resume(restored)  # type: ignore[arg-type]
    taken = []
    for iteration in trained:
        persister.note(iteration)
        before = counters.skipped_persists
        persister.take(iteration)  # no vote has found the writers idle, so it is skipped if it is due
        taken += [iteration] * (counters.skipped_persists - before)
    assert taken == due
