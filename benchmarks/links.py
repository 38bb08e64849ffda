"""Emulated links: an all-to-all alone, beside a checkpoint stream in its queue, and beside one in the low class."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from capricorn.config.cluster import ClusterConfig
from capricorn.emulation.measure import measure_links
from capricorn.emulation.route import Links
from capricorn.emulation.testbed import NAMESPACES, PACED, NetworkBackend, create_network
from capricorn.errors import ConfigError
from capricorn.units import format_seconds

NODES, RATE = 4, 25e6
ROUNDS = 3


@contextlib.contextmanager
def _laid(way: str, *, qos: bool = False) -> Iterator[tuple[NetworkBackend, str, list[str]]]:
    """The nodes, a folder, and the folder of links if they are paced in user space."""
    cluster = ClusterConfig(
        name="bench",
        nodes=NODES,
        attention_s=1,
        expert_s=1,
        rate_bytes_per_s=RATE,
        qos=qos,
        links=way,  # type: ignore[arg-type]
    )
    network, _ = create_network(cluster)
    with tempfile.TemporaryDirectory(prefix="capricorn-bench-", dir="/dev/shm") as folder:
        links = [str(Path(folder) / "links")] if way == PACED else []
        if links:
            Links.create(Path(links[0]), NODES, RATE).close()
        try:
            yield network, folder, links
        finally:
            network.close()


def _start(network: NetworkBackend, node: int, module: str, *arguments: str) -> subprocess.Popen[str]:
    entry = network.enter_node(node)
    settings = {
        "GLOO_SOCKET_IFNAME": network.interface,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    env = {**os.environ, **settings}
    return subprocess.Popen(
        [*entry.prefix, module, str(os.getpid()), *arguments],
        pass_fds=entry.pass_fds,
        env=env,
        stdout=subprocess.PIPE,
        text=True,
    )


def _all_to_all(way: str, stream: str) -> dict[str, float]:
    """All-to-alls beside a stream to the next node, as rank 0 sees them."""
    with _laid(way, qos=stream == "low") as (network, folder, links):
        addresses = ",".join(map(network.address, range(NODES)))
        ranks = [
            _start(
                network, rank, "benchmarks.all_to_all_rank", str(rank), str(NODES), folder, addresses, stream, *links
            )
            for rank in range(NODES)
        ]
        texts = [rank.communicate(timeout=120)[0] for rank in ranks]
    figures: dict[str, float] = json.loads(texts[0])
    return figures


def _two_flows(way: str) -> list[float]:
    """What two flows out of node 0 get of the rate, each to another node."""
    with _laid(way) as (network, _, links):
        sinks = [_start(network, node, "benchmarks.flow", "sink", network.address(node), "7001") for node in (1, 2)]
        for sink in sinks:
            assert sink.stdout is not None
            assert sink.stdout.readline() == "ready\n"
        for node in (1, 2):
            where = [*links, "0", str(node)] if links else []
            _start(network, 0, "benchmarks.flow", "source", network.address(node), "7001", *where)
        return [float(sink.communicate(timeout=30)[0]) / RATE for sink in sinks]


def _measure_rates(way: str) -> None:
    with _laid(way) as (network, _, links):
        entries = [network.enter_node(node) for node in range(NODES)]
        addresses = [network.address(node) for node in range(NODES)]
        samples = measure_links(entries, addresses, Path(links[0]) if links else None)
    parts = ", ".join(f"{sample.bytes_per_s / RATE:.3f}" for sample in samples)
    trip_s = sorted(sample.round_trip_s for sample in samples)[NODES // 2]
    print(f"{way}: bulk on all links at once, parts of 200 Mbit/s: {parts}; round trip {format_seconds(trip_s)}")
    print(f"{way}: two flows out of one node: {', '.join(f'{part:.3f}' for part in _two_flows(way))} of the rate")


def main() -> None:
    """Prints rates, and all-to-alls under each kind of checkpoint stream, for kernel and user-space links."""
    for way in (NAMESPACES, PACED):
        try:
            _measure_rates(way)
        except ConfigError as error:
            print(f"{way}: {error}")
            continue
        for stream in ("none", "fifo", "low"):
            rounds = [_all_to_all(way, stream) for _ in range(ROUNDS)]
            middle = sorted(rounds, key=lambda figures: figures["all_to_all_s"])[ROUNDS // 2]
            ideal_s = middle["bytes"] / RATE
            print(
                f"{way}, checkpoint stream {stream}: all-to-all {format_seconds(middle['all_to_all_s'])}, "
                f"{middle['all_to_all_s'] / ideal_s:.2f} of the ideal; "
                f"stream {middle['stream_bytes_per_s'] * 8e-6:.0f} Mbit/s"
            )
