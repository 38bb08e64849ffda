"""Processes that are killed right before a change of a store, and the stores they leave. Must not import torch."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import ParamSpec, TypeAlias

from capricorn.errors import CapricornError
from capricorn.runtime.store.node_store import NodeStore
from capricorn.runtime.store.slot import AUDIT_EVENT, Header, Layout, Slot, checksum
from capricorn.topology import Topology
from tests.support.replicas import payload_of

LAYOUT = Layout(payload_bytes=600, block_bytes=256, digest=9)
HEADER_BYTES = len(Header("empty", 0, 0, 0, LAYOUT).pack())
OWNERS = HOLDER, OWNER = 0, 1
DEADLINE_S = 20

P = ParamSpec("P")
Report: TypeAlias = Callable[[int], None]


def crash_point(call: str) -> None:
    """Tells of what comes next as a store tells of its own changes."""
    sys.audit(AUDIT_EVENT, call)


def killed_at(number: int, work: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Does that work in a process that ends right before that crash point, counted from 0."""
    calls = count()

    def hear(event: str, _: object) -> None:
        if event == AUDIT_EVENT and next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hear)
    work(*args, **kwargs)


def tear_at(number: int, cut: int) -> None:
    """Lets the process end when so many bytes of that header are written."""
    calls, write = count(), Slot._write

    def torn(slot: Slot, call: str, header: Header) -> None:
        if next(calls) == number:
            slot._map[:cut] = header.pack()[:cut]
            os.kill(os.getpid(), signal.SIGKILL)
        write(slot, call, header)

    Slot._write = torn  # type: ignore[method-assign]


def start(work: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> int:
    """A child that does that work; ends by itself after a while."""
    if child := os.fork():
        return child
    try:
        signal.alarm(DEADLINE_S)
        work(*args, **kwargs)
    except BaseException:  # noqa: BLE001 - a child must not go on as its parent
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def ends_killed(child: int, otherwise: int = 0) -> bool:
    """Whether the child was killed at its crash point; if it did not come to it, it ends `otherwise`."""
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (-signal.SIGKILL, otherwise), f"a child ended with {code}"
    return code == -signal.SIGKILL


def stop(child: int) -> bool:
    """Ends a child that waits for it; whether it had not been killed before."""
    os.kill(child, signal.SIGTERM)
    return not ends_killed(child, otherwise=-signal.SIGTERM)


class Ground:
    """A fresh store for each node, and what was reported as complete on all owners before the crash."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._reports = folder, folder / "reports"
        self.nodes = [folder / f"node{node}" for node in OWNERS]
        for node in OWNERS:
            self.make(node)

    def make(self, node: int) -> None:
        """An empty store in place of what is there."""
        shutil.rmtree(self.nodes[node], ignore_errors=True)
        NodeStore.create(self.nodes[node], "run", node, Topology(2, 1)).close()

    def report(self, iteration: int) -> None:
        with self._reports.open("a") as file:
            file.write(f"{iteration}\n")

    @property
    def reported(self) -> int:
        """The newest of them."""
        return max(map(int, self._reports.read_text().split()), default=0) if self._reports.exists() else 0


def fill(slot: Slot, owner: int, iteration: int) -> None:
    """Writes a payload and its checksums, in halves of blocks, with a crash point before each."""
    payload = payload_of(owner, iteration, LAYOUT)
    for index in range(LAYOUT.num_blocks):
        block = LAYOUT.block(index)
        middle = (block.start + block.stop) // 2
        for start, stop in ((block.start, middle), (middle, block.stop)):
            crash_point("payload")
            slot.payload[start:stop] = payload[start:stop]
        slot.table[index] = checksum(slot.payload[block])


def fresh(root: Path) -> Path:
    """An empty folder."""
    shutil.rmtree(root / "ground", ignore_errors=True)
    (root / "ground").mkdir(mode=0o700)
    return root / "ground"


def complaint(where: str, judge: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> str:
    """What is wrong after a crash point, or nothing."""
    try:
        judge(*args, **kwargs)
    except (AssertionError, CapricornError) as error:
        return f"{where}: {error}"
    return ""
