"""The scripts for ip and tc that make a switch, nodes around it, and links of a rate. Pure text; runs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from capricorn.units import KIB, Bytes, BytesPerSecond, Seconds

INTERFACE: Final = "eth0"
BRIDGE: Final = "br0"
SWITCH_ADDRESS: Final = "10.77.0.99"

_SUBNET: Final = "10.77.0.0/24"
_MTU: Final = 9000
_MIN_BURST_BYTES: Final = 80 * KIB
"""A packet of 64 KiB goes through in one piece; with less the kernel cuts it up, at several times the CPU time."""
_BURST_S: Seconds = 0.001
_QUEUE_S: Seconds = 0.5
"""So long that hardly anything is dropped: senders are slowed by their window, not by loss."""
_WINDOW_PACKETS: Final = 100
"""Where a connection's window starts, also after a pause. From TCP's own 10 one that joins another on a full link stays
at a third of its share: each may queue two packets at a time, and the smaller the window the smaller they are.
"""
_LOW_FRAC: Final = 0.01
"""The guarantee of the low class, so that its connections never starve to death."""


def node_address(node: int) -> str:
    """Returns a node's address; torchrun sorts nodes by it as text, so all have three digits at the end."""
    return f"10.77.0.{100 + node}"


def port(node: int) -> str:
    """Returns the name of the switch's end of a node's link."""
    return f"p{node}"


def burst(bytes_per_s: BytesPerSecond) -> Bytes:
    """Returns how many bytes one end of an idle link lets through at once."""
    return max(_MIN_BURST_BYTES, round(_BURST_S * bytes_per_s))


def switch_links(node_fds: Sequence[int]) -> str:
    """Returns the script for ip within the switch: the bridge, and a link into each node's namespace, by descriptor."""
    lines = [
        "link set lo up",
        f"link add {BRIDGE} mtu {_MTU} type bridge stp_state 0 mcast_snooping 0",
        f"address add {SWITCH_ADDRESS}/24 dev {BRIDGE}",
        f"link set {BRIDGE} up",
    ]
    for node, fd in enumerate(node_fds):
        peer = f"peer name {INTERFACE} mtu {_MTU} netns /proc/self/fd/{fd}"
        lines += [
            f"link add {port(node)} mtu {_MTU} type veth {peer}",
            f"link set {port(node)} master {BRIDGE} up",
        ]
    return _script(lines)


def node_links(node: int) -> str:
    """Returns the script for ip within a node: its address, and its end of the link that the switch has made."""
    window = f"initcwnd {_WINDOW_PACKETS} initrwnd {_WINDOW_PACKETS}"
    return _script(
        [
            "link set lo up",
            f"address add {node_address(node)}/24 dev {INTERFACE}",
            f"link set {INTERFACE} up",
            f"route replace {_SUBNET} dev {INTERFACE} src {node_address(node)} {window}",
        ]
    )


def shaping(device: str, bytes_per_s: BytesPerSecond, *, qos: bool) -> str:
    """Returns the script for tc by which all leaves `device` at this rate, in order; with `qos` DSCP CS1 goes last.

    Bare acknowledgements of TCP go first: on a fast link they wait microseconds behind data, and here milliseconds,
    which would hold back every sender with a small buffer.
    """
    queue = f"bfifo limit {round(_QUEUE_S * bytes_per_s) + 2 * burst(bytes_per_s)}"
    marked = ["protocol ip prio 2 u32 match ip tos 0x20 0xfc flowid 1:20"] if qos else []
    filters = ["protocol ip prio 1 u32 match u16 0 0xffc0 at 2 flowid 1:5", *marked]
    lines = [
        f"qdisc add dev {device} root handle 1: htb default 10",
        *(f"class add dev {device} {each}" for each in _classes(bytes_per_s, qos=qos)),
        *(f"qdisc add dev {device} parent 1:{minor} handle {minor}: {queue}" for minor in _leaves(qos=qos)),
        *(f"filter add dev {device} parent 1: {each}" for each in filters),
    ]
    return _script(lines)


def slowing(device: str, bytes_per_s: BytesPerSecond, *, qos: bool) -> str:
    """Returns the script for tc that gives a shaped device this rate; what waits in its queues stays there."""
    return _script([f"class change dev {device} {each}" for each in _classes(bytes_per_s, qos=qos)])


def cutting(device: str) -> str:
    """Returns the script for tc after which nothing leaves by a device."""
    return _script([f"qdisc replace dev {device} root handle 2: bfifo limit 1"])


def mending(device: str, bytes_per_s: BytesPerSecond, *, qos: bool) -> str:
    """Returns the script for tc that shapes a device that was cut, or slow, as at first."""
    return _script([f"qdisc del dev {device} root"]) + shaping(device, bytes_per_s, qos=qos)


def _leaves(*, qos: bool) -> list[int]:
    return [5, 10, 20] if qos else [5, 10]


def _classes(bytes_per_s: BytesPerSecond, *, qos: bool) -> list[str]:
    """Returns the class of the link, and below it those of acknowledgements, all else, and what is marked."""
    rate = round(8 * bytes_per_s)
    low, acks = (round(_LOW_FRAC * rate) if qos else 0), round(_LOW_FRAC * rate)
    bucket = f"burst {burst(bytes_per_s)} cburst {burst(bytes_per_s)} quantum 65536"
    # The guarantees add up to the rate: a class within its own is not held back by what the link has sent.
    shares = {5: (acks, 0), 10: (rate - low - acks, 1), 20: (low, 7)}
    limits = {minor: f"rate {shares[minor][0]}bit ceil {rate}bit prio {shares[minor][1]}" for minor in _leaves(qos=qos)}
    return [
        f"parent 1: classid 1:1 htb rate {rate}bit ceil {rate}bit {bucket}",
        *(f"parent 1:1 classid 1:{minor} htb {limit} {bucket}" for minor, limit in limits.items()),
    ]


def _script(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
