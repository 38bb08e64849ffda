"""Runs whose launcher is process 1 of a namespace: what is heard of them, and that nothing is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from capricorn.campaign.pid_namespace import launch_as_pid_1
from capricorn.campaign.testbeds import can_be_pid_1
from capricorn.config.scenario import Scenario
from capricorn.errors import CapricornError
from capricorn.launch.launcher import RunListener
from capricorn.records.samples import read_run
from capricorn.systems.settings import override
from tests.support.fault_jobs import TINY, with_faults

pytestmark = pytest.mark.skipif(not can_be_pid_1(), reason="needs a namespace of its own")
SHORT = override(TINY, ["train.iterations=6", "train.warmup=0", "cluster.device=cpu"])


class Ending(RunListener):
    """Remembers the run, and ends it in a while if it is told to."""

    def __init__(self, ends_after: int = 0) -> None:
        self.run_dir, self._left = Path(), ends_after

    def on_start(self, run_dir: Path, scenario: Scenario) -> None:
        self.run_dir = run_dir

    def on_tick(self) -> None:
        self._left -= 1
        if self._left == 0:
            raise CapricornError("hang: it takes too long")


def stores(listener: Ending) -> list[Path]:
    return list(Path("/dev/shm").glob(f"capricorn-{listener.run_dir.name}"))


@pytest.mark.slow
def test_a_run_whose_launcher_is_process_1_loses_a_worker_and_goes_on(tmp_path: Path) -> None:
    listener = Ending()
    launch_as_pid_1(with_faults("kill@rank=1,iteration=3", scenario=SHORT), tmp_path, listener)
    record = read_run(listener.run_dir)
    assert (record.verdict, record.summary["faults_triggered"]) == ("ok", 1)
    assert not stores(listener)


@pytest.mark.slow
def test_a_run_that_is_given_up_ends_with_its_namespace_and_leaves_no_store(tmp_path: Path) -> None:
    long = override(SHORT, ["train.iterations=100000"])
    listener = Ending(ends_after=150)
    with pytest.raises(CapricornError, match="takes too long"):
        launch_as_pid_1(long, tmp_path, listener)
    assert listener.run_dir != Path()
    assert not stores(listener)


def test_what_a_launcher_that_is_process_1_refuses_is_told_in_its_words(tmp_path: Path) -> None:
    refused = with_faults("tmpfs-full@rank=1,iteration=3", scenario=SHORT)
    with pytest.raises(CapricornError, match="mount a small tmpfs"):
        launch_as_pid_1(refused, tmp_path, Ending())
