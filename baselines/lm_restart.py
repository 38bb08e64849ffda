"""What lm-resiliency leaves to its caller after a restart: who still has which state, and moving it to whom it belongs.

When workers end, its manager writes the copies that it holds, of its own rank and of its peer, to files on its node; a
rank that was killed, or lost its node, finds its state in the files of its peer, and the library's transfer moves it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import closing

import torch
import torch.distributed as dist
from lm_resiliency.checkpointing.disk import ChecksumMismatch
from lm_resiliency.manager_api import make_transfer

from capricorn.errors import NoCompleteCheckpointError
from capricorn.runtime.comm.collectives import maximum
from capricorn.runtime.recovery import Survivors, newest_common
from capricorn.runtime.save.flat_state import FlatState
from capricorn.systems.interface import JobContext, RestoreReport

from .lm_manager import Manager

MAX_SHARDS = 4
"""Iterations of an owner that are looked at on a node: two a restart leaves, and two older ones."""
HOST_BYTES = 64


class Restart:
    """Finds and loads the newest iteration that all owners have somewhere; collective."""

    def __init__(self, job: JobContext, manager: Manager) -> None:
        self._job, self._manager = job, manager
        self._owners = [owner for owner in (job.rank, manager.peer_rank) if owner >= 0]
        self._damaged: list[str] = []

    def run(self, state: FlatState) -> RestoreReport:
        """Loads the agreed iteration into the live state, and forgets all others.

        Raises:
            NoCompleteCheckpointError: no iteration survives on every owner.
        """
        begin_s, live = time.perf_counter(), [run.source for run in state.runs]
        iteration, sources, shards = self._agree()
        agreed_s = time.perf_counter()
        self._fetch(iteration, sources, shards, live)
        fetched_s = time.perf_counter()
        if sources[self._job.rank] == self._job.rank:
            for place, value in zip(live, shards[self._job.rank], strict=True):
                place.copy_(value)
        state.publish()
        self._forget_all_but(iteration)
        tiers = ["local" if source == owner else "peer" for owner, source in enumerate(sources)]
        times_s = (agreed_s - begin_s, fetched_s - agreed_s, time.perf_counter() - fetched_s)
        return RestoreReport(iteration, tiers, *times_s, self._damaged)

    def _agree(self) -> tuple[int, list[int], dict[int, list[torch.Tensor]]]:
        """The iteration, by owner the rank that has it, and verified the shards that this rank gives."""
        ranks = range(self._job.topology.world_size)
        while True:
            survivors = self._survey()
            iteration = newest_common(survivors, len(ranks))
            if iteration is None:
                self._forget_all_but(0)
                raise NoCompleteCheckpointError(_describe(survivors, len(ranks)))
            sources = [survivors[iteration][owner][0] for owner in ranks]
            given = [owner for owner in self._owners if sources[owner] == self._job.rank]
            shards = {owner: shard for owner in given if (shard := self._read(owner, iteration)) is not None}
            if not maximum(self._job.control_group, len(given) - len(shards)):
                return iteration, sources, shards

    def _survey(self) -> Survivors:
        """Who has what, from all ranks; an owner before its peer."""
        mine = torch.full((2 * MAX_SHARDS, 2), -1, dtype=torch.int64)
        held = [(owner, i) for owner in self._owners for i in self._manager.shards(owner)[:MAX_SHARDS]]
        for row, shard in enumerate(held):
            mine[row] = torch.tensor(shard)
        survivors: dict[int, dict[int, list[int]]] = {}
        for holder, table in enumerate(self._gather(mine)):
            for owner, iteration in table.tolist():
                if owner >= 0:
                    survivors.setdefault(iteration, {}).setdefault(owner, []).append(holder)
        for owners in survivors.values():
            for owner, holders in owners.items():
                holders.sort(key=lambda holder: holder != owner)
        return survivors

    def _read(self, owner: int, iteration: int) -> list[torch.Tensor] | None:
        """A shard from this node's files; None, and the file removed, if it is damaged."""
        try:
            return self._manager.read_shard(owner, iteration)
        except (ValueError, ChecksumMismatch, OSError):
            self._manager.shard_path(owner, iteration).unlink(missing_ok=True)
            self._damaged.append(f"rank {owner}'s copy of iteration {iteration} on rank {self._job.rank}")
            return None

    def _fetch(
        self,
        iteration: int,
        sources: Sequence[int],
        shards: Mapping[int, list[torch.Tensor]],
        live: Sequence[torch.Tensor],
    ) -> None:
        """Moves each shard that is not where it belongs; both ends take their turns in the same order."""
        rank = self._job.rank
        hosts = [bytes(row.tolist()).decode().rstrip() for row in self._gather(_padded(socket.gethostname()))]
        with closing(make_transfer("torch_dist", rank=rank, timeout_s=self._job.config.timeout_s)) as transfer:
            for owner in sorted(self._owners):
                source, key = sources[owner], f"{self._job.run_id}/{iteration}/{owner}"
                if source != owner and rank == source:
                    transfer.serve(shards[owner], key, owner, hosts[owner])
                elif source != owner and rank == owner:
                    transfer.fetch(list(live), key, source, hosts[source])

    def _forget_all_but(self, iteration: int) -> None:
        """Removes the files of older iterations, and of later ones, which belong to an abandoned future."""
        for owner in self._owners:
            for other in self._manager.shards(owner):
                if other != iteration:
                    self._manager.shard_path(owner, other).unlink(missing_ok=True)

    def _gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        rows = [torch.empty_like(mine) for _ in range(self._job.topology.world_size)]
        dist.all_gather(rows, mine, group=self._job.control_group)
        return rows


def _padded(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.encode().ljust(HOST_BYTES)), dtype=torch.uint8)


def _describe(survivors: Survivors, world_size: int) -> str:
    if not survivors:
        return "no checkpoint survives: the copies of lm-resiliency end with its workers, and none of them could write"
    newest = max(survivors)
    lost = ", ".join(str(owner) for owner in range(world_size) if owner not in survivors[newest])
    return f"no iteration survives on all ranks: of the newest, {newest}, rank {lost} has no copy"
