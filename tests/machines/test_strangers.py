"""Who may join a run, and that nobody else keeps those away who may: the endpoint of machine 0 is open to a network."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest

from capricorn.config.launch_config import LaunchConfig
from capricorn.errors import ConfigError, TransportError
from capricorn.launch.fork_client import FakeForkServer
from capricorn.machines import door as door_module
from capricorn.machines import follower
from capricorn.machines.conductor import Conductor
from capricorn.machines.control_link import MAX_MESSAGE_BYTES, SECRET, ControlLink, control_identity
from capricorn.machines.control_messages import (
    AskClock,
    ClockReading,
    FileGrew,
    Goodbye,
    Join,
    Welcome,
    conductor_message,
)
from capricorn.machines.door import MAX_TOLD, MAX_UNPROVEN, Arrival, Door
from capricorn.runtime.comm import handshake
from capricorn.runtime.comm.handshake import Identity, greet
from tests.support.machines import free_port

ME = Identity("job", 0, b"secret")
FACTS = {"train.seed": 0, "torch": "2.13"}
PATIENCE_S = 10.0
SHORT_S = 0.6
"""How long a handshake may take here, where one is meant to take too long."""


def eventually(is_so: Callable[[], Any], timeout_s: float = PATIENCE_S) -> bool:
    end_s = time.monotonic() + timeout_s
    while not (found := is_so()) and time.monotonic() < end_s:
        time.sleep(0.005)
    return bool(found)


def is_closed(sock: socket.socket, timeout_s: float = PATIENCE_S) -> bool:
    """Whether the other end closes the connection within that time, whatever it says before."""
    end_s = time.monotonic() + timeout_s
    with contextlib.suppress(ConnectionError):
        while (left_s := end_s - time.monotonic()) > 0:
            sock.settimeout(left_s)
            try:
                if not sock.recv(4096):
                    return True
            except TimeoutError:
                return False
        return False
    return True


class Played:
    """A machine that joins, as far as strangers and mistakes are concerned."""

    def __init__(self, port: int, number: int, me: Identity = ME, **facts: Any) -> None:
        sock = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        greet(sock, me, number, 0)
        self.link = ControlLink(sock)
        self.link.send(Join(machine=number, host="played", address="127.0.0.1", facts=FACTS | facts))

    def hears(self) -> Welcome | Goodbye:
        """What it is told, once machine 0 knows its clock."""
        while True:
            said = conductor_message(self.link.next(PATIENCE_S))
            if isinstance(said, AskClock):
                self.link.send(ClockReading(at_s=time.monotonic()))
            else:
                assert isinstance(said, Welcome | Goodbye)
                return said


@contextlib.contextmanager
def opened(me: Identity = ME) -> Iterator[tuple[Door, int]]:
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    port = listener.getsockname()[1]
    door = Door(listener, me)
    try:
        yield door, port
    finally:
        door.close()


def joins(door: Door, port: int, number: int = 1) -> Arrival:
    """A true machine comes, and is let in."""
    said = list[Join]()
    with contextlib.ExitStack() as stack:

        def come() -> None:
            machine = Played(port, number)
            stack.callback(machine.link.close)
            with contextlib.suppress(TransportError):
                machine.hears()

        thread = threading.Thread(target=come)
        thread.start()
        try:
            assert select.select([door], [], [], PATIENCE_S)[0], "the machine was not let in"
            (arrival,) = door.arrivals()
            said.append(arrival.join)
            arrival.link.close()
        finally:
            thread.join(PATIENCE_S)
    assert said[0].machine == number
    return arrival


# --- at the door


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_TIMEOUT_S", SHORT_S)
    monkeypatch.setattr(door_module, "HANDSHAKE_TIMEOUT_S", SHORT_S)


@pytest.mark.usefixtures("short")
def test_who_says_nothing_is_sent_away_and_holds_up_nobody() -> None:
    with opened() as (door, port), socket.create_connection(("127.0.0.1", port)) as silent:
        begin_s = time.monotonic()
        joins(door, port)
        assert time.monotonic() - begin_s < PATIENCE_S / 2
        assert is_closed(silent)


@pytest.mark.usefixtures("short")
def test_bytes_that_trickle_in_get_no_more_time() -> None:
    with opened() as (door, port), socket.create_connection(("127.0.0.1", port)) as slow:
        begin_s = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - begin_s < PATIENCE_S:
                slow.sendall(b"C")
                time.sleep(SHORT_S / 20)
        assert time.monotonic() - begin_s < 4 * SHORT_S
        joins(door, port)


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n" * 20, os.urandom(4096), b"\0" * 4096])
def test_garbage_is_answered_by_a_closed_connection(garbage: bytes) -> None:
    with opened() as (door, port), socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(garbage)
        assert is_closed(sock)
        assert not door.arrivals()
        joins(door, port)


@pytest.mark.parametrize(
    "other", [Identity("job", 0, b"guess"), Identity("job", 0, b""), Identity("another", 0, b"secret")]
)
def test_another_secret_none_and_another_job_are_sent_away(other: Identity) -> None:
    with opened() as (door, port):
        with pytest.raises(TransportError):
            Played(port, 1, other)
        assert not door.arrivals()
        joins(door, port)


def test_who_knows_no_secret_learns_nothing_but_a_random_number() -> None:
    with opened() as (_, port), socket.create_connection(("127.0.0.1", port), PATIENCE_S) as sock:
        challenge = sock.recv(4096)
        hello = ME.hello(1, 0, os.urandom(16))
        sock.sendall(hello + Identity("job", 0, b"guess").mac(b"owner", challenge, hello))
        assert len(challenge) == 16
        assert sock.recv(4096) == b""


def test_what_a_machine_has_said_before_lets_nobody_in_again() -> None:
    with opened() as (door, port):
        with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as first:
            challenge, hello = first.recv(16), ME.hello(1, 0, os.urandom(16))
            proof = hello + ME.mac(b"owner", challenge, hello)
            first.sendall(proof)
            assert len(first.recv(32)) == 32
        with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as again:
            again.recv(16)
            again.sendall(proof)
            assert again.recv(32) == b""
        assert not door.arrivals()


def test_a_flood_of_silent_connections_keeps_no_machine_away() -> None:
    with opened() as (door, port), contextlib.ExitStack() as stack:
        flood = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(100)]
        joins(door, port)
        assert all(is_closed(sock, 1.0) for sock in flood[: 100 - MAX_UNPROVEN])
        greeting = [each for each in threading.enumerate() if each.name == "capricorn-greet"]
        assert len(greeting) <= MAX_UNPROVEN


def test_strangers_fill_neither_the_terminal_nor_memory_with_what_is_said_of_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with opened() as (door, port):
        for number in range(3 * MAX_TOLD):
            with contextlib.suppress(TransportError):
                Played(port, 1, Identity("job", number, b"guess"))
        joins(door, port)
    assert capsys.readouterr().err.count("turned away") <= MAX_TOLD


def test_a_machine_is_the_one_that_it_has_proved_to_be() -> None:
    with opened() as (door, port):
        sock = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        greet(sock, ME, 1, 0)
        link = ControlLink(sock)
        link.send(Join(machine=2, host="played", address="127.0.0.1", facts={}))
        assert is_closed(sock)
        assert not door.arrivals()
        link.close()


# --- at machine 0


@contextlib.contextmanager
def conducting(nnodes: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Conductor, int]]:
    monkeypatch.setenv(SECRET, "secret")
    port = free_port()
    launch = LaunchConfig.model_validate({"nnodes": nnodes, "rdzv_endpoint": f"127.0.0.1:{port}", "job": "job"})
    with Conductor(launch, FACTS, lambda line: None, forker=FakeForkServer()) as conductor:
        yield conductor, port


def told(conductor: Conductor, machines: Sequence[Played]) -> list[Welcome | Goodbye]:
    """What the machines hear, while machine 0 looks after them."""
    heard: dict[int, Welcome | Goodbye] = {}

    def hear(number: int) -> None:
        heard[number] = machines[number].hears()

    threads = [threading.Thread(target=hear, args=(number,)) for number in range(len(machines))]
    for thread in threads:
        thread.start()
    assert eventually(lambda: conductor.wait([], 0.02) or len(heard) == len(machines))
    for thread in threads:
        thread.join()
    return [heard[number] for number in range(len(machines))]


def is_there(conductor: Conductor, machine: Played) -> bool:
    """Whether machine 0 still has that machine, which hears nothing of what befell others."""
    conductor.wait([], 0.05)
    try:
        return not machine.link.receive()
    except TransportError:
        return False


def test_a_second_machine_of_the_same_number_is_sent_away_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with conducting("2", monkeypatch) as (conductor, port):
        first = Played(port, 1)
        assert told(conductor, [first]) == [Welcome(node=1)]
        (farewell,) = told(conductor, [Played(port, 1)])
        assert isinstance(farewell, Goodbye)
        assert farewell.exit_code == ConfigError.exit_code
        assert "--node-rank 1: machine 1 (played) is there already" in farewell.why
        assert is_there(conductor, first)


def test_more_machines_than_take_part_are_sent_away_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with conducting("2:3", monkeypatch) as (conductor, port):
        node, spare = Played(port, 1), Played(port, 2)
        assert told(conductor, [node, spare]) == [Welcome(node=1), Welcome(node=None)]
        (farewell,) = told(conductor, [Played(port, 3)])
        assert isinstance(farewell, Goodbye)
        assert "3 machines take part; allow more spares by --nnodes 2:MAX" in farewell.why
        assert is_there(conductor, node)


def test_one_that_differs_ends_all_before_all_are_there_and_is_sent_away_alone_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with conducting("2:3", monkeypatch) as (conductor, port):
        node = Played(port, 1)
        assert told(conductor, [node]) == [Welcome(node=1)]
        conductor.gather()
        (farewell,) = told(conductor, [Played(port, 2, torch="2.14")])
        assert isinstance(farewell, Goodbye)
        assert farewell.why.startswith("torch is 2.13 on machine 0 and 2.14 on machine 2")
        assert is_there(conductor, node)
        assert told(conductor, [Played(port, 2)]) == [Welcome(node=None)]
    with (
        conducting("3", monkeypatch) as (conductor, port),
        pytest.raises(ConfigError, match=r"^train\.seed is 0 on machine 0 and 7 on machine 1"),
    ):
        told(conductor, [Played(port, 1, **{"train.seed": 7})])


def test_a_machine_that_sends_what_is_no_message_is_lost_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    too_long = struct.pack("!I", MAX_MESSAGE_BYTES + 1)
    broken = struct.pack("!I", 7) + b"garbage"
    for wrong in (too_long, broken):
        with conducting("3", monkeypatch) as (conductor, port):
            good, bad = Played(port, 1), Played(port, 2)
            assert told(conductor, [good, bad]) == [Welcome(node=1), Welcome(node=2)]
            os.write(bad.link.fileno(), wrong)
            assert eventually(lambda: not is_there(conductor, bad))  # noqa: B023 - called within the loop
            assert is_there(conductor, good)
            assert conductor.address_of(1)
            assert not conductor.address_of(2)


def test_an_announced_size_takes_no_memory_before_it_has_come() -> None:
    ours, theirs = socket.socketpair()
    with contextlib.closing(ControlLink(ours)) as link, theirs:
        theirs.sendall(struct.pack("!I", MAX_MESSAGE_BYTES) + b"x" * 100)
        begin_s = time.monotonic()
        assert link.receive() == link.receive() == []
        assert time.monotonic() - begin_s < 1.0, "nobody waits for what is not there"
        assert len(link._read) < 1000


def test_files_of_no_run_are_written_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    with conducting("2", monkeypatch) as (conductor, port):
        machine = Played(port, 1)
        told(conductor, [machine])
        machine.link.send(FileGrew(name="../../stolen", text="x"))
        assert is_there(conductor, machine)


# --- at a machine that follows


def test_a_false_machine_0_is_found_out_before_it_can_say_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "secret")
    with socket.create_server(("127.0.0.1", 0)) as false:
        port = false.getsockname()[1]

        def answer() -> None:
            sock, _ = false.accept()
            with sock:
                sock.sendall(os.urandom(16))
                sock.recv(4096)
                sock.sendall(os.urandom(32))
                sock.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        launch = LaunchConfig(nnodes=2, node_rank=1, rdzv_endpoint=f"127.0.0.1:{port}", job="job")
        with pytest.raises(ConfigError, match=f"machine 0 of job job is not what answers there .*{SECRET}"):
            follower.connect(launch)
        thread.join(PATIENCE_S)


def test_without_a_secret_whoever_knows_the_name_of_the_job_can_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET, raising=False)
    with opened(control_identity("capricorn")) as (door, port):
        stranger = Played(port, 1, Identity("capricorn", 0, b""))
        thread = threading.Thread(target=stranger.hears)
        thread.start()
        assert select.select([door], [], [], PATIENCE_S)[0]
        (arrival,) = door.arrivals()
        arrival.link.send(Welcome(node=1))
        thread.join(PATIENCE_S)
        assert arrival.join.machine == 1


# --- where the ranks meet, which is torch's


def test_torchs_store_asks_nobody_who_he_is() -> None:
    """Why the documents say: a network of your own. Should this fail, torch has learnt to ask: say so there."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    port = free_port()
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=PATIENCE_S))
    store.set("0/address", "10.0.0.7:4000")
    stranger = (
        "from datetime import timedelta; from torch.distributed import TCPStore; "
        f"store = TCPStore('127.0.0.1', {port}, is_master=False, timeout=timedelta(seconds=10)); "
        "print(store.get('0/address').decode()); store.set('0/address', '192.0.2.1:4000')"
    )
    said = subprocess.run([sys.executable, "-c", stranger], capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout.split() == ["10.0.0.7:4000"]
    assert store.get("0/address") == b"192.0.2.1:4000"
