"""The network of emulated nodes in the kernel. What needs namespaces is skipped where there are none."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from capricorn.emulation import fabric as fabric_module
from capricorn.emulation.fabric import Fabric, FabricError, NamespaceEntry, Shape
from capricorn.emulation.shaping import INTERFACE, burst, node_address, node_links, port, shaping, switch_links
from tests.support.namespaces import ROOT, fabric, has_gone, output, refusal, start

RATE_BYTES_PER_S = 6.25e6
NUM_BYTES = 2_000_000
LOW_TOS = 0x20
MOST_AT_ONCE_BYTES = burst(RATE_BYTES_PER_S) + 65536
"""What an idle end of a link lets through: its burst, and the packet that overdraws it."""


@pytest.fixture(scope="module")
def fifo() -> Iterator[Fabric]:
    with fabric(Shape(2, RATE_BYTES_PER_S, qos=False)) as built:
        yield built


@pytest.fixture(scope="module")
def two_classes() -> Iterator[Fabric]:
    with fabric(Shape(2, RATE_BYTES_PER_S, qos=True)) as built:
        yield built


# --- the scripts -------------------------------------------------------------------------------------------------


def test_addresses_sort_as_text_like_the_nodes() -> None:
    addresses = [node_address(node) for node in range(32)]
    assert sorted(addresses) == addresses


def test_switch_has_a_port_into_the_namespace_of_each_node() -> None:
    script = switch_links([7, 9])
    assert re.findall(r"link add (p\d) .* peer name (\w+) .*fd/(\d)", script) == [
        ("p0", INTERFACE, "7"),
        ("p1", INTERFACE, "9"),
    ]
    assert "address add 10.77.0.99/24 dev br0" in script


def test_node_gets_its_address_and_loopback() -> None:
    assert "address add 10.77.0.103/24 dev eth0" in node_links(3)
    assert "link set lo up" in node_links(3)
    assert "src 10.77.0.103 initcwnd 100" in node_links(3)


@pytest.mark.parametrize("qos", [False, True])
def test_guarantees_of_a_link_add_up_to_its_rate(qos: bool) -> None:
    script = shaping("eth0", 25e6, qos=qos)
    assert sum(map(int, re.findall(r"parent 1:1 classid \S+ htb rate (\d+)bit", script))) == 200_000_000
    assert set(re.findall(r"ceil (\d+)bit", script)) == {"200000000"}


def test_only_qos_has_a_low_class() -> None:
    assert "1:20" not in shaping("eth0", 25e6, qos=False)
    assert "match ip tos 0x20 0xfc flowid 1:20" in shaping("eth0", 25e6, qos=True)


def test_a_slow_link_lets_a_whole_packet_through_at_once() -> None:
    assert f"burst {80 * 1024} cburst {80 * 1024} " in shaping("eth0", 1e6, qos=False)
    assert "burst 1000000 cburst 1000000 " in shaping("eth0", 1e9, qos=False)


# --- reaching ----------------------------------------------------------------------------------------------------


def test_nodes_reach_the_store_at_the_switch(fifo: Fabric) -> None:
    address, number = fifo.listener.getsockname()
    assert output(start(fifo.enter_node(1), "connect", address, str(number))) == "connected"
    fifo.listener.settimeout(10)
    connection, peer = fifo.listener.accept()
    connection.close()
    assert peer[0] == fifo.address(1)


def test_nodes_reach_nothing_outside(fifo: Fabric) -> None:
    assert output(start(fifo.enter_node(0), "connect", "192.0.2.1", "80")) == "Network is unreachable"


def test_loopback_of_a_node_is_its_own(fifo: Fabric) -> None:
    receiver = start(NamespaceEntry(), "receive", "127.0.0.1")
    assert receiver.stdout is not None
    number = receiver.stdout.readline().strip()
    refused = output(start(fifo.enter_node(0), "connect", "127.0.0.1", number))
    receiver.kill()
    receiver.communicate()
    assert refused == "Connection refused"


# --- shaping -----------------------------------------------------------------------------------------------------


def transfer(*flows: tuple[NamespaceEntry, NamespaceEntry, str, int]) -> list[tuple[float, float]]:
    """When each flow (from, to, address, type of service) of `NUM_BYTES` began and ended; they begin together."""
    receivers = [start(target, "receive", address) for _, target, address, _ in flows]
    senders = []
    for receiver, (source, _, address, tos) in zip(receivers, flows, strict=True):
        assert receiver.stdout is not None
        senders.append(start(source, "send", address, receiver.stdout.readline().strip(), str(NUM_BYTES), str(tos)))
    for sender in senders:
        assert sender.stdin is not None
        sender.stdin.write("now\n")
        sender.stdin.flush()
    times = [tuple(map(float, output(sender).split())) for sender in senders]
    for receiver in receivers:
        output(receiver)
    return [(start_s, end_s) for start_s, end_s in times]


def least_seconds(num_bytes: int) -> float:
    return (num_bytes - MOST_AT_ONCE_BYTES) / RATE_BYTES_PER_S


def test_what_a_node_sends_is_not_faster_than_its_link(fifo: Fabric) -> None:
    [(start_s, end_s)] = transfer((fifo.enter_node(0), fifo.enter_switch(), fifo.listener.getsockname()[0], 0))
    assert end_s - start_s >= least_seconds(NUM_BYTES)


def test_what_two_send_to_one_node_is_together_not_faster_than_its_link(fifo: Fabric) -> None:
    # The switch itself is behind no link, so only the port towards the node holds it back.
    target = fifo.enter_node(1)
    times = transfer(*((source, target, fifo.address(1), 0) for source in (fifo.enter_node(0), fifo.enter_switch())))
    assert max(end for _, end in times) - min(start for start, _ in times) >= least_seconds(2 * NUM_BYTES)


def sent_bytes(place: NamespaceEntry, device: str, minor: int) -> int:
    """What has left by a class."""
    shown = output(start(place, "run", "tc", "-s", "class", "show", "dev", device))
    match = re.search(rf"class htb 1:{minor} .*?Sent (\d+) bytes", shown, re.DOTALL)
    return int(match[1]) if match else 0


def test_low_class_is_recognized_at_both_ends_and_gets_what_the_high_one_leaves(two_classes: Fabric) -> None:
    source, target, address = two_classes.enter_node(0), two_classes.enter_node(1), two_classes.address(1)
    low, high = transfer((source, target, address, LOW_TOS), (source, target, address, 0))
    # Both send as much from the same moment: equal shares would end together, and priority at half of the time.
    assert high[1] - high[0] < 0.75 * (low[1] - low[0])
    for place, device in ((source, INTERFACE), (two_classes.enter_switch(), port(1))):
        for minor in (10, 20):
            assert NUM_BYTES <= sent_bytes(place, device, minor) < 1.1 * NUM_BYTES


def test_without_qos_marked_traffic_is_like_any_other(fifo: Fabric) -> None:
    before = sent_bytes(fifo.enter_node(0), INTERFACE, 10)
    transfer((fifo.enter_node(0), fifo.enter_node(1), fifo.address(1), LOW_TOS))
    assert sent_bytes(fifo.enter_node(0), INTERFACE, 10) - before >= NUM_BYTES


# --- entering ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unprivileged", [False, True])
def test_a_module_within_is_run_as_if_it_were_not(unprivileged: bool) -> None:
    with fabric(Shape(1, RATE_BYTES_PER_S, qos=False), unprivileged=unprivileged) as built:
        name, arguments, held = json.loads(output(start(built.enter_node(0), "show", "--to", "a b")))
    assert (name, arguments) == ("__main__", ["show", "--to", "a b"])
    assert not held, "a process that outlives the launcher would keep the network"


def test_descriptors_are_inherited_only_on_request(fifo: Fabric) -> None:
    fds = [fifo.listener.fileno(), *fifo.enter_node(0).pass_fds, *fifo.enter_switch().pass_fds]
    assert not any(map(os.get_inheritable, fds))


def test_entering_needs_nothing_heavy() -> None:
    code = "import capricorn.emulation.inside, sys; print(*sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert not {"torch", "numpy", "pydantic", "subprocess"} & set(printed.split())


# --- ending ------------------------------------------------------------------------------------------------------


def test_closing_twice_is_closing_once() -> None:
    with fabric(Shape(1, RATE_BYTES_PER_S, qos=False)) as built:
        before = set(os.listdir("/proc/self/fd"))
        built.close()
        between = set(os.listdir("/proc/self/fd"))
        built.close()
    assert len(before - between) == 3, "two namespaces and a listener"


LAUNCHER = """
import os, subprocess, sys
from capricorn.emulation.fabric import Fabric, Shape
fabric = Fabric.build(Shape(2, 1e7, True), unprivileged=bool(int(sys.argv[1])))
entry = fabric.enter_node(1)
command = [*entry.prefix, "tests.support.traffic", "receive", fabric.address(1)]
subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=entry.pass_fds).stdout.readline()
places = [fabric.enter_node(0), entry, fabric.enter_switch()]
print(*(os.readlink(f"/proc/self/fd/{place.pass_fds[-1]}") for place in places), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("unprivileged", [False, True])
def test_a_killed_launcher_leaves_no_namespace_and_no_process_in_one(unprivileged: bool) -> None:
    if reason := refusal(unprivileged=unprivileged):
        pytest.skip(reason)
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(int(unprivileged))],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert launcher.stdout is not None
    namespaces = launcher.stdout.readline().split()
    launcher.send_signal(signal.SIGKILL)
    launcher.communicate()
    assert len(namespaces) == 3
    assert all(map(has_gone, namespaces))


