"""A store whose writer is killed before any one of its changes: what was complete is there, exact, and written on.

See tests/crashes.py for what the writers do and what is held against what they left.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from capricorn.runtime.store.node_store import NodeStore
from capricorn.runtime.store.slot import Layout
from capricorn.topology import Topology

ROOT = Path(__file__).parents[2]
DEADLINE_S = 110.0


def assert_consistent(subject: str, *, every: int, at_least: int) -> None:
    """At each so many-th crash point, of which there are that many at least."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.crashes", subject, str(every)],
        cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert not found["complaints"], "\n".join(found["complaints"][:10])
    assert found["points"] >= at_least


def test_a_writer_that_is_killed_before_any_of_its_changes_leaves_what_was_complete() -> None:
    assert_consistent("writers", every=1, at_least=150)


def test_a_header_that_is_torn_at_any_byte_is_never_taken_for_a_whole_one() -> None:
    assert_consistent("headers", every=17, at_least=125)


def test_a_slot_whose_maker_was_killed_while_it_claimed_the_memory_is_made_anew(tmp_path: Path) -> None:
    NodeStore.create(tmp_path / "node0", "run", 0, Topology(1, 1)).close()
    (tmp_path / "node0" / "owner0.slot1").touch(mode=0o600)
    with closing(NodeStore.open(tmp_path / "node0")) as store:
        assert [slot.is_complete for slot in store.open_slots(0, Layout(10_000, 4096, 1))] == [False, False]
        store.commit(store.begin(0, 1, keep=0))
        store.commit(store.begin(0, 2, keep=1))
        assert sorted(store.iterations(0)) == [1, 2]


def test_an_owner_that_is_killed_before_any_of_its_changes_or_sends_goes_on_from_what_was_complete() -> None:
    assert_consistent("owners", every=1, at_least=110)


def test_an_owner_that_is_lost_with_its_node_at_any_moment_gets_its_state_back_from_its_holder() -> None:
    assert_consistent("lost-owners", every=3, at_least=35)


def test_a_holder_that_is_killed_before_any_of_its_changes_keeps_what_it_acknowledged() -> None:
    assert_consistent("holders", every=1, at_least=33)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("subject", ["headers", "lost-owners"])
def test_the_same_holds_at_every_single_point(subject: str) -> None:
    assert_consistent(subject, every=1, at_least=110)
