"""Machines as namespaces: each has a network, a name, processes, a `/dev/shm` and a home of its own. Needs root."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

IPV4, IPV6 = "10.77.0.{}", "fd77::{}"
ENTER = """
mount -t tmpfs tmpfs /dev/shm && mount --bind "$1" /etc/hosts && hostname "$2" && mkdir -p "$3" && export HOME="$3"
shift 3
exec "$@"
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Machine:
    """One of them."""

    def __init__(self, name: str, number: int, folder: Path, hosts: Path) -> None:
        self.network, self.number = f"{name}m{number}", number
        enter = [
            "unshare",
            "--mount",
            "--uts",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "sh",
            "-c",
            ENTER,
            "sh",
        ]
        home = folder / f"home{number}"
        self.prefix: Sequence[str] = (
            "ip", "netns", "exec", self.network, *enter, str(hosts), f"machine{number}", str(home)
        )  # fmt: skip

    def cut(self) -> None:
        """Has nothing leave or reach it any more, without a word to anybody: as when a cable is drawn."""
        ip("-n", self.network, "link", "set", "eth0", "down")


@contextlib.contextmanager
def namespaced(folder: Path, count: int) -> Iterator[list[Machine]]:
    """So many machines on one switch; `head` is the name of the first one, also there, where it means the loopback."""
    if os.geteuid() or subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        pytest.skip("network namespaces with names need root")
    name = f"cap{os.getpid()}"
    ip("netns", "add", name)
    made = [name]
    try:
        ip("-n", name, "link", "add", "switch", "type", "bridge")
        ip("-n", name, "link", "set", "switch", "up")
        machines = []
        for number in range(count):
            hosts = folder / f"hosts{number}"
            # As Debian has it: a machine's own name is an address of its loopback.
            own = "127.0.1.1" if number == 0 else IPV4.format(1)
            hosts.write_text(f"127.0.0.1 localhost\n::1 localhost\n{own} head\n")
            machine = Machine(name, number, folder, hosts)
            ip("netns", "add", machine.network)
            made.append(machine.network)
            ip("-n", machine.network, "link", "add", "eth0", "type", "veth", "peer", f"p{number}", "netns", name)
            ip("-n", name, "link", "set", f"p{number}", "master", "switch", "up")
            ip("-n", machine.network, "link", "set", "lo", "up")
            ip("-n", machine.network, "link", "set", "eth0", "up")
            ip("-n", machine.network, "addr", "add", IPV4.format(number + 1) + "/24", "dev", "eth0")
            ip("-n", machine.network, "addr", "add", IPV6.format(number + 1) + "/64", "dev", "eth0", "nodad")
            ip("-n", machine.network, "route", "add", "default", "dev", "eth0")
            machines.append(machine)
        yield machines
    finally:
        for each in reversed(made):
            subprocess.run(["ip", "netns", "del", each], check=False, capture_output=True)