# --- failing -----------------------------------------------------------------------------------------------------


@pytest.fixture
def fake_tc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A tc that notes its namespace and then does what is appended; nothing may be left of that namespace."""
    if reason := refusal(unprivileged=False):
        pytest.skip(reason)
    tool, note = tmp_path / "tc", tmp_path / "namespace"
    tool.write_text(f"#!/bin/sh\nreadlink /proc/self/ns/net > {note}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    before = os.listdir("/proc/self/fd")
    yield tool
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert has_gone(note.read_text().strip())


def test_a_failing_build_says_in_one_line_what_failed(fake_tc: Path) -> None:
    with fake_tc.open("a") as script:
        script.write("echo 'Error: Specified qdisc kind is unknown.\nCommand failed -:3' >&2\nexit 1\n")
    with pytest.raises(FabricError, match=r"^cannot .* 2 nodes: tc class add dev p0 .*qdisc kind is unknown\.$"):
        Fabric.build(Shape(2, RATE_BYTES_PER_S, qos=False))


def test_a_build_that_hangs_is_ended(fake_tc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_tc.open("a") as script:
        script.write("exec sleep 60\n")
    monkeypatch.setattr(fabric_module, "BUILD_TIMEOUT_S", 2.0)
    with pytest.raises(FabricError, match=r"not done within 2 s"):
        Fabric.build(Shape(2, RATE_BYTES_PER_S, qos=False))


# --- without privileges ------------------------------------------------------------------------------------------

NOBODY = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]

UNPRIVILEGED = """
import subprocess, sys
from capricorn.emulation.fabric import Fabric, FabricError, Shape
shape = Shape(2, 1e7, True)
try:
    Fabric.build(shape)
