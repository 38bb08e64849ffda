"""What holds for every registered system: each is put into the same job, killed, started again, and looked at."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from capricorn.baselines.file_settings import DcpSettings

from capricorn.errors import CapricornError, NoCompleteCheckpointError
from capricorn.systems.registry import SYSTEMS
from capricorn.systems.settings import FileSettings
from tests.support.conformance import NUM_RANKS, Case, Toy, case_of, children_of, live, make_folder
from tests.support.runs import flip_byte, polls

NUM_SAVES = 6

NOTHING = {"none"}
"""Systems that save nothing, so that nothing can be restored, and a lost peer is not noticed."""
WITH_PROCESS = {"torch-checkpointing"}
"""Systems that start a process, which takes seconds."""
CASES = [case_of(name) for name, info in SYSTEMS.items() if info.is_installed]
SAVING = [case for case in CASES if case.system not in NOTHING]
PROCESS = Case("dcp-async", {"settings": DcpSettings(mode="process")}, timeout_s=20.0)


def first_life(rank: int, folder: Path, case: Case) -> dict[str, Any]:
    """Trains from the beginning; the last checkpoint becomes complete when the state has already moved on."""
    toy = Toy(case, rank, folder)
    system = toy.system
    before = restore(toy)
    last = system.first_iteration + NUM_SAVES - 1
    is_untouched = toy.train(1, last)
    toy.update(last + 1)
    system.drain(20.0)
    latest, completed, events = system.latest_complete(), system.take_completed(), system.take_events()
    children = [child.pid for child in children_of(os.getpid())]
    if rank in case.close_first:
        system.close()
    return {
        "before": before,
        "is_untouched": is_untouched,
        "saved": list(range(system.first_iteration, last + 1)),
        "completed": completed,
        "latest": latest,
        "counters": asdict(system.counters()),
        "events": [asdict(event) for event in events],
        "num_bytes": sum(tensor.nbytes for tensor in toy.state.tensors.values()),
        "children": children,
    }


def second_life(rank: int, folder: Path, case: Case) -> dict[str, Any]:
    """Starts again, goes on, and ends in order."""
    toy = Toy(case, rank, folder, attempt=1)
    system = toy.system
    restored = restore(toy)
    done = restored["iteration"] if restored is not None else 0
    is_untouched = toy.train(done + 1, done + NUM_SAVES)
    system.drain(20.0)
    completed = system.take_completed()
    system.close()
    system.close()
    return {"restored": restored, "is_untouched": is_untouched, "completed": completed, "left": toy.traces.left()}


def bereaved(rank: int, folder: Path, case: Case, how: int) -> dict[str, Any]:
    """Rank 1 is gone while a checkpoint is on its way; rank 0 goes on for as long as it can."""
    toy = Toy(case, rank, folder)
    system = toy.system
    last = system.first_iteration + NUM_SAVES - 2
    toy.train(1, last)
    if rank == 1:
        toy.iterate(last + 1, together=False)
        (folder / "children").write_text(" ".join(str(child.pid) for child in children_of(os.getpid())))
        os.kill(os.getpid(), how)
    error = ""
    try:
        toy.train(last + 1, last + 4, together=False)
        system.drain(case.timeout_s)
    except Exception as failure:  # noqa: BLE001 - libraries raise what they like
        error = str(failure)
    num_failed = system.counters().failed_saves
    system.close()
    system.close()
    return {"error": error, "num_failed": num_failed, "last": last, "left": toy.traces.left()}


def restore(toy: Toy) -> dict[str, Any] | None:
    """What a restore comes to; None if there was nothing to restore."""
    toy.fill(77)
    try:
        report = toy.system.restore()
    except NoCompleteCheckpointError:
        toy.fill(0)
        return None
    return {
        "iteration": report.iteration,
        "sources": list(report.sources),
        "is_exact": toy.holds(report.iteration),
        "position": toy.published,
        "seconds": [report.agree_s, report.fetch_s, report.load_s],
    }


Lives = Callable[[Case], tuple[list[Any], list[Any], Path]]


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Lives:
    """Both lives of a job, as its ranks tell them, and its folder; each job is lived once."""

    def make(case: Case) -> tuple[list[Any], list[Any], Path]:
        if repr(case) not in made:
            folder = tmp_path_factory.mktemp(str(case))
            make_folder(folder, case)
            made[repr(case)] = live(first_life, folder, case), live(second_life, folder, case), folder
        return made[repr(case)]

    made: dict[str, tuple[list[Any], list[Any], Path]] = {}
    return make


def assert_restored(case: Case, restored: dict[str, Any], iteration: int) -> None:
    assert restored["iteration"] == iteration
    assert restored["is_exact"]
    assert restored["position"] == iteration
    assert set(restored["sources"]) <= set(SYSTEMS[case.system].tiers)
    assert len(restored["sources"]) == NUM_RANKS
    assert min(restored["seconds"]) >= 0


@pytest.mark.parametrize("case", SAVING, ids=str)
def test_every_checkpoint_becomes_complete_and_is_counted(case: Case, lives: Lives) -> None:
    for first in lives(case)[0]:
        saved, counters = first["saved"], first["counters"]
        assert first["completed"] == saved
        assert first["latest"] == saved[-1]
        assert (counters["failed_saves"], counters["last_failure"]) == (0, "")
        assert counters["staged_bytes"] >= len(saved) * first["num_bytes"]
        assert counters["sent_bytes"] >= len(saved) * first["num_bytes"]
        assert {event["iteration"] for event in first["events"]} == set(saved)
        assert all(event["begin_s"] <= event["end_s"] for event in first["events"])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_saving_leaves_the_state_alone(case: Case, lives: Lives) -> None:
    assert all(life["is_untouched"] for ranks in lives(case)[:2] for life in ranks)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_there_is_nothing_to_restore_before_the_first_checkpoint(case: Case, lives: Lives) -> None:
    assert [first["before"] for first in lives(case)[0]] == [None] * NUM_RANKS


@pytest.mark.parametrize("case", SAVING, ids=str)
def test_a_killed_job_gets_back_exactly_what_no_later_update_has_touched_and_goes_on(case: Case, lives: Lives) -> None:
    first, second, _ = lives(case)
    last = first[0]["saved"][-1]
    following = list(range(last + 1, last + 1 + NUM_SAVES))
    for life in second:
        assert_restored(case, life["restored"], last)
        # Some systems send what was lost of the restored one again.
        assert [iteration for iteration in life["completed"] if iteration != last] == following


@pytest.mark.parametrize("case", [case for case in CASES if case.system in NOTHING], ids=str)
def test_what_saves_nothing_has_nothing_to_restore(case: Case, lives: Lives) -> None:
    first, second, _ = lives(case)
    assert [life["completed"] for life in (*first, *second)] == [[]] * (2 * NUM_RANKS)
    assert [life["restored"] for life in second] == [None] * NUM_RANKS


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_system_may_be_closed_twice_and_leaves_nothing(case: Case, lives: Lives) -> None:
    first, second, folder = lives(case)
    assert [life["left"] for life in second] == [[]] * NUM_RANKS
    assert_ended(pid for life in first for pid in life["children"])
    assert {path.name for path in folder.iterdir()} == {"files", "links", "node0", "node1", "storage", "tmp"}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_kept_does_not_grow(case: Case, lives: Lives) -> None:
    first, _, folder = lives(case)
    kept = [path for path in (folder / "files").iterdir() if path.is_dir()]
    assert len(kept) <= FileSettings().keep, kept
    num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    # At most three iterations of the twelve, each of them twice.
    assert num_bytes <= 1.1 * 3 * 2 * sum(life["num_bytes"] for life in first)


def assert_ended(pids: Any) -> None:
    """All these processes are gone, or soon will be."""
    pids = list(pids)
    for _ in polls(10.0):
        if not any(map(psutil.pid_exists, pids)):
            break
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def quick_or_slow(case: Case) -> Any:
    return pytest.param(case, marks=[pytest.mark.slow] if case.system in WITH_PROCESS else [])


def outlive_a_peer(case: Case, folder: Path, how: int) -> None:
    make_folder(folder, case)
    survivor, _ = live(bereaved, folder, case, how)
    assert survivor["left"] == []
    if case.system in NOTHING:
        assert survivor["error"] == ""
        return
    assert survivor["error"] or survivor["num_failed"]
    assert_ended(int(pid) for pid in (folder / "children").read_text().split())
    for life in live(second_life, folder, case):
        # That of which one was on its way may have become complete.
        iteration = life["restored"]["iteration"]
        assert iteration in (survivor["last"], survivor["last"] + 1)
        assert_restored(case, life["restored"], iteration)
    assert len(list((folder / "files").iterdir())) <= FileSettings().keep


@pytest.mark.parametrize("case", [quick_or_slow(case) for case in CASES], ids=str)
def test_the_death_of_a_peer_ends_in_an_error_and_what_it_left_half_done_is_not_restored(
    case: Case, tmp_path: Path
) -> None:
    outlive_a_peer(case, tmp_path, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", [*CASES, PROCESS], ids=str)
def test_a_peer_that_stops_answering_ends_in_an_error(case: Case, tmp_path: Path) -> None:
    outlive_a_peer(case, tmp_path, signal.SIGSTOP)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", [PROCESS], ids=["process"])
def test_a_process_that_writes_ends_with_its_trainer(case: Case, lives: Lives, tmp_path: Path) -> None:
    test_every_checkpoint_becomes_complete_and_is_counted(case, lives)
    test_a_killed_job_gets_back_exactly_what_no_later_update_has_touched_and_goes_on(case, lives)
    test_a_system_may_be_closed_twice_and_leaves_nothing(case, lives)
    outlive_a_peer(case, tmp_path, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", SAVING, ids=str)
def test_a_state_of_tensors_that_are_large_is_isolated_too(case: Case, lives: Lives) -> None:
    large = replace(case, large=36_000_000, environment={}, timeout_s=30.0)  # 144 MB
    test_a_killed_job_gets_back_exactly_what_no_later_update_has_touched_and_goes_on(large, lives)


PASS, HARD_FAIL, SILENT_DIVERGENCE = "pass", "hard fail", "silent divergence"
"""The state came back exactly; nothing came back, with an error; something else came back, without one."""
DATA = {"torchsnapshot": "batched/*", "dcp": "__1_*.distcp", "dcp-async": "__1_*.distcp", "torch-save": "rank1.pt"}
"""Where the state of a rank lies in a checkpoint of each system that writes files."""


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


FAULTS: dict[str, Callable[[Path], None]] = {
    "truncated file": cut,
    "flipped byte": lambda file: flip_byte(file, file.stat().st_size // 2),
    "missing file": Path.unlink,
}
"""Of a checkpoint's files."""
KINDS = {"odd bfloat16": "odd_bfloat16", "float8": "float8"}
"""Of tensors that are to be saved."""
VERDICTS = {
    "torchsnapshot": {
        "truncated file": SILENT_DIVERGENCE,
        "flipped byte": SILENT_DIVERGENCE,
        "missing file": HARD_FAIL,
        "odd bfloat16": HARD_FAIL,
        "float8": HARD_FAIL,
    },
    "dcp": {
        "truncated file": HARD_FAIL,
        "flipped byte": SILENT_DIVERGENCE,
        "missing file": HARD_FAIL,
        "odd bfloat16": PASS,
        "float8": PASS,
    },
    "torch-save": {
        "truncated file": HARD_FAIL,
        "flipped byte": SILENT_DIVERGENCE,
        "missing file": PASS,  # the checkpoint before is taken
        "odd bfloat16": PASS,
        "float8": PASS,
    },
}


