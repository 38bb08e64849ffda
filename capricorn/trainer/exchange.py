"""How the ranks of a group exchange rows and sums: over the real network, or also through paced links.

Paced links are those modelled in user space. Knows no model and no checkpoint.

Shapes: N rows sent, M rows received, D width of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from capricorn.emulation.route import Route
from capricorn.topology import Topology
from capricorn.units import Bytes, Seconds

COLLECTIVE_TIMEOUT: Final = timedelta(minutes=30)
"""Of groups that are made without another one; torch's own."""
PACE_TIMEOUT_S: Seconds = 120.0
"""Deadline for everything that one all-to-all sends over paced links."""


class Network:
    """One group of ranks, as one of its members sees it."""

    def __init__(self, group: dist.ProcessGroup | None = None, routes: Mapping[int, Route] | None = None) -> None:
        """Without a group there is one rank. `routes` by rank in the group: the paced way to ranks on other nodes."""
        self.group, self._routes = group, dict(routes or {})
        is_alone = group is None
        self.rank, self.size = (0, 1) if is_alone else (dist.get_rank(group), dist.get_world_size(group))
        self._threads = ThreadPoolExecutor(len(self._routes), "capricorn-pace") if self._routes else None

    def all_to_all(self, rows_MD: Tensor, rows_ND: Tensor, receive: Sequence[int], send: Sequence[int]) -> None:
        """Fills `rows_MD` with the rows that each rank sends here, by sender; collective.

        On the CPU all receives are posted before the first send, with which gloo fills a link better than by its own
        all-to-all.

        Args:
            rows_MD: receives the rows.
            rows_ND: the rows to send, by receiver.
            receive: number of rows from each rank; sums to M.
            send: number of rows for each rank; sums to N.
        """
        if rows_ND.device.type != "cpu":
            dist.all_to_all_single(rows_MD, rows_ND, list(receive), list(send), group=self.group)
            return
        parts_in, parts_out = torch.split(rows_MD, list(receive)), torch.split(rows_ND, list(send))
        parts_in[self.rank].copy_(parts_out[self.rank])
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        sizes = {rank: parts_out[rank].nbytes for rank in others}
        works = [dist.irecv(parts_in[rank], group=self.group, group_src=rank) for rank in others if receive[rank]]
        works += [
            dist.isend(parts_out[rank], group=self.group, group_dst=rank) for rank in self._paced(sizes) if send[rank]
        ]
        for work in works:
            if work is not None:
                work.wait()

    def gather(self, row_D: Tensor) -> Tensor:
        """Returns the rows [ranks, D] of all ranks; collective. A ring would wait in every queue on its way."""
        rows_WD = row_D.new_empty(self.size, len(row_D))
        ones = [1] * self.size
        self.all_to_all(rows_WD, row_D.expand_as(rows_WD).contiguous(), ones, ones)
        return rows_WD

    def all_reduce(self, tensor: Tensor) -> None:
        """Sums a tensor over the ranks in place; collective."""
        self._pace_ring(2 * tensor.nbytes * (self.size - 1) // self.size)
        dist.all_reduce(tensor, group=self.group)

    def pace_broadcasts(self, num_bytes: Bytes) -> None:
        """Waits as long as it takes that all ranks together give `num_bytes` to every rank.

        For traffic that other libraries send; without paced links it returns at once.
        """
        self._pace_ring(num_bytes * (self.size - 1) // self.size)

    def _pace_ring(self, num_bytes: Bytes) -> None:
        neighbour = self._routes.get((self.rank + 1) % self.size)
        if neighbour is not None:
            neighbour.pass_through(num_bytes)

    def _paced(self, sizes: Mapping[int, Bytes]) -> Iterator[int]:
        """Yields the ranks, each once everything it is sent would have left; those on this node at once."""
        waits: dict[Future[None], int] = {}
        for rank, num_bytes in sizes.items():
            if rank in self._routes and self._threads is not None and num_bytes:
                waits[self._threads.submit(self._routes[rank].pass_through, num_bytes)] = rank
            else:
                yield rank
        for wait in as_completed(waits, PACE_TIMEOUT_S):
            wait.result()
            yield waits[wait]


class Networks:
    """The groups that one rank is in: all ranks, those that share the experts with it, those with the same experts."""

    def __init__(
        self,
        topology: Topology,
        rank: int,
        routes: Mapping[int, Route] | None = None,
        timeout: timedelta = COLLECTIVE_TIMEOUT,
    ) -> None:
        """Makes the groups below the default group; collective.

        Args:
            topology: the ranks, and which of them share the experts.
            rank: this rank.
            routes: by rank, the paced way to ranks on other nodes.
            timeout: of the collectives in the new groups.
        """
        self._topology, self._timeout = topology, timeout
        self._members = [
            next(ranks for ranks in groups if rank in ranks)
            for groups in (
                [range(topology.world_size)],
                topology.expert_parallel_groups(),
                topology.expert_replica_groups(),
            )
        ]
        groups = self._make_groups()
        self.everyone, self.experts, self.replicas = (
            Network(groups.get(ranks), _routes_in(ranks, routes or {})) for ranks in self._members
        )

    def leave(self) -> None:
        """Lets go of groups that have lost a member."""
        self._use({})

    def rejoin(self) -> None:
        """Makes the groups anew below the default group of now, which has the ranks of the one before; collective."""
        self._use(self._make_groups())

    def _use(self, groups: Mapping[range, dist.ProcessGroup]) -> None:
        for network, ranks in zip((self.everyone, self.experts, self.replicas), self._members, strict=True):
            network.group = groups.get(ranks)

    def _make_groups(self) -> dict[range, dist.ProcessGroup]:
        """Returns the groups by their ranks; every rank has to make all of them, in this order."""
        assert dist.group.WORLD is not None
        groups = {range(self._topology.world_size): dist.group.WORLD}
        replicas = self._topology.expert_replica_groups() if self._topology.num_expert_replicas > 1 else []
        for ranks in (*self._topology.expert_parallel_groups(), *replicas):
            if ranks not in groups:
                groups[ranks] = dist.new_group(list(ranks), timeout=self._timeout)
        return groups


def _routes_in(ranks: range, routes: Mapping[int, Route]) -> dict[int, Route]:
    """Returns the routes to the ranks of a group, by their place in it."""
    return {place: routes[rank] for place, rank in enumerate(ranks) if rank in routes}
