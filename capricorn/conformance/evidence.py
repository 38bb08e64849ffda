"""What the attempts with one system have shown. Each is made once, when a rule first asks for it."""

from __future__ import annotations

import shutil
import signal
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from capricorn.conformance.attempts import Attempt, AttemptServer
from capricorn.conformance.rank_functions import (
    LOST_RANK,
    lose_peer,
    restore_and_go_on,
    restore_only,
    train_and_be_killed,
)
from capricorn.conformance.subject import SystemUnderTest
from capricorn.conformance.toy_job import JOB_FILES, make_folder, make_node
from capricorn.conformance.traces import files_in
from capricorn.systems.registry import find

RESTARTED: Final = "restarted"


@dataclass(frozen=True, slots=True)
class Restarted:
    """A job that was killed and started again, and what its folder held after it had ended in order."""

    first: Attempt
    second: Attempt
    kept_bytes: int
    strays: list[Path]
    """Files outside the folders that a system is given."""


class Evidence:
    """The attempts with one system, in folders below one that the caller removes."""

    def __init__(self, subject: SystemUnderTest, server: AttemptServer, folder: Path) -> None:
        self.subject, self.entry = subject, find(subject.system)
        self._server, self._folder = server, folder

    @cached_property
    def restarted(self) -> Restarted:
        """Killed at the end of its first attempt."""
        folder = self._make(RESTARTED)
        first = self._server.run(train_and_be_killed, folder, self.subject)
        second = self._server.run(restore_and_go_on, folder, self.subject)
        kept_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        strays = [path for path in folder.iterdir() if path.name not in JOB_FILES] + files_in(folder / "tmp")
        return Restarted(first, second, kept_bytes, strays)

    @cached_property
    def after_node_loss(self) -> Attempt:
        """That job once more, after its second node was replaced by an empty one."""
        assert self.restarted  # whatever its attempts have shown
        folder = self._folder / RESTARTED
        shutil.rmtree(folder / f"node{LOST_RANK}")
        make_node(folder, LOST_RANK)
        return self._server.run(restore_only, folder, self.subject)

    @cached_property
    def peer_died(self) -> tuple[Attempt, Attempt]:
        """Rank 1 was killed; then the job was started again."""
        return self._lose_peer("peer-died", signal.SIGKILL)

    @cached_property
    def peer_stopped(self) -> tuple[Attempt, Attempt]:
        """Rank 1 stopped answering; then the job was started again."""
        return self._lose_peer("peer-stopped", signal.SIGSTOP)

    def _lose_peer(self, name: str, how: signal.Signals) -> tuple[Attempt, Attempt]:
        folder = self._make(name)
        deadline_s = 10 + 10 * self.subject.timeout_s
        lost = self._server.run(lose_peer, folder, self.subject, deadline_s=deadline_s, how=int(how))
        return lost, self._server.run(restore_and_go_on, folder, self.subject)

    def _make(self, name: str) -> Path:
        folder = self._folder / name
        make_folder(folder, self.subject)
        return folder
