"""What launcher, node agents and ranks say to each other arrives as it was said."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from capricorn.config.fields import FrozenModel
from capricorn.launch.launch_messages import (
    MAX_MESSAGE_BYTES,
    AttemptLeft,
    Forked,
    ForkRequest,
    ForkServerReady,
    NodeAlive,
    RankEnded,
    RankFrozen,
    RunNodeAgent,
    ServeRendezvous,
    StartAttempt,
    TrainingBegan,
    node_report,
    rank_report,
    receive,
    to_bytes,
)

AGENT = RunNodeAgent(job_file=Path("/run/job.json"), node=1, endpoint=("10.0.0.1", 7), interface="lo", system="none")
REPORTS = [NodeAlive(), RankFrozen(rank=1, attempt=2, silent_s=2.5), RankEnded(rank=0, attempt=3, exit_code=-9)]


@pytest.fixture
def link() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        yield one, other


@pytest.mark.parametrize("report", REPORTS)
def test_a_report_is_read_as_what_it_is(report: FrozenModel) -> None:
    assert node_report(to_bytes(report)) == report


@pytest.mark.parametrize("report", [TrainingBegan(attempt=1), AttemptLeft(attempt=1)])
def test_what_a_rank_says_is_read_as_what_it_is(report: FrozenModel) -> None:
    assert rank_report(to_bytes(report)) == report


@pytest.mark.parametrize(
    "message",
    [
        ForkServerReady(),
        Forked(pid=7),
        StartAttempt(attempt=0),
        ForkRequest(become=AGENT, num_namespaces=2, log=Path("log")),
        ForkRequest(become=ServeRendezvous(), num_namespaces=0, log=Path("log")),
    ],
)
def test_all_else_is_read_by_whoever_expects_it(message: FrozenModel) -> None:
    assert type(message).model_validate_json(to_bytes(message)) == message


@pytest.mark.parametrize("garbage", [b"{}", b'{"says": "hello"}', b'{"says": "ended"}', b"\x80\x04", b"[]"])
def test_a_report_of_unknown_shape_is_refused(garbage: bytes) -> None:
    with pytest.raises(ValidationError):
        node_report(garbage)


def test_the_longest_paths_fit_in_a_message() -> None:
    path = Path("/" + "/".join(["ä" * 100] * 20))
    request = ForkRequest(become=AGENT.model_copy(update={"job_file": path}), num_namespaces=2, log=path)
    assert len(to_bytes(request)) < MAX_MESSAGE_BYTES


def test_messages_that_wait_keep_their_bounds(link: tuple[socket.socket, socket.socket]) -> None:
    for report in REPORTS:
        link[0].send(to_bytes(report))
    assert [node_report(receive(link[1])) for _ in REPORTS] == REPORTS


@pytest.mark.parametrize("has_unread", [False, True])
def test_the_end_of_the_other_side_is_an_empty_message(
    has_unread: bool, link: tuple[socket.socket, socket.socket]
) -> None:
    if has_unread:  # the kernel then reports a reset
        link[0].send(to_bytes(NodeAlive()))
    link[1].close()
    assert receive(link[0]) == b""
