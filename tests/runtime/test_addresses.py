"""The network that a run needs, looked at before anything starts; and IPv6 where this machine has it."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from capricorn.config.endpoint import Endpoint
from capricorn.config.launch_config import LaunchConfig
from capricorn.errors import ConfigError
from capricorn.runtime.comm.addresses import (
    address_on,
    check_endpoint,
    conductor_address,
    family_of,
    interface_of,
    listening_address,
    own_address,
    why_no_loopback,
)
from capricorn.runtime.comm.idle_signals import IdleSignals
from tests.cli.test_cli import cli
from tests.support.replicas import Pair
from tests.support.runs import PROGRAM, assert_ok, polls, run


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="no ::1 here")


def check(endpoint: str, node_rank: int = 0) -> None:
    launch = LaunchConfig(nnodes=2, node_rank=node_rank, rdzv_endpoint=endpoint)
    check_endpoint(launch)


@pytest.fixture
def port() -> Iterator[int]:
    """A port that is taken on the loopback, of IPv4 and if possible of IPv6."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        if not has_ipv6():
            yield taken
            return
        with socket.create_server(("::1", taken), family=socket.AF_INET6):
            yield taken


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", pytest.param("[::1]", marks=needs_ipv6)])
def test_a_port_that_is_taken_is_named_with_the_option(host: str, port: int) -> None:
    with pytest.raises(ConfigError, match="Address already in use") as raised:
        check(f"{host}:{port}")
    assert f"--rdzv-endpoint '{host}:{port}'" in str(raised.value)


@pytest.mark.parametrize("host", ["192.0.2.7", pytest.param("[2001:db8::7]", marks=needs_ipv6)])
def test_an_address_that_is_not_ours_is_refused_on_machine_0(host: str) -> None:
    with pytest.raises(ConfigError, match="is no address of this machine"):
        check(f"{host}:29500")


def test_a_host_that_nobody_knows_is_refused_on_machine_0_and_waited_for_on_others() -> None:
    with pytest.raises(ConfigError, match=r"--rdzv-endpoint 'no-such-host\.invalid:29500'.* cannot be resolved"):
        check("no-such-host.invalid:29500", 0)
    check("no-such-host.invalid:29500", 1)


