"""Runs by the real command line whose checkpoints go to disk too: what is there can be gone on from, whatever dies."""

from __future__ import annotations

import contextlib
import random
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean

import psutil
import pytest

from capricorn.runtime.persist.layout import Manifest, Stored, folder_of
from capricorn.runtime.persist.survey import complete_in, survey_persistent_tier
from capricorn.runtime.persist.writer_process import WRITER_NAME
from tests.support.processes import name_of
from tests.support.runs import LiveRun, Run, assert_ok, assert_same_losses, command, faults, polls, run

LONG = ("--iterations", "400")
NUM_KILLS = 30


@pytest.mark.slow
def test_a_run_that_loses_all_memory_goes_on_from_the_disk_with_the_same_losses(tmp_path: Path) -> None:
    reference = run(tmp_path / "reference", *LONG)
    lost = faults("node-loss@node=0,iteration=390", "node-loss@node=1,iteration=390")
    ended = run(tmp_path / "lost", *LONG, "--persist-every", "50", *lost)
    assert_ok(ended)
    assert ended.sources == [["persistent", "persistent"]]
    assert ended.resumed[0] in range(50, 400, 50)
    assert_same_losses(ended, reference)
    assert ended.folder is not None
    assert command("inspect", ended.folder).exit_code == 0


@pytest.mark.slow
def test_a_later_run_goes_on_from_the_checkpoints_of_an_earlier_one(tmp_path: Path) -> None:
    tier = ("--persist-dir", tmp_path / "tier")
    reference = run(tmp_path / "reference", "--iterations", "220")
    assert_ok(run(tmp_path / "first", "--iterations", "200", "--persist-every", "100", *tier))
    ended = run(tmp_path / "second", "--iterations", "220", *tier)
    assert_ok(ended)
    assert [event.iteration for event in ended.events if event.event == "resumed"] in ([200, 200], [100, 100])
    done = {(sample.rank, sample.iteration): sample.loss for sample in reference.samples}
    assert all(sample.loss == done[sample.rank, sample.iteration] for sample in ended.samples)
    again = run(tmp_path / "third", "--iterations", "100", *tier)
    assert (again.exit_code, len(again.stderr.splitlines())) == (2, 1)
    assert "training ends with 100" in again.stderr


@pytest.mark.slow
def test_a_later_run_on_other_ranks_goes_on_alike_in_every_resume_whatever_fails(tmp_path: Path) -> None:
    """2 ranks of 6 sequences, then 3 of 4, whose experts are uneven."""

    def tier(name: str) -> tuple[str | Path, ...]:
        return ("--persist-dir", tmp_path / name)

    two, three = shape(2, 6), shape(3, 4)
    assert_ok(run(tmp_path / "first", *two, "--iterations", "20", "--persist-every", "10", *tier("quiet")))
    for name in ("struck", "other"):
        shutil.copytree(tmp_path / "quiet", tmp_path / name)
    quiet = run(tmp_path / "second", *three, "--iterations", "30", *tier("quiet"))
    struck = run(tmp_path / "third", *three, "--iterations", "30", *tier("struck"), *faults("kill@rank=1,iteration=26"))
    whole = run(tmp_path / "whole", *three, "--iterations", "30")
    for ended in (quiet, struck, whole):
        assert_ok(ended)
    (first,) = {event.iteration for event in quiet.events if event.event == "resumed"}
    assert "spread from 2 ranks over 3: random states are drawn anew" in {event.detail for event in quiet.events}
    assert_same_losses(struck, quiet)
    expected = {iteration: loss for iteration, loss in means(whole).items() if iteration > first}
    assert means(quiet) == pytest.approx(expected, rel=1e-4), "sums are cut otherwise, for up to 30 updates"
    refused = run(tmp_path / "fourth", *three, "--iterations", "30", *tier("other"), "--seed", "1")
    assert refused.exit_code != 0
    assert len(refused.stderr.splitlines()) == 1
    assert "its data position is of other sequences; give the --seed that it was trained with" in refused.stderr


