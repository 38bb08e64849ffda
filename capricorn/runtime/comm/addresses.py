"""Addresses of this machine and of others, IPv4 and IPv6 alike, and what is wrong with those that a user names.

Imports no torch, as the launcher asks it before anything starts.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import platform
import socket
from typing import Final

import psutil

from capricorn.config.endpoint import Endpoint, parse_endpoint
from capricorn.config.launch_config import LaunchConfig
from capricorn.errors import ConfigError, note_once
from capricorn.units import Seconds

LOOPBACK: Final = "127.0.0.1"
CONNECT_TIMEOUT_S: Final[Seconds] = 2.0
FAR_AWAY: Final = ("192.0.2.1", "2001:db8::1")
"""Addresses that nobody has, of documents: what leads there leads out."""

_ANY_PORT: Final = 9
"""The port of a datagram that is never sent."""


def family_of(address: str) -> socket.AddressFamily:
    """Returns the family of a numeric address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def resolve(host: str, port: int, what: str) -> list[tuple[socket.AddressFamily, str]]:
    """Returns the addresses of a host, in the order they are to be tried, each with its family.

    Raises:
        ConfigError: it has none; it says what was asked for, as in `--rdzv-endpoint 'node0:29500'`.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{what}: host {host!r} cannot be resolved: {reason}; name it as /etc/hosts does") from None
    return [(family, str(address[0])) for family, _, _, _, address in found]


def own_address(peer: str) -> str:
    """Returns the address of the interface by which this machine reaches `peer`; sends nothing.

    Raises:
        ConfigError: the peer has no address.
        OSError: no interface leads there.
    """
    found = resolve(peer, _ANY_PORT, "the other machines")
    for number, (family, address) in enumerate(found, 1):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, _ANY_PORT))
            except OSError:
                if number == len(found):
                    raise
            else:
                return str(probe.getsockname()[0])
    raise AssertionError("a host that is resolved has an address")


def listening_address(endpoint: Endpoint, what: str) -> str:
    """Returns the address of the endpoint's host at which this machine can listen; port 0 is any that is free.

    Raises:
        ConfigError: there is none; it says what was asked for, and why not.
    """
    reasons: list[str] = []
    for family, address in resolve(endpoint.host, endpoint.port, what):
        try:
            with socket.create_server((address, endpoint.port), family=family):
                return address
        except OSError as error:
            is_foreign = error.errno == errno.EADDRNOTAVAIL
            reasons.append(f"{address} is no address of this machine" if is_foreign else error.strerror or str(error))
    port = " and a free port" if endpoint.port else ""
    raise ConfigError(f"{what} cannot be used here: {reasons[0]}; choose an address of this machine{port}")


def why_no_loopback() -> str:
    """Returns why processes of this machine cannot reach each other over its loopback; nothing if they can."""
    try:
        with (
            socket.create_server((LOOPBACK, 0)) as listener,
            socket.create_connection(listener.getsockname(), CONNECT_TIMEOUT_S),
        ):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def why_no_endpoint(launch: LaunchConfig) -> str:
    """Returns why machines cannot meet at the endpoint that was named, by what this one knows; nothing if they can."""
    try:
        check_endpoint(launch)
    except ConfigError as error:
        return str(error)
    return ""


def check_endpoint(launch: LaunchConfig) -> None:
    """Checks what is known here of where real machines meet; takes a while if its name has to be asked for.

    A name that another machine does not know yet is waited for when it joins: that of a pod is there with the pod.

    Raises:
        ConfigError: in one line: the option, its value, and what is wrong: this is machine 0 and cannot listen there,
            no interface leads there, or there is no such interface.
    """
    if not launch.nnodes:
        return
    if launch.node_rank == 0:
        conductor_address(launch)
        return
    if launch.interface:
        address_on(launch.interface)
    host = parse_endpoint(launch.rdzv_endpoint, "--rdzv-endpoint").host
    try:
        own_address(host)
    except ConfigError:
        return
    except OSError as error:
        what = f"--rdzv-endpoint {launch.rdzv_endpoint!r}"
        raise ConfigError(f"{what} cannot be reached from here: {error.strerror}; look at the network") from None


def conductor_address(launch: LaunchConfig) -> str:
    """Returns the address at which machine 0, which this is, listens for the others.

    A name may stand for the loopback here, as Debian has it, or for a service in front of this machine: the others know
    another address by it. Or it is our own and not known yet. Then it is that of the interface that leads out.

    Raises:
        ConfigError: there is none, or it is taken.
    """
    what = f"--rdzv-endpoint {launch.rdzv_endpoint!r}"
    host, port = endpoint = parse_endpoint(launch.rdzv_endpoint, "--rdzv-endpoint")
    if launch.interface:
        return listening_address(Endpoint(address_on(launch.interface), port), f"--interface {launch.interface!r}")
    if _is_number(host) or host == "localhost":
        return listening_address(endpoint, what)
    try:
        found = resolve(host, port, what)
    except ConfigError:
        if host.partition(".")[0] != platform.node().partition(".")[0]:
            raise
        found = []  # our own name, which the others will know: that of a pod is published after it has started
    known = {address for _, address in found if not ipaddress.ip_address(address).is_loopback}
    own = next(iter(sorted(known & own_addresses().keys())), "") or outward_address(what)
    if known and own not in known:
        note_once(
            f"{what}: {host} is {', '.join(sorted(known))}, and this machine is {own}: right if that is a service in "
            "front of it; if this is not machine 0, give --node-rank"
        )
    return listening_address(Endpoint(own, port), what)


def outward_address(what: str) -> str:
    """Returns the address of the interface that leads out of this machine; sends nothing.

    Raises:
        ConfigError: none does; it says what was asked for.
    """
    for far in FAR_AWAY:
        with contextlib.suppress(OSError):
            return own_address(far)
    raise ConfigError(f"{what}: no interface leads out of this machine; name one: --interface NAME|CIDR")


def own_addresses() -> dict[str, str]:
    """Returns the interface of each address of this machine."""
    found = psutil.net_if_addrs()
    return {each.address.partition("%")[0]: name for name, all_of in found.items() for each in all_of}


def interface_of(address: str) -> str:
    """Returns the interface that has that address; that of the loopback for any other loopback address.

    Raises:
        ConfigError: none has.
    """
    owner = own_addresses().get(address)
    if owner is None and ipaddress.ip_address(address).is_loopback:
        owner = own_addresses().get(LOOPBACK)
    if owner is None:
        raise ConfigError(f"{address} is no address of this machine")
    return owner


def address_on(interface: str) -> str:
    """Returns the first address of an interface, by its name, or within a network, as in 10.0.0.0/16.

    Raises:
        ConfigError: there is none; it lists those that there are.
    """
    try:
        network = ipaddress.ip_network(interface)
    except ValueError:
        network = None
    usable = {
        address: name for address, name in own_addresses().items()
        if _is_number(address) and not ipaddress.ip_address(address).is_link_local
    }  # fmt: skip
    for address, name in usable.items():
        if name == interface or (network is not None and ipaddress.ip_address(address) in network):
            return address
    there = ", ".join(f"{name} {address}" for address, name in usable.items())
    raise ConfigError(f"--interface {interface!r}: this machine has none with an address there; it has {there}")


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