except FabricError as error:
    print(error)
fabric = Fabric.build(shape, unprivileged=True)
entry, (address, port) = fabric.enter_node(1), fabric.listener.getsockname()
command = [*entry.prefix, "tests.support.traffic", "connect", address, str(port)]
print(subprocess.run(command, pass_fds=entry.pass_fds, capture_output=True, text=True).stdout)
fabric.close()
"""


def python_of_nobody() -> str:
    """A Python that an unprivileged user can run with our package; the one of the tests may lie in root's home."""
    code = "import subprocess, sys, capricorn.emulation.fabric; sys.exit(subprocess.call([sys.executable, '-c', '']))"
    for path in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        done = subprocess.run([*NOBODY, path, "-c", code], cwd=ROOT, capture_output=True, check=False)
        if done.returncode == 0:
            return path
    pytest.skip("no Python here that an unprivileged user can run this with")


def test_an_unprivileged_user_builds_a_network_in_a_user_namespace() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user; the other tests run unprivileged then")
    if subprocess.run([*NOBODY, "unshare", "--user", "--net", "true"], capture_output=True, check=False).returncode:
        pytest.skip("the kernel gives user namespaces to root alone")
    command, env = [*NOBODY, python_of_nobody(), "-c", UNPRIVILEGED], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    refused, reached = done.stdout.split("\n", 1)
    assert "a network namespace: Operation not permitted" in refused
    assert reached.strip() == "connected"
