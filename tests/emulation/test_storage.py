"""A modelled file system: its rates hold for every node and for all, and real libraries write and read through it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from capricorn.baselines.torch_dcp import PacedReader, PacedWriter
from capricorn.baselines.torch_snapshot import storage_options
from torchsnapshot import Snapshot, StateDict

from capricorn.emulation.paced_link import BURST_S
from capricorn.emulation.storage import QUANTUM_S, Storage
from capricorn.errors import ConfigError, TransportError
from tests.support.booked import charged_bytes
from tests.support.spawn import run_ranks
from tests.support.virtual import VirtualTime

NODE_RATE, TOTAL_RATE = 100e6, 250e6
STATE_BYTES = 4 * (1000 + 250_000 + 7 + 500_000)


def make_state(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(size, generator=generator) for size in (1000, 250_000, 7, 500_000)]
    return {**{f"weight{index}": weight for index, weight in enumerate(weights)}, "iteration": 3, "name": "moe"}


def blank(state: dict[str, Any]) -> dict[str, Any]:
    return {key: torch.zeros_like(value) if torch.is_tensor(value) else None for key, value in state.items()}


def assert_equal(left: dict[str, Any], right: dict[str, Any]) -> None:
    for key, value in right.items():
        assert torch.equal(left[key], value) if torch.is_tensor(value) else left[key] == value


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a storage for four nodes."""
    Storage.create(tmp_path / "storage", 4, NODE_RATE, TOTAL_RATE)
    return tmp_path / "storage"


@pytest.fixture
def storage(folder: Path) -> Iterator[Storage]:
    storage = Storage(folder, 0)
    yield storage
    storage.close()


def charge_at_once(folder: Path, num_bytes: int, nodes: list[int]) -> list[float]:
    """How long each takes, in virtual time, when the ranks of these nodes begin at once."""
    virtual, took = VirtualTime(), dict[int, float]()
    start = virtual.now

    def rank(index: int, node: int) -> None:
        storage = Storage(folder, node, clock=virtual.clock, sleep=virtual.sleep)
        storage.charge(num_bytes)
        took[index] = virtual.now - start
        storage.close()

    virtual.run(*(lambda args=args: rank(*args) for args in enumerate(nodes)))
    return [took[index] for index in range(len(nodes))]


@pytest.mark.parametrize("num_bytes", [0, 1, 1000, 12_345_678])
def test_a_node_is_charged_at_its_rate(folder: Path, num_bytes: int) -> None:
    assert charge_at_once(folder, num_bytes, [0]) == pytest.approx([max(0.0, num_bytes / NODE_RATE - BURST_S)])


def test_two_nodes_that_leave_room_are_not_in_each_others_way(folder: Path) -> None:
    took = charge_at_once(folder, 20_000_000, [0, 3])
    assert took == pytest.approx([20_000_000 / NODE_RATE - BURST_S] * 2, abs=QUANTUM_S)


def test_four_nodes_share_the_total_rate(folder: Path) -> None:
    took = charge_at_once(folder, 50_000_000, [0, 1, 2, 3])
    assert took == pytest.approx([4 * 50_000_000 / TOTAL_RATE - BURST_S] * 4, abs=2 * QUANTUM_S)


def test_the_ranks_of_a_node_share_its_rate(folder: Path) -> None:
    took = charge_at_once(folder, 20_000_000, [2, 2])
    assert took == pytest.approx([2 * 20_000_000 / NODE_RATE - BURST_S] * 2, abs=2 * QUANTUM_S)


def test_a_slow_storage_takes_turns_as_often_as_a_fast_one(tmp_path: Path) -> None:
    Storage.create(tmp_path / "slow", 2, 1e6, 1e6)
    took = charge_at_once(tmp_path / "slow", 1_000_000, [0, 1])
    assert took == pytest.approx([2 - BURST_S] * 2, abs=3 * QUANTUM_S)


def test_what_all_ranks_of_a_node_were_charged_for_is_counted(folder: Path, storage: Storage) -> None:
    charge_at_once(folder, 1000, [0, 0, 1])
    assert charged_bytes(storage) == 2000


def test_a_node_that_the_storage_does_not_know_is_refused(folder: Path) -> None:
    with pytest.raises(TransportError, match="node4"):
        Storage(folder, 4)


