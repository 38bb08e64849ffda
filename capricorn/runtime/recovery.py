"""Recovery: all ranks agree on the newest iteration that survives, fetch what they lost, and verify before they load.

Nothing live is touched until every rank holds a verified copy of the same iteration. Everything here runs on the
training thread, before training starts. If memory has no common iteration, or an older one than the persistent tier,
the persistent tier is read.

    state      what happens                                                    collective   next state
    survey     ranks tell each other which copies they hold; a refused copy    yes          choose
               is left out
    choose     the newest iteration that every owner has in memory, against    yes          obtain, or
               the newest of the persistent tier                                            NoCompleteCheckpointError
    obtain     from memory: a rank verifies its own copy, or fetches one from  no           exchange
               a holder and verifies it on the way; into a slot that holds
               no complete copy, or a spare one
               from the persistent tier: every rank loads its part, and all    yes          agreed, or survey with
               compare what they found                                                      that checkpoint refused
    exchange   ranks tell each other whose copy was damaged or not to be had;  yes          agreed, or survey with
               its holder empties that slot                                                 those copies refused
    agreed     a verified copy of the iteration lies in a slot of each rank,   -            the caller loads it
               moved there from a spare one

The caller then loads the copy into the live state, publishes it (collective), empties the slots of later iterations
(followed by a barrier) and sends new replicas to the holders that lost theirs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist

from capricorn.errors import NoCompleteCheckpointError, TransportError
from capricorn.runtime.comm.collectives import gather, maximum, waiting_for
from capricorn.runtime.comm.replica_link import ReplicaLink
from capricorn.runtime.persist.restore import PersistentTier
from capricorn.runtime.store.node_store import NodeStore
from capricorn.runtime.store.slot import Slot
from capricorn.units import Seconds

Survivors: TypeAlias = Mapping[int, Mapping[int, Sequence[int]]]
"""Iteration -> owner -> ranks that have a complete copy of it, the owner itself first."""
Obtained: TypeAlias = tuple[tuple[list[str], Mapping[int, Sequence[int]]] | None, list[str]]
"""By owner the tier and the ranks that have it; or None, and the copies that proved damaged."""

LOCAL, PEER, PERSISTENT = "local", "peer", "persistent"


@dataclass(frozen=True, slots=True)
class Agreement:
    """The iteration that all ranks settled on, and how long it took on this rank."""

    iteration: int
    tiers: list[str]
    """By owner: the tier its state came from, `local`, `peer` or `persistent`."""
    holders: Mapping[int, Sequence[int]]
    """By owner: the ranks that have a complete copy of it."""
    newest_persisted: int | None
    """Newest iteration in the persistent tier, up to the one agreed on, if any."""
    notes: Sequence[str]
    """Remarks for the user, in words."""
    damaged: list[str]
    """Copies that were skipped since they were damaged or not to be had, in words."""
    agree_s: Seconds
    fetch_s: Seconds


def newest_common(survivors: Survivors, world_size: int) -> int | None:
    """Returns the newest iteration of which every owner has a copy somewhere; None if there is none."""
    common = [iteration for iteration, owners in survivors.items() if len(owners) == world_size]
    return max(common, default=None)


class Recovery:
    """Finds and fetches the newest iteration that all owners still have; collective."""

    def __init__(
        self,
        rank: int,
        group: dist.ProcessGroup,
        store: NodeStore,
        owners: Iterable[int],
        links: Sequence[ReplicaLink],
        attempt: int,
        persistent_tier: PersistentTier | None = None,
    ) -> None:
        """Prepares a recovery; nothing is read or sent yet.

        Args:
            rank: this rank.
            group: of all ranks.
            store: of this node.
            owners: those whose copies this rank answers for: itself, then the owners whose replicas it holds.
            links: to the holders of this rank's replicas.
            attempt: counts the starts of the job; fetched copies are marked with it.
            persistent_tier: where older checkpoints lie, if any are persisted.
        """
        self._persistent_tier = persistent_tier
        self._rank, self._group, self._store = rank, group, store
        self._owners, self._attempt = list(owners), attempt
        self._links = {link.holder: link for link in links}
        self._world_size = dist.get_world_size(group)
        self._refused: set[tuple[int, int, int]] = set()  # (holder, owner, iteration) found damaged, by all ranks

    def run(self) -> Agreement:
        """Leaves a verified copy of the agreed iteration in this rank's own slots.

        Raises:
            NoCompleteCheckpointError: no iteration survives on every owner, nor in the persistent tier.
            ConfigError: the newest is in the persistent tier, and of another model.
        """
        agree_s = fetch_s = 0.0
        damaged: list[str] = []
        while True:
            begin_s = time.perf_counter()
            survivors = self._survey()
            in_memory = newest_common(survivors, self._world_size)
            persisted = self._persistent_tier.newest() if self._persistent_tier is not None else None
            agree_s += time.perf_counter() - begin_s
            candidates = [iteration for iteration in (in_memory, persisted) if iteration is not None]
            if not candidates:
                raise NoCompleteCheckpointError(self._describe(survivors, damaged))
            iteration, begin_s = max(candidates), time.perf_counter()
            if iteration == in_memory:
                found, complaints = self._from_memory(iteration, survivors)
            else:
                found, complaints = self._from_persistent_tier(iteration, keep=in_memory)
            fetch_s += time.perf_counter() - begin_s
            if found is not None:
                notes = self._persistent_tier.notes if self._persistent_tier is not None else ()
                return Agreement(iteration, *found, persisted, notes, damaged, agree_s, fetch_s)
            damaged += complaints

    def _from_persistent_tier(self, iteration: int, keep: int | None) -> Obtained:
        assert self._persistent_tier is not None
        if complaint := self._persistent_tier.obtain(iteration, keep):
            return None, [complaint]
        return ([PERSISTENT] * self._world_size, {owner: [owner] for owner in range(self._world_size)}), []

    def _from_memory(self, iteration: int, survivors: Survivors) -> Obtained:
        holders = survivors[iteration]
        older = newest_common({i: owners for i, owners in survivors.items() if i != iteration}, self._world_size)
        sources = [holders[owner][0] for owner in range(self._world_size)]
        slot = self._obtain(iteration, sources[self._rank], keep=older)
        newly_refused = self._exchange_refusals(iteration, sources, failed=slot is None)
        if newly_refused:
            return None, [f"rank {o}'s copy of iteration {i} on rank {h}" for h, o, i in sorted(newly_refused)]
        assert slot is not None
        self._store.adopt(slot)  # not before all ranks have theirs, or an older one could still be needed
        return ([LOCAL if source == owner else PEER for owner, source in enumerate(sources)], holders), []

    def _survey(self) -> Survivors:
        """Returns which ranks hold which copies, without those that proved damaged; collective."""
        copies = [(owner, i) for owner in self._owners for i in self._store.iterations(owner)]
        what = "the others to tell which copies they hold"
        mine = torch.full((maximum(self._group, len(copies), what), 2), -1, dtype=torch.int64)
        for row, copy in enumerate(copies):
            mine[row] = torch.tensor(copy)
        survivors: dict[int, dict[int, list[int]]] = {}
        for holder, table in enumerate(gather(self._group, mine, what)):
            for owner, iteration in table.tolist():
                if owner >= 0 and (holder, owner, iteration) not in self._refused:
                    survivors.setdefault(iteration, {}).setdefault(owner, []).append(holder)
        for owners in survivors.values():
            for owner, holders in owners.items():
                holders.sort(key=lambda holder: (holder != owner, holder))
        return survivors

    def _obtain(self, iteration: int, source: int, keep: int | None) -> Slot | None:
        """Returns a verified copy of this rank's state, which lies in its slots or is yet to be adopted; None if it
        failed.
        """
        if source == self._rank:
            slot = self._store.read(self._rank, iteration)
            return slot if slot is not None and slot.damaged_block() is None else None
        slot = self._store.receive(self._rank, iteration, keep, self._attempt)
        try:
            self._links[source].fetch(iteration, slot)
        except TransportError:
            slot.abort()
            return None
        return slot

    def _exchange_refusals(self, iteration: int, sources: list[int], *, failed: bool) -> set[tuple[int, int, int]]:
        verdicts = torch.zeros(self._world_size, dtype=torch.int64)
        verdicts[self._rank] = int(failed)
        with waiting_for(self._group, f"the others to obtain iteration {iteration}"):
            dist.all_reduce(verdicts, group=self._group)
        bad = {(sources[owner], owner, iteration) for owner in range(self._world_size) if verdicts[owner]}
        self._refused |= bad
        for holder, owner, _ in bad:
            if holder == self._rank and (slot := self._store.read(owner, iteration)) is not None:
                slot.abort()
        return bad

    def _describe(self, survivors: Survivors, damaged: Sequence[str]) -> str:
        if not survivors:
            return "no complete checkpoint survives on any rank" + _also(damaged)
        newest = max(survivors)
        lost = sorted(set(range(self._world_size)) - set(survivors[newest]))
        ranks = ", ".join(map(str, lost))
        return f"no iteration survives on all ranks: of the newest, {newest}, rank {ranks} has no copy" + _also(damaged)


def _also(damaged: Sequence[str]) -> str:
    return f"; damaged: {', '.join(damaged)}" if damaged else ""
