"""Addresses of this machine and of others, IPv4 and IPv6 alike, and what is wrong with those that a user names.

Imports no torch, as the launcher asks it before anything starts.
"""

from __future__ import annotations

import errno
import socket
from typing import Final

from capricorn.config.endpoint import Endpoint, parse_endpoint
from capricorn.config.scenario import LaunchConfig
from capricorn.errors import ConfigError
from capricorn.units import Seconds

LOOPBACK: Final = "127.0.0.1"
CONNECT_TIMEOUT_S: Final[Seconds] = 2.0

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
    """Checks the endpoint that real machines meet at; takes a while if its name has to be asked for.

    Raises:
        ConfigError: in one line: the option, its value, and what is wrong: its host has no address, no interface leads
            there, or this is machine 0 and cannot listen there.
    """
    if not launch.nnodes:
        return
    what = f"--rdzv-endpoint {launch.rdzv_endpoint!r}"
    endpoint = parse_endpoint(launch.rdzv_endpoint, "--rdzv-endpoint")
    if launch.node_rank == 0:
        listening_address(endpoint, what)
        return
    resolve(endpoint.host, endpoint.port, what)
    try:
        own_address(endpoint.host)
    except OSError as error:
        raise ConfigError(f"{what} cannot be reached from here: {error.strerror}; look at the network") from None