def test_torchsnapshot_writes_and_reads_through_it(tmp_path: Path, folder: Path, storage: Storage) -> None:
    state, url, options = make_state(), f"paced://{tmp_path}/snapshot", storage_options(folder, 0)
    start = time.monotonic()
    Snapshot.take(url, {"state": StateDict(**state)}, storage_options=options)
    assert time.monotonic() - start >= STATE_BYTES / NODE_RATE - BURST_S
    written = charged_bytes(storage)
    assert written == bytes_in(tmp_path / "snapshot") >= STATE_BYTES
    restored = StateDict(**blank(state))
    Snapshot(url, storage_options=options).restore({"state": restored})
    assert_equal(restored, state)
    assert charged_bytes(storage) == 2 * written


def test_torchsnapshot_writes_through_it_in_the_background(tmp_path: Path, folder: Path, storage: Storage) -> None:
    state, url, options = make_state(), f"paced://{tmp_path}/snapshot", storage_options(folder, 0)
    before = {key: value.clone() if torch.is_tensor(value) else value for key, value in state.items()}
    pending = Snapshot.async_take(url, {"state": StateDict(**state)}, storage_options=options)
    for index in range(4):
        state[f"weight{index}"].zero_()
    snapshot = pending.wait()
    assert charged_bytes(storage) == bytes_in(tmp_path / "snapshot")
    restored = StateDict(**blank(state))
    snapshot.restore({"state": restored})
    assert_equal(restored, before)


def test_torchsnapshot_is_told_what_the_url_lacks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="storage_options"):
        Snapshot.take(f"paced://{tmp_path}/snapshot", {"state": StateDict(**make_state())})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_writes_and_reads_through_it(tmp_path: Path, storage: Storage) -> None:
    state = make_state()
    start = time.monotonic()
    dcp.save(dict(state), storage_writer=PacedWriter(tmp_path / "dcp", storage, thread_count=2))
    assert time.monotonic() - start >= STATE_BYTES / NODE_RATE - BURST_S
    written = charged_bytes(storage)
    assert written == bytes_in(tmp_path / "dcp") >= STATE_BYTES
    loaded = blank(state)
    dcp.load(loaded, storage_reader=PacedReader(tmp_path / "dcp", storage))
    assert_equal(loaded, state)
    assert (
        STATE_BYTES <= charged_bytes(storage) - written <= 1.2 * written
    )  # small reads fill a buffer, larger than they


def test_each_rank_is_charged_on_its_own_node_though_all_take_the_path_of_rank_0(tmp_path: Path, folder: Path) -> None:
    charged = run_ranks(save_with_both, 2, tmp_path, folder)
    assert sum(snapshot for snapshot, _ in charged) == bytes_in(tmp_path / "snapshot")
    assert sum(asynchronous for _, asynchronous in charged) == bytes_in(tmp_path / "dcp")
    assert all(num_bytes >= STATE_BYTES for both in charged for num_bytes in both)


def save_with_both(rank: int, num_ranks: int, tmp_path: Path, folder: Path) -> tuple[int, int]:
    """Bytes that this rank's node was charged for by TorchSnapshot and by DCP, each in the background."""
    storage, state = Storage(folder, rank), make_state(rank)
    options = storage_options(folder, rank)
    url = f"paced://{tmp_path}/{'snapshot' if rank == 0 else 'nowhere'}"
    Snapshot.async_take(url, {"state": StateDict(**state)}, storage_options=options).wait()
    snapshot = charged_bytes(storage)
    own = {f"rank{rank}": state}
    dcp.async_save(own, storage_writer=PacedWriter(tmp_path / "dcp", storage)).result()
    loaded = {f"rank{rank}": blank(state)}
    asynchronous = charged_bytes(storage) - snapshot
    dcp.load(loaded, storage_reader=PacedReader(tmp_path / "dcp", storage))
    assert_equal(loaded[f"rank{rank}"], state)
    restored = StateDict(**blank(state))
    Snapshot(f"paced://{tmp_path}/snapshot", storage_options=options).restore({"state": restored})
    assert_equal(restored, state)
    storage.close()
    return snapshot, asynchronous
