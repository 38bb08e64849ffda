"""Rows between ranks: what is exchanged, over real sockets and through paced links."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from capricorn.emulation.route import Links
from capricorn.trainer.exchange import Network
from tests.support.booked import high_bytes
from tests.support.spawn import run_ranks

SENT = [[2, 0, 3], [1, 1, 0], [0, 4, 2]]
"""By sender: rows for each rank."""


def network(links: Path | None, rank: int, num_ranks: int) -> Network:
    if links is None:
        return Network(dist.group.WORLD)
    return Network(dist.group.WORLD, Links(links).routes(rank, range(num_ranks)))


def exchange(rank: int, num_ranks: int, links: Path | None) -> tuple[torch.Tensor, torch.Tensor, float]:
    """What a rank gets: rows marked by sender and number, the ranks' names, and a sum."""
    net = network(links, rank, num_ranks)
    send, receive = SENT[rank], [row[rank] for row in SENT]
    rows = torch.tensor([[rank, number, 0.5] for number in range(sum(send))]).view(-1, 3)
    received = torch.full((sum(receive), 3), -1.0)
    net.all_to_all(received, rows, receive, send)
    total = torch.tensor([1.0 + rank])
    net.all_reduce(total)
    net.pace_broadcasts(1000)
    return received, net.gather(torch.tensor([rank, rank + 10])), float(total)


@pytest.mark.parametrize("is_paced", [False, True])
def test_each_rank_gets_its_rows_by_sender_also_where_some_send_none(is_paced: bool, tmp_path: Path) -> None:
    links = tmp_path / "links" if is_paced else None
    if links:
        Links.create(links, 3, 1e6).close()
    for rank, (received, gathered, total) in enumerate(run_ranks(exchange, 3, links)):
        expected = []
        for sender, send in enumerate(SENT):
            first = sum(send[:rank])
            expected += [[sender, number, 0.5] for number in range(first, first + send[rank])]
        assert received.tolist() == expected
        assert gathered.tolist() == [[peer, peer + 10] for peer in range(3)]
        assert total == 6.0


def booked(rank: int, num_ranks: int, links: Path) -> None:
    net = network(links, rank, num_ranks)
    rows = torch.zeros(3 * 1000, 4)
    net.all_to_all(torch.empty_like(rows), rows, [1000] * 3, [1000] * 3)


def test_what_leaves_a_node_is_booked_on_its_link_and_on_that_of_the_receiver(tmp_path: Path) -> None:
    links = Links.create(tmp_path / "links", 3, 1e7)
    run_ranks(booked, 3, tmp_path / "links")
    moved = {name: high_bytes(link) for name, link in links._links.items()}
    assert moved == dict.fromkeys(moved, 2 * 1000 * 4 * 4)
    links.close()


def alone(rank: int, num_ranks: int) -> bool:
    net = Network()
    rows = torch.arange(6.0).view(3, 2)
    received = torch.empty_like(rows)
    net.all_to_all(received, rows, [3], [3])
    return torch.equal(received, rows) and net.gather(torch.tensor([5])).tolist() == [[5]]


def test_a_single_rank_needs_no_group() -> None:
    assert alone(0, 1)


def lost_peer(rank: int, num_ranks: int) -> str:
    net = Network(dist.group.WORLD)
    net.all_reduce(torch.zeros(1))
    if rank == 1:
        return "gone"
    rows = torch.zeros(2, 4)
    try:
        net.all_to_all(torch.empty_like(rows), rows, [1, 1], [1, 1])
    except RuntimeError as error:
        return str(error)
    return "nothing was noticed"


def test_a_peer_that_goes_away_is_an_error_and_not_a_wait_without_end() -> None:
    told, _ = run_ranks(lost_peer, 2)
    assert "nothing" not in told
    assert told != "gone"
