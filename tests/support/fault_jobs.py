"""What tests of injected failures have in common: a job whose stores hold copies, and processes that act."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from capricorn.config.fault_spec import FaultSpec
from capricorn.config.resolve import load_model
from capricorn.config.scenario import Scenario
from capricorn.records.job_file import Job
from capricorn.runtime.store.node_store import NodeStore
from capricorn.runtime.store.slot import Layout, checksum
from capricorn.topology import Topology

TINY = Scenario(model=load_model("mixtral-tiny"))
LAYOUT = Layout(payload_bytes=10_000, block_bytes=4096, digest=7)
DEADLINE_S = 20.0


def fault(text: str) -> FaultSpec:
    return FaultSpec.parse(text)


def with_faults(*texts: str, scenario: Scenario = TINY) -> Scenario:
    return scenario.model_copy(update={"faults": tuple(map(fault, texts))})


def make_job(folder: Path, *texts: str) -> Job:
    """A job of two nodes of one rank whose stores hold two complete iterations of both ranks."""
    for name in ("run", "store", "files"):
        (folder / name).mkdir()
    job = Job(
        run_id="test",
        scenario=with_faults(*texts),
        run_dir=folder / "run",
        store_dir=folder / "store",
        tokens=folder,
        files_dir=folder / "files",
    )
    job.store_dir.chmod(0o700)
    for node in range(2):
        store = NodeStore.create(job.node_dir(node), "test", node, Topology(2, 1))
        for owner in range(2):
            store.open_slots(owner, LAYOUT)
            for iteration in (3, 4):
                save(store, owner, iteration)
        store.close()
    return job


def save(store: NodeStore, owner: int, iteration: int) -> None:
    slot = store.begin(owner, iteration, keep=0)
    for index in range(LAYOUT.num_blocks):
        slot.payload[LAYOUT.block(index)] = bytes([iteration]) * len(slot.payload[LAYOUT.block(index)])
        slot.table[index] = checksum(slot.payload[LAYOUT.block(index)])
    store.commit(slot)


def in_child(act: Callable[[], object]) -> int:
    """How a process that does this ends: its exit code, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def damaged(job: Job) -> list[tuple[int, int, int]]:
    """Node, owner and iteration of each complete copy that does not match its checksums any more."""
    found = []
    for node in range(2):
        store = NodeStore.open(job.node_dir(node))
        copies = [copy for copy in store.inventory() if copy.state in ("complete", "damaged")]
        found += [(node, copy.owner, copy.iteration) for copy in copies if not store.verify(copy)]
    return found