def shape(num_ranks: int, batch_size: int) -> tuple[str, ...]:
    return ("--nodes", str(num_ranks), "--set", f"model.batch_size={batch_size}")


def means(ended: Run) -> dict[int, float]:
    """By iteration, the mean loss of all ranks."""
    losses = defaultdict(list)
    for sample in ended.samples:
        losses[sample.iteration].append(sample.loss)
    return {iteration: fmean(each) for iteration, each in losses.items()}


@pytest.mark.slow
def test_a_run_that_was_killed_is_shown_as_far_as_it_came(tmp_path: Path) -> None:
    with LiveRun(tmp_path, "--iterations", "5000", "--persist-every", "5") as live:
        live.wait_iteration(10)
        folder, store = live.folder, live.store()
        assert folder is not None
        done = command("inspect", folder, "--json")
        assert done.exit_code == 0, done.stderr
        assert done.json["run"]["verdict"].startswith("no run.json: it is live or was killed")
        assert done.json["run"]["summary"]["iterations"] >= 10
        live.process.kill()
    done = command("inspect", folder)
    assert "was killed" in done.stdout
    shutil.rmtree(store)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_is_complete_on_disk_is_exact_whenever_and_whatever_is_killed(tmp_path: Path) -> None:
    """Writers and ranks are killed at random moments; every checkpoint that is whole is that of a quiet run."""
    seen: dict[int, dict[str, str]] = {}
    options = ("--iterations", "100000", "--persist-every", "20", "--set", f"launch.max_restarts={4 * NUM_KILLS}")
    dice, num_checked = random.Random(1), 0
    with LiveRun(tmp_path / "storm", *options, "--persist-dir", tmp_path / "tier") as live:
        live.wait(lambda: complete_in(survey_persistent_tier(tmp_path / "tier")), "a checkpoint on disk")
        for _ in range(NUM_KILLS):
            with contextlib.suppress(StopIteration):
                next(None for _ in polls(10.0) if list((tmp_path / "tier").glob(".tmp-*")))
            time.sleep(dice.choice((0.0, 0.3, 3.0)) * dice.random())
            assert live.process.poll() is None, live.stderr()
            kill(writers(live)[:1] if dice.random() < 0.5 else ranks(live))
            found = survey_persistent_tier(tmp_path / "tier")
            assert not [each.damage for each in found if each.damage]
            for iteration in complete_in(found):
                with contextlib.suppress(OSError):
                    manifest = Manifest.read(folder_of(tmp_path / "tier", iteration))
                    num_checked += 1
                    sums = sums_of(manifest.tensors)
                    assert seen.setdefault(iteration, sums) == sums
        last, store = max(seen), live.store()
    shutil.rmtree(store)
    quiet = ("--iterations", str(last + 1), "--persist-every", "20", "--set", f"persist.keep={last // 20 + 1}")
    assert_ok(run(tmp_path / "quiet", *quiet, "--persist-dir", tmp_path / "reference", deadline_s=400.0))
    common = [i for i in complete_in(survey_persistent_tier(tmp_path / "reference")) if i in seen]
    print(f"{num_checked} looks at {len(seen)} checkpoints, {len(common)} compared with those of a quiet run")
    assert common
    for iteration in common:
        assert sums_of(Manifest.read(folder_of(tmp_path / "reference", iteration)).tensors) == seen[iteration]


def sums_of(tensors: Mapping[str, Stored]) -> dict[str, str]:
    return {key: stored.xxh3 for key, stored in tensors.items()}


def writers(live: LiveRun) -> list[psutil.Process]:
    return [process for process in live.processes() if name_of(process) == WRITER_NAME]


def ranks(live: LiveRun) -> list[psutil.Process]:
    pids = {event.detail for event in live.events() if event.event == "started"}
    return [process for process in live.processes() if f"pid {process.pid}" in pids]


def kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
