"""Systems that write files: what counts, what is removed, what a failure costs, what a modelled storage is charged."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from traceback import StackSummary
from typing import Any

import pytest
import torch
from capricorn.baselines.checkpoint_folders import COMMIT, REMOVED, CheckpointFolders, Commit
from capricorn.baselines.file_checkpoints import Library
from capricorn.baselines.torch_dcp import as_error
from torch.distributed.checkpoint.api import CheckpointException

from capricorn.conformance.subject import SystemUnderTest, under_test
from capricorn.conformance.toy_job import NUM_RANKS, ToyRank, make_folder
from capricorn.emulation.storage import Storage
from capricorn.errors import CapricornError, StoreError
from capricorn.systems.flat_state import FlatState
from capricorn.systems.settings import FileSettings
from tests.support.booked import charged_bytes
from tests.support.conformance import attempt
from tests.support.peers import job_of

SYSTEMS = ("torchsnapshot", "dcp", "dcp-async", "torch-save")
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
        library(replace(job_of(rank, 2, tmp_path), settings=FileSettings()), FlatState({}))
        for library, rank in ((OneFile, 0), (HalfAFile, 1), (OneFile, 1))
    )
    assert not first.is_whole(folder, 2)
    first.begin(folder)()
    with pytest.raises(OSError, match="No space left"):
        half.begin(folder)()
    assert not first.is_whole(folder, 2)
    second.begin(folder)()
    assert first.is_whole(folder, 2)
    (folder / "1.bin").write_bytes(bytes(5))
    assert not first.is_whole(folder, 2), "a file was cut short"
    (folder / "1.bin").unlink()
    assert not first.is_whole(folder, 2)


def train(rank: int, folder: Path, subject: SystemUnderTest, last: int) -> Iterator[dict[str, Any]]:
    """Saves up to that iteration, and ends in order."""
    toy = ToyRank(subject, rank, folder)
    toy.train(1, last)
    try:
        toy.system.drain(20.0)
        complaint = ""
    except CapricornError as error:
        complaint = str(error)
    yield {
        "completed": toy.system.take_completed(),
        "failed": toy.system.counters().failed_saves,
        "sent_bytes": toy.system.counters().sent_bytes,
        "complaint": complaint,
    }
    toy.system.close()


def refused(rank: int, folder: Path, subject: SystemUnderTest) -> Iterator[dict[str, Any]]:
    """What a restore says, and whether it has left the state alone."""
    toy = ToyRank(subject, rank, folder, attempt=1)
    toy.fill(77)
    try:
        toy.system.restore()
        yield {"said": "restored"}
    except CapricornError as error:
        yield {"said": f"{type(error).__name__}: {error}", "is_untouched": not toy.differing(77)}


@pytest.mark.parametrize(("digests", "message"), [([1, 2, 3], "written by 3 ranks"), ([1, 2], "another layout")])
def test_a_checkpoint_of_another_job_is_refused_before_anything_is_loaded(
    tmp_path: Path, digests: list[int], message: str
) -> None:
    subject = under_test("torchsnapshot")
    make_folder(tmp_path, subject)
    attempt(train, tmp_path, subject, last=5)
    (tmp_path / "files" / "iteration-00000005" / COMMIT).write_text(json.dumps({"digests": digests}))
    first, second = attempt(refused, tmp_path, subject)
    assert first == second
    assert first["said"].startswith("ConfigError")
    assert message in first["said"]
    assert first["is_untouched"]
    assert (tmp_path / "files" / "iteration-00000004").exists()


def stumble(rank: int, folder: Path, subject: SystemUnderTest) -> Iterator[dict[str, Any]]:
    """Rank 1 cannot begin iteration 3, and rank 0 cannot write what is left of iteration 5."""
    toy = ToyRank(subject, rank, folder)
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
    yield {"completed": completed, "failed": failed, "complaint": complaint, "left": toy.traces.left(10.0)}


PROCESS = pytest.param(under_test("dcp-async", options={"mode": "process"}), marks=pytest.mark.slow, id="process")


@pytest.mark.parametrize("subject", [*map(under_test, SYSTEMS), PROCESS], ids=str)
def test_a_save_that_fails_on_one_rank_is_counted_told_at_the_end_and_costs_nothing_else(
    subject: SystemUnderTest, tmp_path: Path
) -> None:
    subject = subject.model_copy(update={"timeout_s": 60.0})
    make_folder(tmp_path, subject)
    first, second = attempt(stumble, tmp_path, subject)  # nobody waits for a rank until its deadline
    assert first["completed"] == second["completed"] == [1, 2, 4, 6, 7, 8]
    assert "iteration 5: OSError: [Errno 28] No space left on device" in first["complaint"]
    assert "iteration 3: OSError: [Errno 28] No space left on device" in second["complaint"]
    assert second["failed"] == 1
    assert first["left"] == second["left"] == []
    assert names(tmp_path / "files") == [7, 8]


def synced(rank: int, folder: Path, subject: SystemUnderTest) -> Iterator[dict[str, Any]]:
    """What was synced, in order, and what lay in the newest folder when it counted."""
    done: list[str] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        done.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    os.fsync = note
    toy = ToyRank(subject, rank, folder)
    toy.train(1, 5)
    toy.system.drain(20.0)
    newest = folder / "files" / "iteration-00000005"
    yield {"synced": done, "newest": [str(path) for path in (newest, *newest.rglob("*"))]}


@every_system
def test_with_fsync_it_counts_only_once_every_file_and_folder_is_on_the_medium(system: str, tmp_path: Path) -> None:
    subject = under_test(system, options={"fsync": True})
    make_folder(tmp_path, subject)
    told = attempt(synced, tmp_path, subject)
    first, paths = told[0]["synced"], told[0]["newest"]
    assert set(paths) <= {*first, *told[1]["synced"]}
    assert str(tmp_path / "files") in first
    newest = [path for path in first if "iteration-00000005" in path]
    assert newest.index(paths[0] + "/" + COMMIT) > max(
        map(newest.index, {*newest} - {paths[0], paths[0] + "/" + COMMIT})
    )


def test_without_fsync_nothing_is_synced(tmp_path: Path) -> None:
    subject = under_test("dcp-async")
    make_folder(tmp_path, subject)
    assert [told["synced"] for told in attempt(synced, tmp_path, subject)] == [[], []]


@every_system
def test_a_modelled_storage_is_charged_for_every_byte(system: str, tmp_path: Path) -> None:
    subject = under_test(system, options={"keep": 9})
    make_folder(tmp_path, subject)
    results = attempt(train, tmp_path, subject, last=5)
    assert [result["completed"] for result in results] == [[1, 2, 3, 4, 5]] * NUM_RANKS
    on_disk = sum(path.stat().st_size for path in (tmp_path / "files").rglob("*") if path.is_file())
    charged = charged_in(tmp_path)
    assert charged == on_disk
    assert on_disk - 5 * 100 <= sum(result["sent_bytes"] for result in results) <= on_disk
    attempt(refused, tmp_path, subject)
    assert charged_in(tmp_path) - charged >= 0.9 * on_disk / 5


def charged_in(folder: Path) -> int:
    storages = [Storage(folder / "storage", node) for node in range(NUM_RANKS)]
    charged = sum(charged_bytes(storage) for storage in storages)
    for storage in storages:
        storage.close()
    return charged


def wait_for_slow(rank: int, folder: Path, subject: SystemUnderTest) -> Iterator[dict[str, Any]]:
    toy = ToyRank(subject, rank, folder)
    try:
        toy.train(1, 5)
        complaint = ""
    except StoreError as error:
        complaint = str(error)
    toy.system.close()
    yield {"complaint": complaint, "left": toy.traces.left(10.0)}


@pytest.mark.parametrize("system", ["torchsnapshot", "dcp-async"])
def test_a_storage_that_takes_longer_than_the_deadline_ends_in_an_error_that_says_what_to_do(
    system: str, tmp_path: Path
) -> None:
    subject = under_test(system, timeout_s=0.5)
    make_folder(tmp_path, under_test(system, large=subject.large // 200))  # 200 times as slow
    for told in attempt(wait_for_slow, tmp_path, subject):
        assert "iteration 1 is not written after 0.5 s" in told["complaint"]
        assert "raise system.timeout_s" in told["complaint"]
        assert told["left"] == []


def watch_checksums(rank: int, folder: Path, subject: SystemUnderTest) -> Iterator[dict[str, Any]]:
    """Whether checksums were computed when the library called `torch.save`, and whether they would be now."""
    seen, save = set(), torch.save

    def note(*arguments: Any, **options: Any) -> None:
        seen.add(torch.serialization.get_crc32_options())
        save(*arguments, **options)

    torch.save = note
    yield from train(rank, folder, subject, 5)
    torch.save = save
    yield {"during": list(seen), "after": torch.serialization.get_crc32_options()}


@pytest.mark.parametrize(
    "subject",
    [under_test("torch-save"), under_test("dcp"), under_test("dcp-async", options={"threads": 2})],
    ids=str,
)
def test_checksums_that_nobody_looks_at_are_left_out_and_only_while_a_checkpoint_is_saved(
    subject: SystemUnderTest, tmp_path: Path
) -> None:
    make_folder(tmp_path, subject)
    told = attempt(watch_checksums, tmp_path, subject)
    assert [(each["during"], each["after"]) for each in told] == [([False], True)] * NUM_RANKS


@pytest.mark.parametrize(("cause", "raised"), [(OSError("full"), StoreError), (SystemExit("signal 15"), SystemExit)])
def test_what_dcp_raises_names_the_rank_and_a_signal_still_ends_the_process(
    cause: BaseException, raised: type[BaseException]
) -> None:
    with pytest.raises(raised, match="rank 1: OSError: full" if raised is StoreError else "signal 15"), as_error():
        raise CheckpointException("write", {1: (cause, StackSummary())})
