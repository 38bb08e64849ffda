"""What the links between nodes carry, measured before training starts: runs a probe on each node and asks it.

Must not know how links are made, nor what the probes do to find out.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from capricorn.emulation.fabric import FabricError, NamespaceEntry
from capricorn.files import memory_file
from capricorn.process import kill_child
from capricorn.records.samples import LinkSample
from capricorn.units import Seconds

ANSWER_TIMEOUT_S: Seconds = 15.0
"""Longer than a probe's own waits, so that it can say what it waited for."""


def measure_links(
    entries: Sequence[NamespaceEntry], addresses: Sequence[str], links: Path | None = None
) -> list[LinkSample]:
    """Returns figures of the links from each node to the next and from the last to the first; none for a single node.

    `links` is the folder of the links where they are paced in user space.

    Raises:
        FabricError: a node did not answer, or nothing reached it.
    """
    num_nodes = len(addresses)
    if num_nodes < 2:
        return []
    with contextlib.ExitStack() as stack:
        peers: list[_ProbeProcess] = []
        for node, (entry, address) in enumerate(zip(entries, addresses, strict=True)):
            arguments = [str(node), str(num_nodes), address, *(["--links", str(links)] if links else [])]
            peers.append(_ProbeProcess(node, entry, arguments))
            stack.callback(peers[-1].end)
        ports = _ask_all(peers, ["listen"] * num_nodes)
        _ask_all(peers, [f"connect {addresses[k]} {ports[k]:.0f}" for k in (*range(1, num_nodes), 0)])
        round_trips = [_ask_all([peer], ["round_trip"])[0] for peer in peers]
        rates = _ask_all(peers, ["bulk"] * num_nodes)
    return [
        LinkSample(
            source=source,
            target=(target := (source + 1) % num_nodes),
            bytes_per_s=rates[target],
            round_trip_s=round_trips[source],
        )
        for source in range(num_nodes)
    ]


class _ProbeProcess:
    """The probe on one node."""

    def __init__(self, node: int, entry: NamespaceEntry, arguments: Sequence[str]) -> None:
        self._node = node
        self._errors = memory_file()
        self._channel, theirs = socket.socketpair()
        self._channel.settimeout(ANSWER_TIMEOUT_S)
        self._answers = self._channel.makefile("r", encoding="utf-8")
        with theirs:
            self._process = subprocess.Popen(
                [*entry.prefix, "capricorn.emulation.probe", str(os.getpid()), *arguments],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=self._errors,
                pass_fds=entry.pass_fds,
                start_new_session=True,
            )

    def ask(self, question: str) -> None:
        # One that has ended is found out when it owes its answer.
        with contextlib.suppress(BrokenPipeError):
            self._channel.sendall(f"{question}\n".encode())

    def answer(self) -> float:
        """Returns the next answer.

        Raises:
            FabricError: it failed, with the last it said, or took too long.
        """
        reason = "ended without an answer"
        try:
            if line := self._answers.readline():
                return float(json.loads(line))
        except (TimeoutError, ConnectionResetError) as error:
            reason = str(error)
        self._kill()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        raise FabricError(f"cannot measure the links: the probe on node {self._node}: {said[-1] if said else reason}")

    def end(self) -> None:
        self._kill()
        for file in (self._answers, self._channel, self._errors):
            file.close()

    def _kill(self) -> None:
        kill_child(self._process, f"the probe on node {self._node}")


def _ask_all(peers: Sequence[_ProbeProcess], questions: Sequence[str]) -> list[float]:
    """Returns the answers of all, who work on them at the same time."""
    for peer, question in zip(peers, questions, strict=True):
        peer.ask(question)
    return [peer.answer() for peer in peers]