def test_machine_0_takes_the_outward_address_where_its_name_means_the_loopback_or_a_service(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("capricorn.runtime.comm.addresses.outward_address", lambda what: "10.0.0.7")
    monkeypatch.setattr("capricorn.runtime.comm.addresses.own_addresses", lambda: {"10.0.0.7": "a", "10.1.0.7": "b"})
    monkeypatch.setattr("capricorn.runtime.comm.addresses.listening_address", lambda endpoint, what: endpoint.host)
    endpoint = LaunchConfig(nnodes=2, rdzv_endpoint="head:29500")
    for addresses, expected in {
        ("127.0.1.1",): "10.0.0.7",
        ("10.96.0.1",): "10.0.0.7",
        ("10.1.0.7", "127.0.1.1"): "10.1.0.7",
    }.items():
        found = [(family_of(address), address) for address in addresses]
        monkeypatch.setattr("capricorn.runtime.comm.addresses.resolve", lambda *_, found=found: found)
        assert conductor_address(endpoint) == expected
        # Another machine whose --node-rank was forgotten would wait for all others, and they for machine 0.
        assert ("if this is not machine 0, give --node-rank" in capsys.readouterr().err) == (
            addresses == ("10.96.0.1",)
        )


def test_machine_0_does_not_wait_for_its_own_name_as_a_pod_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capricorn.runtime.comm.addresses.platform.node", lambda: "job-0")
    monkeypatch.setattr("capricorn.runtime.comm.addresses.outward_address", lambda what: "10.0.0.7")
    monkeypatch.setattr("capricorn.runtime.comm.addresses.listening_address", lambda endpoint, what: endpoint.host)
    assert conductor_address(LaunchConfig(nnodes=2, rdzv_endpoint="job-0.no-such-domain.invalid:29500")) == "10.0.0.7"
    with pytest.raises(ConfigError, match="cannot be resolved"):
        conductor_address(LaunchConfig(nnodes=2, rdzv_endpoint="job-1.no-such-domain.invalid:29500"))


def test_an_interface_is_named_by_its_name_or_by_its_network() -> None:
    assert address_on("lo") in ("127.0.0.1", "::1")
    assert address_on("127.0.0.0/8") == "127.0.0.1"
    assert interface_of("127.0.0.1") == interface_of("127.0.0.103") == "lo"
    with pytest.raises(ConfigError, match=r"198\.51\.100\.7 is no address of this machine"):
        interface_of("198.51.100.7")
    for wrong in ("no-such-interface", "198.51.100.0/24"):
        with pytest.raises(ConfigError, match=rf"--interface '{wrong}': this machine has none .* lo 127\.0\.0\.1"):
            address_on(wrong)


def test_a_bad_endpoint_ends_the_command_with_2_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for endpoint in ("no-such-host.invalid:1", "192.0.2.7:29500", "[::1", "host:99999"):
        options = ("--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", endpoint, "--out", tmp_path)
        assert cli("run", "--model", "mixtral-tiny", "--device", "cpu", *options) == 2
        said = capsys.readouterr().err
        assert len(said.splitlines()) == 1
        assert f"--rdzv-endpoint '{endpoint}'" in said
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("peer", ["127.0.0.1", "localhost", pytest.param("::1", marks=needs_ipv6)])
def test_the_own_address_is_of_the_family_of_the_peer(peer: str) -> None:
    address = own_address(peer)
    assert address in ("127.0.0.1", "::1")
    if peer != "localhost":
        assert family_of(address) == family_of(peer)


def test_an_address_of_a_job_of_ones_own_may_be_a_name_and_must_be_ours() -> None:
    assert listening_address(Endpoint("localhost", 0), "address='localhost'") in ("127.0.0.1", "::1")
    with pytest.raises(ConfigError, match=r"address='192\.0\.2\.7' cannot be used here: 192\.0\.2\.7 is no address"):
        listening_address(Endpoint("192.0.2.7", 0), "address='192.0.2.7'")


@needs_ipv6
def test_replicas_and_idle_signals_pass_over_ipv6(tmp_path: Path) -> None:
    with closing(Pair(tmp_path, address="::1")) as pair:
        pair.replicate(pair.staged(1), 1)
        assert pair.replica(1)
    with closing(IdleSignals(0, "::1", b"secret", 2)) as ours, closing(IdleSignals(1, "::1", b"secret", 2)) as theirs:
        addresses = [ours.address, theirs.address]
        ours.start(addresses, owners=[1], holders=[], on_idle=lambda holder, number: None)
        heard: list[tuple[int, int]] = []
        theirs.start(addresses, owners=[], holders=[0], on_idle=lambda holder, number: heard.append((holder, number)))
        ours.tell(7)
        theirs.ask_time()
        assert any(heard and theirs.offset_s() is not None for _ in polls(5.0))
        assert heard == [(0, 7)]


@needs_ipv6
@pytest.mark.slow
def test_a_real_node_meets_itself_over_ipv6(tmp_path: Path) -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
        port = listener.getsockname()[1]
    where = ("--nnodes", "1", "--node-rank", "0", "--rdzv-endpoint", f"[::1]:{port}")
    assert_ok(run(tmp_path, *where, "--ranks-per-node", "2", "--replicas", "1"))


# --- a loopback that is down


def test_the_loopback_of_this_machine_carries() -> None:
    assert why_no_loopback() == ""


def test_a_loopback_that_is_down_is_refused_at_once_in_one_line(tmp_path: Path) -> None:
    for user in ([], ["--user", "--map-root-user"]):
        apart = ["unshare", *user, "--net"]
        if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode == 0:
            break
    else:
        pytest.skip("no network namespace can be made here")
    for command in (["run", "--iterations", "3", "--warmup", "1"], ["check-system", "none"]):
        options = ["--model", "mixtral-tiny", "--out", str(tmp_path)] if command[0] == "run" else []
        done = subprocess.run(
            [*apart, *PROGRAM, *command, *options], capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
        assert "loopback" in done.stderr
        assert "ip link set lo up" in done.stderr
    assert not any(tmp_path.iterdir())