def faulty_lives(rank: int, folder: Path, case: Case) -> dict[str, str]:
    """The verdict on each fault, whether of the newest checkpoint's files or of what is to be saved."""
    saved, sound = folder / "none", replace(case, without=tuple(KINDS.values()))
    toy = Toy(sound, rank, saved)
    toy.train(1, NUM_SAVES)
    toy.system.drain(20.0)
    toy.system.close()
    verdicts = {}
    for fault, damage in FAULTS.items():
        if rank == 0:
            shutil.copytree(saved / "files", folder / fault / "files", dirs_exist_ok=True)
            newest = max((folder / fault / "files").glob("iteration-*"))
            damage(max(newest.glob(DATA[case.system])))
        dist.barrier()
        verdicts[fault] = verdict(Toy(sound, rank, folder / fault, attempt=1))
    for kind, tensor in KINDS.items():
        of_kind = replace(case, without=tuple({*KINDS.values()} - {tensor}))
        toy = Toy(of_kind, rank, folder / kind)
        toy.train(1, NUM_SAVES)
        is_saved = toy.system.counters().failed_saves == 0
        toy.system.close()
        verdicts[kind] = verdict(Toy(of_kind, rank, folder / kind, attempt=1)) if is_saved else HARD_FAIL
    return verdicts


def verdict(toy: Toy) -> str:
    try:
        restored = restore(toy)
    except CapricornError:
        return HARD_FAIL
    finally:
        toy.system.close()
    return PASS if restored is not None and restored["is_exact"] else SILENT_DIVERGENCE


VERDICTS["dcp-async"] = VERDICTS["dcp"]


@pytest.mark.parametrize("system", VERDICTS)
def test_what_is_known_to_be_wrong_with_a_library_is_wrong_still(system: str, tmp_path: Path) -> None:
    """If one of them has become better, so should the table and what the docs say."""
    case = Case(system, timeout_s=2.0)
    for name in ("none", *FAULTS, *KINDS):
        (tmp_path / name).mkdir()
        make_folder(tmp_path / name, case)
    (tmp_path / "tmp").mkdir()
    by_rank = live(faulty_lives, tmp_path, case)
    worst = {
        fault: max((ranks[fault] for ranks in by_rank), key=[PASS, SILENT_DIVERGENCE, HARD_FAIL].index)
        for fault in by_rank[0]
    }
    assert worst == VERDICTS[system]
