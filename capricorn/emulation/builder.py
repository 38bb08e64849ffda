"""Builds the network of a fabric in a process of its own, hands its descriptors to the launcher, and ends.

Must name nothing and write nothing: what has only descriptors goes away with whoever holds them.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from capricorn.emulation.fabric import BUILT, FabricError, Shape
from capricorn.emulation.namespaces import enter, new_net, new_user
from capricorn.emulation.shaping import INTERFACE, SWITCH_ADDRESS, node_links, port, shaping, switch_links
from capricorn.process import die_with_parent
from capricorn.units import Seconds

BACKLOG: Final = 256
TOOL_TIMEOUT_S: Final[Seconds] = 15.0
"""For all lines of a script together."""
FAIR: Final = ("cubic", "reno")
"""Congestion control by which senders on one link get equal shares; Linux has it by default."""


def main() -> None:
    """Sends the descriptors of the request argv[3] over the socket argv[2], or else one line that says what failed.

    argv[1] is the parent.
    """
    parent = int(sys.argv[1])
    die_with_parent(parent)
    channel = socket.socket(fileno=int(sys.argv[2]))
    request = json.loads(sys.argv[3])
    try:
        user = [new_user()] if request["unprivileged"] else []
        die_with_parent(parent)  # once more, as a new user namespace undoes it
        fds = [*user, *_build(Shape(**request["shape"]))]
    except OSError as error:
        channel.send(": ".join(filter(None, [error.filename, error.strerror])).encode())
    except FabricError as error:
        channel.send(str(error).encode())
    else:
        socket.send_fds(channel, [BUILT], fds)


def _build(shape: Shape) -> list[int]:
    """Returns the descriptors of the switch, the nodes, and a listening socket."""
    switch, *nodes = [_new_place() for _ in range(1 + shape.num_nodes)]
    enter(switch)
    run_batch("ip", switch_links(nodes), nodes)
    run_batch("tc", "".join(shaping(port(node), shape.bytes_per_s, qos=shape.qos) for node in range(shape.num_nodes)))
    listener = socket.create_server((SWITCH_ADDRESS, 0), backlog=BACKLOG)
    for node, fd in enumerate(nodes):
        enter(fd)
        run_batch("ip", node_links(node))
        run_batch("tc", shaping(INTERFACE, shape.bytes_per_s, qos=shape.qos))
    return [switch, *nodes, listener.detach()]


def _new_place() -> int:
    """Returns the descriptor of a network namespace that behaves alike on all machines."""
    fd = new_net()
    sysctl = Path("/proc/sys/net")
    # A new namespace takes over the host's; of two senders on one link BBR lets the first keep most of it.
    control = sysctl / "ipv4/tcp_congestion_control"
    if control.read_text(encoding="ascii").strip() not in FAIR:
        control.write_text("reno", encoding="ascii")
    # An interface with one address leaves nothing to choose and is silent while nobody sends; not all kernels have it.
    with contextlib.suppress(OSError):
        (sysctl / "ipv6/conf/default/disable_ipv6").write_text("1", encoding="ascii")
    return fd


def run_batch(tool: str, script: str, fds: Sequence[int] = ()) -> None:
    """Runs the script in the namespace this process is in.

    Raises:
        FabricError: one of its lines failed, it took too long, or the tool is not installed.
    """
    path = shutil.which(tool) or shutil.which(tool, path="/usr/sbin:/sbin")  # often not on the path of a user
    if path is None:
        raise FabricError(f"no {tool} found, install iproute2")
    command = [path, "-batch", "-"]
    try:
        done = subprocess.run(
            command, input=script, capture_output=True, text=True, pass_fds=fds, timeout=TOOL_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise FabricError(f"{tool} is not done within {TOOL_TIMEOUT_S:g} s") from None
    if done.returncode:
        raise FabricError(_describe_failure(tool, script, done.stderr))


def _describe_failure(tool: str, script: str, stderr: str) -> str:
    """Returns the line of a script that failed, and the first words of the tool: `tc qdisc add ...: Specified ...`."""
    said = (stderr.strip() or "failed without a word").splitlines()[0].removeprefix("Error: ")
    number = re.search(r"^Command failed -:(\d+)$", stderr, re.MULTILINE)
    line = script.splitlines()[int(number[1]) - 1] if number else "-batch"
    return f"{tool} {line}: {said}"


if __name__ == "__main__":
    main()
