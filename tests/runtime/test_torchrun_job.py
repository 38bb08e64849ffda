"""Joining a job from a training loop of one's own."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from capricorn.config.scenario import SystemConfig
from capricorn.errors import CapricornError, ConfigError
from capricorn.runtime import torchrun_job
from capricorn.runtime.torchrun_job import join_job
from tests.support.spawn import run_ranks

TORCHRUN = {"RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "0"}


@pytest.mark.parametrize("missing", TORCHRUN)
def test_a_process_that_torchrun_did_not_start_is_told_so(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    with pytest.raises(ConfigError, match=f"^{missing} is not set; start the job with torchrun$"):
        join_job("run", SystemConfig())


def test_a_process_without_a_group_is_told_to_make_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="there is no process group; call init_process_group"):
        join_job("run", SystemConfig())


@pytest.mark.parametrize("timeout_s", [0, -5.0, float("nan"), float("inf"), 1e-9, 1e300, "5", None])
def test_a_timeout_that_no_group_can_wait_for_is_refused_by_name(timeout_s: Any) -> None:
    with pytest.raises(ConfigError, match=r"^timeout_s=.*must be a number of seconds"):
        join_job("run", SystemConfig(), timeout_s=timeout_s)


def join(rank: int, num_ranks: int, root: str, networks: tuple[str, ...], addresses: tuple[str, ...]) -> str:
    os.environ.update(TORCHRUN | {"RANK": str(rank)})
    torchrun_job._network = lambda: networks[rank]
    torchrun_job.listening_address = lambda endpoint, what: endpoint.host  # each rank is on a machine of its own
    try:
        join_job("run", SystemConfig(), address=addresses[rank], root=root, timeout_s=10.0)
    except CapricornError as error:
        return f"{type(error).__name__}: {error}"
    dist.barrier()
    return ""


LOCAL, OTHER = "127.0.0.1", "10.0.0.2"


@pytest.mark.parametrize(
    ("networks", "addresses", "refused"),
    [
        (("a", "a"), (LOCAL, LOCAL), ""),
        (("a", "b"), (OTHER, OTHER), ""),
        (("a", "b"), (OTHER, "nodes-name"), ""),
        (("a", "b"), (OTHER, LOCAL), f"address='{LOCAL}' of rank 1"),
        (("a", "b"), ("127.8.9.1", LOCAL), "address='127.8.9.1' of rank 0"),
        (("a", "b"), ("::1", OTHER), "address='::1' of rank 0"),
        (("a", "b"), (OTHER, "localhost"), "address='localhost' of rank 1"),
    ],
)
def test_a_loopback_address_is_refused_on_all_ranks_if_they_are_on_several_machines(
    tmp_path: Path, networks: tuple[str, ...], addresses: tuple[str, ...], refused: str
) -> None:
    for said in run_ranks(join, 2, str(tmp_path), networks, addresses):
        assert said.startswith(f"ConfigError: {refused} is a loopback address" if refused else "")
        assert bool(said) == bool(refused)
        assert not refused or "2 machines" in said


def join_behind(rank: int, num_ranks: int, root: str) -> str:
    os.environ.update(TORCHRUN)
    try:
        join_job("run", SystemConfig(replicas=1), root=root, timeout_s=0.2)
    except CapricornError as error:
        return str(error)
    return ""


def test_a_store_that_another_run_holds_is_given_up_at_the_deadline(tmp_path: Path) -> None:
    (folder := tmp_path / "capricorn-run").mkdir(mode=0o700)
    held = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(held, fcntl.LOCK_EX)
    (said,) = run_ranks(join_behind, 1, str(tmp_path))
    assert said == f"cannot make the store {folder}: another process holds its lock"
    os.close(held)
    assert run_ranks(join_behind, 1, str(tmp_path)) == [""]
