"""The store under any order of saves, failures, kills and restarts: what is to be kept is never lost."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import mkdtemp

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from capricorn.runtime.store.node_store import NodeStore
from capricorn.runtime.store.slot import Layout, Slot
from capricorn.topology import Topology
from tests.support.replicas import complete_copies, fill, payload_of

LAYOUT = Layout(payload_bytes=300, block_bytes=128, digest=3)
OWNERS = (0, 1)


class Node(RuleBasedStateMachine):
    """One node with the slots of two owners; `keep` is the newest iteration that is complete for both."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(mkdtemp(prefix="store-states-"))
        self.open: dict[int, Slot] = {}
        self.keep, self.iteration = 0, 0

    @initialize()
    def make(self) -> None:
        NodeStore.create(self.root / "node0", "run", 0, Topology(2, 1)).close()
        self._start()

    def _start(self) -> None:
        self.store = NodeStore.open(self.root / "node0")
        for owner in OWNERS:
            self.store.open_slots(owner, LAYOUT)
        self.open.clear()

    @precondition(lambda self: not self.open)
    @rule()
    def begin(self) -> None:
        """A checkpoint starts: each owner gives up what it may."""
        self.iteration += 1
        for owner in OWNERS:
            self.open[owner] = self.store.begin(owner, self.iteration, self.keep)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), ends=st.sampled_from(["commit", "abort", "half"]))
    def end(self, data: st.DataObject, ends: str) -> None:
        """One owner's copy of it is written, given up, or left half written."""
        owner = data.draw(st.sampled_from(sorted(self.open)))
        slot = self.open.pop(owner)
        payload = payload_of(owner, self.iteration, LAYOUT)
        if ends == "half":
            slot.payload[:150] = payload[:150]
            return
        fill(slot, payload)
        (self.store.commit if ends == "commit" else self.store.abort)(slot)
        if all(self.store.read(each, self.iteration) for each in OWNERS):
            self.keep = self.iteration

    @rule()
    def kill(self) -> None:
        """The process goes, whatever it was about, and another one starts and forgets the abandoned future."""
        self.store.close()
        self._start()
        self.store.forget_after(self.keep)
        self.iteration = self.keep

    @precondition(lambda self: not self.open)
    @rule(owner=st.sampled_from(OWNERS))
    def damage(self, owner: int) -> None:
        """A header that is not that of what is to be kept is torn."""
        for slot in self.store.open_slots(owner, LAYOUT):
            if not slot.holds(self.keep):
                slot._map[20] ^= 0xFF
                return

    @invariant()
    def what_is_kept_is_there_and_whatever_is_complete_is_whole(self) -> None:
        if hasattr(self, "store"):
            held = complete_copies(self.store)
            assert not self.keep or {(owner, self.keep) for owner in OWNERS} <= held

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        shutil.rmtree(self.root)


Node.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestNode = Node.TestCase
