"""Networks in the kernel for tests: whether they can be had here, what runs on their nodes, whether all has gone."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from capricorn.emulation.fabric import Fabric, NamespaceEntry, Shape

ROOT = Path(__file__).parents[2]
DEADLINE_S = 30.0
CLUSTER = """
nodes = 2
rate_bytes_per_s = "400Mbit"
attention_s = 0.02
expert_s = 0.02
storage = "nvme-gen4"
"""
"""A small cluster whose links and storage are modelled."""


@cache
def refusal(*, unprivileged: bool) -> str:
    """Why no shaped network namespace can be had here; empty when it can."""
    user = ["--user", "--map-root-user"] if unprivileged else []
    command = ["unshare", *user, "--net", "tc", "qdisc", "add", "dev", "lo", "root", "handle", "1:", "htb"]
    env = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    except FileNotFoundError:
        return "no unshare here"
    return "" if done.returncode == 0 else f"no network namespaces here: {done.stderr.strip()}"


@contextmanager
def fabric(shape: Shape, *, unprivileged: bool | None = None) -> Iterator[Fabric]:
    """A network that is closed at the end, by default the way that works here; skips the test where none can be had."""
    if unprivileged is None:
        unprivileged = bool(refusal(unprivileged=False))
    if reason := refusal(unprivileged=unprivileged):
        pytest.skip(reason)
    built = Fabric.build(shape, unprivileged=unprivileged)
    try:
        yield built
    finally:
        built.close()


def start(entry: NamespaceEntry, *arguments: str) -> subprocess.Popen[str]:
    """A process that does what `tests.support.traffic` is told, at that place."""
    return subprocess.Popen(
        [*entry.prefix, "tests.support.traffic", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        pass_fds=entry.pass_fds,
    )  # fmt: skip


def output(process: subprocess.Popen[str], told: str = "") -> str:
    """What a process prints until it ends."""
    try:
        printed, _ = process.communicate(told, timeout=DEADLINE_S)
    finally:
        process.kill()
    assert process.returncode == 0
    return printed.strip()


def is_held(namespace: str) -> bool:
    """Whether a process is in the namespace, or holds a descriptor of it; `net:[4026532001]`."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            links = [process / "ns" / "net", *(process / "fd").iterdir()]
        except OSError:  # it has ended, or is somebody else's
            continue
        for link in links:
            try:
                if os.readlink(link) == namespace:
                    return True
            except OSError:
                continue
    return False


def has_gone(namespace: str) -> bool:
    """Whether nobody holds the namespace any more, after a while at the latest."""
    deadline_s = time.monotonic() + DEADLINE_S
    while is_held(namespace):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True
