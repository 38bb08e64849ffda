"""Addresses of nodes, real and emulated."""

from __future__ import annotations

import socket


def loopback_address(node: int) -> str:
    """An emulated node's own address; torchrun sorts nodes by it as text, so all have three digits at the end."""
    return f"127.0.0.{100 + node}"


def own_address(peer: str) -> str:
    """The address of the interface by which this machine reaches `peer`; sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])
