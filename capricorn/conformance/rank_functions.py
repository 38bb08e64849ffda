"""What the ranks do in the attempts that the rules look at: train, be killed, restore, lose a peer.

Each is a generator that tells facts as it goes on; a system may fail at any point of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from capricorn.conformance.subject import SystemUnderTest
from capricorn.conformance.toy_job import ToyRank
from capricorn.systems.registry import find

NUM_SAVES: Final = 6
LOST_RANK: Final = 1
PATIENCE: Final = 4
"""Deadlines of a peer that everything together may take when no peer is lost."""


def train_and_be_killed(rank: int, folder: Path, subject: SystemUnderTest) -> Iterator[dict[str, Any]]:
    """Trains from the beginning; the last checkpoint becomes complete when the state has already moved on.

    What does not survive that all ranks are killed closes on the ranks that must end in order.
    """
    toy = ToyRank(subject, rank, folder)
    system = toy.system
    yield {"before": toy.restore()}
    first = max(1, system.first_iteration)
    last = first + NUM_SAVES - 1
    changed, latest = [], []
    for iteration in range(1, last + 1):
        changed += toy.train(iteration, iteration)
        latest.append(system.latest_complete() or 0)
    toy.update(last + 1)
    yield {"changed": changed, "latest_by_iteration": latest, "saved": list(range(first, last + 1))}
    system.drain(PATIENCE * subject.timeout_s)
    yield {
        "completed": system.take_completed(),
        "latest": system.latest_complete(),
        "counters": asdict(system.counters()),
        "events": [asdict(event) for event in system.take_events()],
        "num_bytes": sum(tensor.nbytes for tensor in toy.state.tensors.values()),
    }
    survives = find(subject.system).survives
    is_killed = "kill-all" in survives or ("kill" in survives and rank == LOST_RANK)
    if not is_killed:
        system.close()


def restore_and_go_on(rank: int, folder: Path, subject: SystemUnderTest) -> Iterator[dict[str, Any]]:
    """Starts again, goes on, and ends in order."""
    toy = ToyRank(subject, rank, folder, attempt=1)
    system = toy.system
    restored = toy.restore()
    yield {"restored": restored}
    done = restored["iteration"] if restored is not None else 0
    changed = toy.train(done + 1, done + NUM_SAVES)
    yield {"changed": changed}
    system.drain(PATIENCE * subject.timeout_s)
    yield {"completed": system.take_completed(), "latest": system.latest_complete()}
    yield from _close_twice(toy, subject)


def restore_only(rank: int, folder: Path, subject: SystemUnderTest) -> Iterator[dict[str, Any]]:
    """Starts again, restores, and ends in order."""
    toy = ToyRank(subject, rank, folder, attempt=2)
    yield {"restored": toy.restore()}
    toy.system.close()


def lose_peer(rank: int, folder: Path, subject: SystemUnderTest, how: int) -> Iterator[dict[str, Any]]:
    """One rank is gone while a checkpoint is on its way; the other goes on for as long as it can.

    Args:
        rank: this one.
        folder: of the attempt.
        subject: the system, and how it is set up.
        how: the signal that the lost rank sends itself.
    """
    toy = ToyRank(subject, rank, folder)
    system = toy.system
    last = max(1, system.first_iteration) + NUM_SAVES - 2
    toy.train(1, last)
    yield {"last": last}
    if rank == LOST_RANK:
        toy.iterate(last + 1, together=False)
        os.kill(os.getpid(), how)
    error = ""
    try:
        toy.train(last + 1, last + 4, together=False)
        system.drain(subject.timeout_s)
    except Exception as failure:  # noqa: BLE001 - libraries raise what they like
        error = str(failure) or type(failure).__name__
    num_failed = system.counters().failed_saves
    yield {"complaint": error, "num_failed": num_failed, "latest": system.latest_complete()}
    yield from _close_twice(toy, subject)


def _close_twice(toy: ToyRank, subject: SystemUnderTest) -> Iterator[dict[str, Any]]:
    toy.system.close()
    toy.system.close()
    yield {"closed_twice": True, "left": toy.traces.left(subject.patience_s)}
