"""Links in user space: no more than the rate, fair among equals, and the low class in nobody's way."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import count, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capricorn.emulation.paced_link import BURST_S, Link
from capricorn.emulation.route import QUANTUM_BYTES, Links, Route
from capricorn.errors import TransportError
from tests.support.booked import high_bytes, low_bytes
from tests.support.mounts import tmpfs
from tests.support.virtual import VirtualTime

RATE = 25e6
QUANTUM_S = QUANTUM_BYTES / RATE
HOLD_LOCK = """
import sys, time
from pathlib import Path
from capricorn.emulation.paced_link import Link

def hang():
    print("locked", flush=True)
    time.sleep(600)

Link(Path(sys.argv[1]), clock=hang).reserve(1)
"""
BOOK = """
import sys
from pathlib import Path
from capricorn.emulation.paced_link import Link

link = Link(Path(sys.argv[1]))
for _ in range(int(sys.argv[2])):
    link.reserve(1)
    print(end=".", flush=True)
"""


class Net:
    """Links of one rate in virtual time, by name."""

    def __init__(self, folder: Path) -> None:
        self.time = VirtualTime()
        self._folder, self._links = folder, dict[str, Link]()

    def link(self, name: str = "link") -> Link:
        if name not in self._links:
            path = self._folder / name
            Link.create(path, RATE).close()
            self._links[name] = self.reopen(path)
        return self._links[name]

    def reopen(self, path: Path) -> Link:
        return Link(path, clock=self.time.clock, sleep=self.time.sleep)

    def route(self, *names: str) -> Route:
        return Route([self.link(name) for name in names])

    def pass_all(self, *flows: tuple[Route, int]) -> list[float]:
        """How long each takes when all begin at once, on links that have no burst to give to the first."""
        for link in self._links.values():
            link.reserve(round(BURST_S * RATE))
        start, took = self.time.now, [0.0] * len(flows)

        def flow(index: int, route: Route, num_bytes: int) -> None:
            route.pass_through(num_bytes)
            took[index] = self.time.now - start

        self.time.run(*(lambda index=index, args=args: flow(index, *args) for index, args in enumerate(flows)))
        return took

    def close(self) -> None:
        for link in self._links.values():
            link.close()


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Net]:
    net = Net(tmp_path)
    yield net
    net.close()


numbers = count()
gaps = st.one_of(st.just(0.0), st.floats(0.0, 0.05))
sizes = st.integers(1, 10 * QUANTUM_BYTES)
bookings = st.lists(st.tuples(gaps, sizes, st.booleans()), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(bookings)
def test_the_rate_is_kept_for_any_sequence_of_sizes(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[float, int, bool]]
) -> None:
    net = Net(tmp_path_factory.getbasetemp() / f"rate{next(numbers)}")
    net._folder.mkdir()
    link, free_at, booked = net.link(), 0.0, []
    for gap_s, num_bytes, low in steps:
        net.time.now += gap_s
        finish = link.reserve(num_bytes, low=low)
        if low:
            assert free_at <= net.time.now
        free_at = max(net.time.now - BURST_S, free_at) + num_bytes / RATE
        assert finish == free_at
        booked.append((net.time.now, num_bytes, finish))
    for first, (start, _, _) in enumerate(booked):
        total = 0
        for _, num_bytes, finish in booked[first:]:
            total += num_bytes
            assert total <= RATE * (finish - start + BURST_S) + 1  # byte, of rounding
    assert high_bytes(link) == sum(num_bytes for _, num_bytes, low in steps if not low)
    assert low_bytes(link) == sum(num_bytes for _, num_bytes, low in steps if low)
    net.close()


@pytest.mark.parametrize("low", [False, True])
def test_a_transfer_takes_its_bytes_over_the_rate_less_the_burst(net: Net, low: bool) -> None:
    num_bytes = 100 * QUANTUM_BYTES + 17
    start = net.time.now
    net.route("out", "in").pass_through(num_bytes, low=low)
    assert net.time.now - start == pytest.approx(num_bytes / RATE - BURST_S)


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("num_bytes", [0, 1, QUANTUM_BYTES, 20 * QUANTUM_BYTES + 5])
def test_each_piece_of_a_payload_is_given_out_when_it_has_left(net: Net, num_bytes: int, low: bool) -> None:
    payload, start, got = os.urandom(num_bytes), net.time.now, bytearray()
    for piece in net.route("out", "in").pieces(memoryview(payload), low=low):
        got += piece
        assert net.time.now == pytest.approx(max(start, start + len(got) / RATE - BURST_S))
    assert got == payload


def test_a_link_that_was_idle_for_long_lets_no_more_than_the_burst_through_at_once(net: Net) -> None:
    link = net.link()
    net.time.now += 3600
    at_once = 0
    while link.reserve(1000) <= net.time.now:
        at_once += 1000
    assert at_once == pytest.approx(BURST_S * RATE, abs=1000)


def test_two_flows_that_share_a_link_get_half_each(net: Net) -> None:
    short, long = net.pass_all((net.route("out0", "in1"), 4 << 20), (net.route("out0", "in2"), 12 << 20))
    assert short == pytest.approx((8 << 20) / RATE, abs=3 * QUANTUM_S)
    assert long == pytest.approx((16 << 20) / RATE)


def test_three_senders_to_one_node_get_a_third_each(net: Net) -> None:
    took = net.pass_all(*((net.route(f"out{node}", "in3"), 4 << 20) for node in range(3)))
    assert took == pytest.approx([(12 << 20) / RATE] * 3, abs=5 * QUANTUM_S)


def test_a_flow_takes_what_another_one_that_is_held_up_elsewhere_leaves(net: Net) -> None:
    held_up = [(net.route(f"out{node}", "in3"), 4 << 20) for node in range(3)]
    free = net.route("out0", "in1"), 8 << 20  # out of the same node as one that gets a third at its receiver
    assert net.pass_all(free, *held_up) == pytest.approx([(12 << 20) / RATE] * 4, abs=8 * QUANTUM_S)


def test_flows_between_other_nodes_or_the_other_way_are_not_in_the_way(net: Net) -> None:
    ways = [("out0", "in1"), ("out1", "in0"), ("out2", "in3"), ("out3", "in2")]
    took = net.pass_all(*((net.route(*way), 1 << 20) for way in ways))
    assert took == pytest.approx([(1 << 20) / RATE] * 4)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(gaps, sizes), min_size=1, max_size=12))
def test_the_low_class_delays_no_transfer_by_more_than_a_quantum_and_gets_all_that_is_left(
    tmp_path_factory: pytest.TempPathFactory, transfers: list[tuple[float, int]]
) -> None:
    net = Net(tmp_path_factory.getbasetemp() / f"low{next(numbers)}")
    net._folder.mkdir()
    ended, start = threading.Event(), net.time.now

    def high() -> None:
        for gap_s, num_bytes in transfers:
            net.time.sleep(gap_s)
            begun = net.time.now
            net.route("out0", "in1").pass_through(num_bytes)
            assert net.time.now - begun <= num_bytes / RATE + QUANTUM_S + 1e-9
        ended.set()

    def low() -> None:
        while not ended.is_set():
            net.route("out0", "in2").pass_through(QUANTUM_BYTES, low=True)

    net.time.run(high, low, low)
    link = net.link("out0")
    assert high_bytes(link) == sum(num_bytes for _, num_bytes in transfers)
    moved_s = (high_bytes(link) + low_bytes(link)) / RATE
    assert moved_s == pytest.approx(net.time.now - start + BURST_S, abs=2 * QUANTUM_S)
    net.close()


def test_a_low_class_transfer_is_not_accepted_by_a_busy_receiver(net: Net) -> None:
    busy_until = net.link("in1").reserve(1 << 20)
    start = net.time.now
    net.route("out0", "in1").pass_through(QUANTUM_BYTES, low=True)
    assert net.time.now == pytest.approx(busy_until + QUANTUM_S)
    assert net.time.now > start


def test_what_has_left_of_the_low_class_is_given_out_though_its_next_quantum_must_wait(net: Net) -> None:
    link, route = net.link(), net.route("link")
    start = link.reserve(round(BURST_S * RATE))
    given_out: list[float] = []

    def low() -> None:
        given_out.extend(net.time.now for _ in route.pieces(memoryview(bytes(2 * QUANTUM_BYTES)), low=True))

    net.time.run(low, lambda: link.reserve(1 << 20))
    assert given_out == pytest.approx([start + QUANTUM_S, start + 2 * QUANTUM_S + (1 << 20) / RATE])


def test_a_reopened_link_goes_on_from_the_same_clock(net: Net) -> None:
    link = net.link()
    first = link.reserve(1 << 20)
    link.close()
    again = net.reopen(link.path)
    assert again.reserve(1 << 20) == first + (1 << 20) / RATE
    assert (high_bytes(again), low_bytes(again)) == (2 << 20, 0)
    again.close()


def test_threads_exclude_each_other(net: Net) -> None:
    def clock() -> float:
        time.sleep(0)  # lets another thread run, between what is read from the link and what is stored
        return 1000.0

    path = net.link().path
    one, other = Link(path, clock=clock), Link(path, clock=clock)
    finishes: list[float] = []

    def book(link: Link) -> None:
        finishes.extend([link.reserve(1000) for _ in range(300)])

    threads = [threading.Thread(target=book, args=(link,)) for link in (one, one, other, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert high_bytes(one) == 1200 * 1000
    assert [after - before for before, after in pairwise(sorted(finishes))] == pytest.approx([1000 / RATE] * 1199)
    one.close()
    other.close()


def test_processes_exclude_each_other_and_one_that_is_killed_takes_nothing_with_it(net: Net) -> None:
    link = net.link()

    def start(num_bookings: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", BOOK, str(link.path), str(num_bookings)]
        return subprocess.Popen(command, stdout=subprocess.PIPE)

    diligent, victim = [start(1000), start(1000)], start(1 << 30)
    assert victim.stdout is not None
    try:
        victim.stdout.read(100)
    finally:
        victim.kill()
    told = 100 + len(victim.stdout.read())
    victim.wait()
    for process in diligent:
        process.communicate()
        assert process.returncode == 0
    assert 2000 + told <= high_bytes(link) <= 2000 + told + 1  # it may have booked one that it could not tell of


def test_a_killed_holder_of_the_lock_blocks_nobody(net: Net) -> None:
    link = net.link()
    command = [sys.executable, "-c", HOLD_LOCK, str(link.path)]
    waiting = threading.Thread(target=link.reserve, args=(1000,))
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"locked\n"
            waiting.start()
            waiting.join(0.1)
            assert waiting.is_alive()
            assert high_bytes(link) == 0
        finally:
            holder.kill()
    waiting.join(60)
    assert not waiting.is_alive()
    assert high_bytes(link) == 1000


def test_closing_a_link_ends_the_wait_of_the_low_class(net: Net) -> None:
    link = net.link()
    link.reserve(1 << 30)

    def wait() -> None:
        with pytest.raises(TransportError, match="is closed"):
            link.reserve(1, low=True)

    net.time.run(wait, link.close)


def test_in_real_time_a_transfer_is_no_faster_than_the_rate(tmp_path: Path) -> None:
    link = Link.create(tmp_path / "link", RATE)
    start = time.monotonic()
    Route([link]).pass_through(20 * QUANTUM_BYTES)
    assert time.monotonic() - start >= 20 * QUANTUM_S - BURST_S
    link.close()


def test_the_links_of_a_cluster_lead_from_each_node_to_each_other(tmp_path: Path) -> None:
    Links.create(tmp_path / "links", 3, RATE).close()
    links = Links(tmp_path / "links")
    route = links.route(2, 0)
    assert route is not None
    route.pass_through(1000)
    assert links.route(1, 1) is None
    links.close()
    used = [path.name for path in (tmp_path / "links").iterdir() if high_bytes(Link(path))]
    assert sorted(used) == ["in0", "out2"]


def test_a_link_is_its_users_alone_and_made_once(net: Net) -> None:
    path = net.link().path
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(TransportError, match="cannot make the link"):
        Link.create(path, RATE)


def test_a_link_for_which_there_is_no_room_is_an_error() -> None:
    with tmpfs("16k") as folder:
        (folder / "other").write_bytes(bytes(16 << 10))
        with pytest.raises(TransportError, match="No space left"):
            Link.create(folder / "link", RATE)


def test_what_is_not_a_link_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("something else, and long enough to be a link")
    with pytest.raises(TransportError, match="is not a link"):
        Link(tmp_path / "text")
    with pytest.raises(TransportError, match="cannot open the link"):
        Link(tmp_path / "nothing")
    with pytest.raises(TransportError, match="there are no links"):
        Links(tmp_path)


# --- links that fail


def test_a_link_that_is_slowed_down_is_slow_for_all_who_have_it_open_until_it_is_good_again(net: Net) -> None:
    link, other = net.link(), net.reopen(net.link().path)
    link.reserve(round(BURST_S * RATE))
    other.slow_down(1 / 20)
    before = net.time.now
    assert link.reserve(1000) - before == pytest.approx(20 * 1000 / RATE)
    other.slow_down(1.0)
    assert link.reserve(1000) - link.reserve(0) == 0.0
    assert link.reserve(1000) - before == pytest.approx(22 * 1000 / RATE)
    assert link.bytes_per_s == RATE, "what it was made with"
    other.close()


def test_nothing_leaves_a_held_link_until_the_time_is_over_or_it_is_let_go(net: Net) -> None:
    link, start = net.link(), net.time.now
    link.hold(5.0)
    assert link.reserve(1000) >= start + 5.0
    link.hold(0.0)
    assert link.reserve(1000) < start + 1.0
