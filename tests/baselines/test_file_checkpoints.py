"""Systems that write files: what counts, what is removed, what a failure costs, what a modelled storage is charged."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from traceback import StackSummary
from typing import Any

import pytest
import torch
from capricorn.baselines.checkpoint_folders import COMMIT, REMOVED, CheckpointFolders, Commit
from capricorn.baselines.file_checkpoints import Library
from capricorn.baselines.file_settings import DcpSettings
from capricorn.baselines.torch_dcp import as_error
from torch.distributed.checkpoint.api import CheckpointException

from capricorn.emulation.storage import Storage
from capricorn.errors import CapricornError, StoreError
from capricorn.runtime.save.flat_state import FlatState
from capricorn.systems.registry import find
from tests.support.conformance import NUM_RANKS, Case, Toy, case_of, live, make_folder
from tests.support.peers import job_of

SYSTEMS = ("torchsnapshot", "dcp", "dcp-async", "torch-save")
BY_PROCESS = {"settings": DcpSettings(mode="process")}


def settings_with(system: str, **fields: Any) -> Any:
    """The settings of that system with these fields."""
    model = find(system).settings_model()
    assert model is not None
    return model(**fields)


every_system = pytest.mark.parametrize("system", SYSTEMS)


def folder_with(root: Path, iteration: int, *, committed: bool = True, whole: bool = True) -> None:
    folder = root / f"iteration-{iteration:08}"
    folder.mkdir()
    (folder / "data").write_bytes(bytes(10))
    if whole:
        (folder / "sign").touch()
    if committed:
        Commit(digests=(1, 2)).write(folder)


def folders_of(root: Path) -> CheckpointFolders:
    return CheckpointFolders(root, lambda folder, num_ranks: (folder / "sign").exists() and num_ranks == 2)


def names(root: Path) -> list[int]:
    assert not list(root.glob(f"{REMOVED}*"))
    return sorted(int(path.name.removeprefix("iteration-")) for path in root.iterdir())


def test_a_folder_is_complete_once_it_is_committed_and_the_library_says_so(tmp_path: Path) -> None:
    folder_with(tmp_path, 3)
    folder_with(tmp_path, 4, committed=False)
    folder_with(tmp_path, 5, whole=False)
    folder_with(tmp_path, 6)
    (tmp_path / "iteration-00000006" / COMMIT).write_text('{"digests": [1,')
    assert folders_of(tmp_path).complete() == [3]


def test_the_newest_complete_ones_are_kept_and_later_ones_left_alone(tmp_path: Path) -> None:
    for iteration in (1, 2, 4, 5, 7):
        folder_with(tmp_path, iteration)
    folder_with(tmp_path, 3, committed=False)
    folder_with(tmp_path, 6, committed=False)
    folders_of(tmp_path).prune(5, keep=2)
    assert names(tmp_path) == [4, 5, 6, 7]


def test_after_a_restore_what_is_later_or_not_complete_is_removed_and_older_ones_are_not(tmp_path: Path) -> None:
    for iteration in (1, 2, 4):
        folder_with(tmp_path, iteration)
    folder_with(tmp_path, 3, committed=False)
    (tmp_path / f"{REMOVED}00000009").mkdir()  # left by one that was killed while removing it
    folders_of(tmp_path).forget_after(2)
    assert names(tmp_path) == [1, 2]


class OneFile(Library):
    """The least that a library needs."""

    def write(self, folder: Path) -> list[Path]:
        file = folder / f"{self.job.rank}.bin"
        file.write_bytes(bytes(10))
        return [file]

    def load(self, folder: Path) -> None:
        raise NotImplementedError


class HalfAFile(OneFile):
    def write(self, folder: Path) -> list[Path]:
        super().write(folder)
        raise OSError(28, "No space left on device")


def test_by_default_a_folder_is_whole_once_every_rank_has_written_and_as_long_as_all_files_are_there(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "iteration-00000001"
    first, half, second = (
        library(job_of(rank, 2, tmp_path), FlatState({}))
        for library, rank in ((OneFile, 0), (HalfAFile, 1), (OneFile, 1))
    )
    assert not first.is_whole(folder, 2)
    first.begin(folder)()
    with pytest.raises(OSError, match="No space left"):
        half.begin(folder)()
    assert not first.is_whole(folder, 2)
    second.begin(folder)()
    assert first.is_whole(folder, 2)
    (folder / "1.bin").unlink()
    assert not first.is_whole(folder, 2)


def train(rank: int, folder: Path, case: Case, last: int) -> dict[str, Any]:
    """Saves up to that iteration, and ends in order."""
    toy = Toy(case, rank, folder)
    toy.train(1, last)
    try:
        toy.system.drain(20.0)
        complaint = ""
    except CapricornError as error:
        complaint = str(error)
    result = {
        "completed": toy.system.take_completed(),
        "failed": toy.system.counters().failed_saves,
        "sent_bytes": toy.system.counters().sent_bytes,
        "complaint": complaint,
    }
    toy.system.close()
    return result


def refused(rank: int, folder: Path, case: Case) -> tuple[str, bool]:
    """What a restore says, and whether it has left the state alone."""
    toy = Toy(case, rank, folder, attempt=1)
    toy.fill(77)
    try:
        toy.system.restore()
    except CapricornError as error:
        return f"{type(error).__name__}: {error}", toy.holds(77)
    return "restored", False


@pytest.mark.parametrize(("digests", "message"), [([1, 2, 3], "written by 3 ranks"), ([1, 2], "another layout")])
def test_a_checkpoint_of_another_job_is_refused_before_anything_is_loaded(
    tmp_path: Path, digests: list[int], message: str
) -> None:
    case = case_of("torchsnapshot")
    make_folder(tmp_path, case)
    live(train, tmp_path, case, 5)
    (tmp_path / "files" / "iteration-00000005" / COMMIT).write_text(json.dumps({"digests": digests}))
    said = live(refused, tmp_path, case)
    assert said[0] == said[1]
    assert said[0][0].startswith("ConfigError")
    assert message in said[0][0]
    assert said[0][1]
    assert (tmp_path / "files" / "iteration-00000004").exists()


def stumble(rank: int, folder: Path, case: Case) -> dict[str, Any]:
    """Rank 1 cannot begin iteration 3, and rank 0 cannot write what is left of iteration 5."""
    toy = Toy(case, rank, folder)
    library = toy.system._library
    begin = library.begin

    def full() -> Any:
        raise OSError(28, "No space left on device")

    def begin_or_not(place: Path) -> Any:
        if rank == 1 and place.name.endswith("3"):
            full()
        write = begin(place)
        return (lambda: (write(), full())) if rank == 0 and place.name.endswith("5") else write

    library.begin = begin_or_not
    toy.train(1, 8)
    try:
        toy.system.drain(20.0)
        complaint = ""
    except CapricornError as error:
        complaint = str(error)
    completed, failed = toy.system.take_completed(), toy.system.counters().failed_saves
    toy.system.close()
    return {"completed": completed, "failed": failed, "complaint": complaint, "left": toy.traces.left()}


PROCESS = pytest.param(Case("dcp-async", BY_PROCESS), marks=pytest.mark.slow, id="process")


@pytest.mark.parametrize("case", [*map(case_of, SYSTEMS), PROCESS], ids=str)
def test_a_save_that_fails_on_one_rank_is_counted_told_at_the_end_and_costs_nothing_else(
    case: Case, tmp_path: Path
) -> None:
    case = replace(case, timeout_s=60.0)
    make_folder(tmp_path, case)
    first, second = live(stumble, tmp_path, case)  # nobody waits for a rank until its deadline
    assert first["completed"] == second["completed"] == [1, 2, 4, 6, 7, 8]
    assert "iteration 5: OSError: [Errno 28] No space left on device" in first["complaint"]
    assert "iteration 3: OSError: [Errno 28] No space left on device" in second["complaint"]
    assert second["failed"] == 1
    assert first["left"] == second["left"] == []
    assert names(tmp_path / "files") == [7, 8]


def synced(rank: int, folder: Path, case: Case) -> tuple[list[str], list[str]]:
    """What was synced, in order, and what lay in the newest folder when it counted."""
    done: list[str] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        done.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    os.fsync = note
    toy = Toy(case, rank, folder)
    toy.train(1, 5)
    toy.system.drain(20.0)
    newest = folder / "files" / "iteration-00000005"
    return done, [str(path) for path in (newest, *newest.rglob("*"))]


@every_system
def test_with_fsync_it_counts_only_once_every_file_and_folder_is_on_the_medium(system: str, tmp_path: Path) -> None:
    case = case_of(system, settings={"settings": settings_with(system, fsync=True)})
    make_folder(tmp_path, case)
    (first, paths), (second, _) = live(synced, tmp_path, case)
    assert set(paths) <= {*first, *second}
    assert str(tmp_path / "files") in first
    newest = [path for path in first if "iteration-00000005" in path]
    assert newest.index(paths[0] + "/" + COMMIT) > max(
        map(newest.index, {*newest} - {paths[0], paths[0] + "/" + COMMIT})
    )


def test_without_fsync_nothing_is_synced(tmp_path: Path) -> None:
    make_folder(tmp_path, Case("dcp-async"))
    assert [done for done, _ in live(synced, tmp_path, Case("dcp-async"))] == [[], []]


@every_system
def test_a_modelled_storage_is_charged_for_every_byte(system: str, tmp_path: Path) -> None:
    case = case_of(system, settings={"settings": settings_with(system, keep=9)})
    make_folder(tmp_path, case)
    results = live(train, tmp_path, case, 5)
    assert [result["completed"] for result in results] == [[1, 2, 3, 4, 5]] * NUM_RANKS
    on_disk = sum(path.stat().st_size for path in (tmp_path / "files").rglob("*") if path.is_file())
    charged = charged_bytes(tmp_path)
    assert charged == on_disk
    assert on_disk - 5 * 100 <= sum(result["sent_bytes"] for result in results) <= on_disk
    live(refused, tmp_path, case)
    assert charged_bytes(tmp_path) - charged >= 0.9 * on_disk / 5


def charged_bytes(folder: Path) -> int:
    storages = [Storage(folder / "storage", node) for node in range(NUM_RANKS)]
    charged = sum(storage.charged_bytes for storage in storages)
    for storage in storages:
        storage.close()
    return charged


def wait_for_slow(rank: int, folder: Path, case: Case) -> tuple[str, list[str]]:
    toy = Toy(case, rank, folder)
    try:
        toy.train(1, 5)
        complaint = ""
    except StoreError as error:
        complaint = str(error)
    toy.system.close()
    return complaint, toy.traces.left()


@pytest.mark.parametrize("system", ["torchsnapshot", "dcp-async"])
def test_a_storage_that_takes_longer_than_the_deadline_ends_in_an_error_that_says_what_to_do(
    system: str, tmp_path: Path
) -> None:
    case = case_of(system, timeout_s=0.5)
    make_folder(tmp_path, replace(case, large=case.large // 200))  # 200 times as slow
    for complaint, left in live(wait_for_slow, tmp_path, case):
        assert "iteration 1 is not written after 0.5 s" in complaint
        assert "raise system.timeout_s" in complaint
        assert left == []


def watch_checksums(rank: int, folder: Path, case: Case) -> tuple[set[bool], bool]:
    """Whether checksums were computed when the library called `torch.save`, and whether they would be now."""
    seen, save = set(), torch.save

    def note(*arguments: Any, **options: Any) -> None:
        seen.add(torch.serialization.get_crc32_options())
        save(*arguments, **options)

    torch.save = note
    train(rank, folder, case, 5)
    torch.save = save
    return seen, torch.serialization.get_crc32_options()


@pytest.mark.parametrize(
    "case", [Case("torch-save"), Case("dcp"), Case("dcp-async", {"settings": DcpSettings(threads=2)})], ids=str
)
def test_checksums_that_nobody_looks_at_are_left_out_and_only_while_a_checkpoint_is_saved(
    case: Case, tmp_path: Path
) -> None:
    make_folder(tmp_path, case)
    assert live(watch_checksums, tmp_path, case) == [({False}, True)] * NUM_RANKS


@pytest.mark.parametrize(("cause", "raised"), [(OSError("full"), StoreError), (SystemExit("signal 15"), SystemExit)])
def test_what_dcp_raises_names_the_rank_and_a_signal_still_ends_the_process(
    cause: BaseException, raised: type[BaseException]
) -> None:
    with pytest.raises(raised, match="rank 1: OSError: full" if raised is StoreError else "signal 15"), as_error():
        raise CheckpointException("write", {1: (cause, StackSummary())})
