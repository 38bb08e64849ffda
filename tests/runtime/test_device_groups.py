"""Communicators of devices are aborted together, also by a rank that hears no signal; NCCL is played."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from capricorn.runtime.comm.device_groups import AbortOnSigterm, abort_all, device_backends


class FakeBackend:
    def __init__(self, name: str, calls: list[str], *, fails: bool = False) -> None:
        self.name, self.calls, self.fails = name, calls, fails

    def abort(self) -> None:
        self.calls.append(f"abort {self.name}")
        if self.fails:
            raise RuntimeError("gone")

    def _group_start(self) -> None:
        self.calls.append("start")

    def _group_end(self) -> None:
        self.calls.append("end")


def test_all_communicators_are_aborted_as_one_group() -> None:
    calls: list[str] = []
    abort_all([FakeBackend("b", calls), FakeBackend("a", calls)])
    assert calls == ["start", "abort b", "abort a", "end"]


def test_a_group_of_aborts_is_ended_though_one_fails() -> None:
    calls: list[str] = []
    with pytest.raises(RuntimeError, match="gone"):
        abort_all([FakeBackend("b", calls, fails=True)])
    assert calls == ["start", "abort b", "end"]


def test_without_communicators_of_devices_nothing_is_aborted(tmp_path: Path) -> None:
    abort_all(device_backends())
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert device_backends() == []
    finally:
        dist.destroy_process_group()


@pytest.fixture
def sigterm() -> Iterator[list[int]]:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    yield heard
    signal.signal(signal.SIGTERM, before)


def test_a_rank_that_waits_for_its_device_is_freed_by_sigterm(sigterm: list[int]) -> None:
    lib = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(64)
    lib.pthread_mutex_lock(mutex)  # the wait for the device: no signal ends it, only the abort does
    aborter = AbortOnSigterm(lambda: lib.pthread_mutex_unlock(mutex) and None)
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
    lib.pthread_mutex_lock(mutex)
    assert sigterm == [signal.SIGTERM]
    aborter.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "capricorn-abort"]


def test_other_signals_abort_nothing(sigterm: list[int]) -> None:
    aborted: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    aborter = AbortOnSigterm(lambda: aborted.append(1))
    os.kill(os.getpid(), signal.SIGUSR1)
    aborter.close()
    signal.signal(signal.SIGUSR1, before)
    assert not aborted
    assert not sigterm
