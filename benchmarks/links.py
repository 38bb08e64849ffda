"""Emulated links: an all-to-all alone, beside a checkpoint stream in its queue, and beside one in the low class."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

from capricorn.cluster import ClusterConfig
from capricorn.emulation.ground import NAMESPACES, PACED, lay_ground
from capricorn.emulation.measure import measure_links
from capricorn.emulation.route import Links
from capricorn.errors import ConfigError
from capricorn.units import format_seconds

NODES, RATE = 4, 25e6
ROUNDS = 3


def _once(way: str, stream: str) -> dict[str, float]:
    cluster = ClusterConfig(
        name="bench", nodes=NODES, attention_s=1, expert_s=1, rate_bytes_per_s=RATE, qos=stream == "low", links=way
    )
    ground, _ = lay_ground(cluster)
    addresses = ",".join(map(ground.address, range(NODES)))
    with tempfile.TemporaryDirectory(prefix="capricorn-bench-", dir="/dev/shm") as folder:
        links = [str(Path(folder) / "links")] if way == PACED else []
        if links:
            Links.create(Path(links[0]), NODES, RATE).close()
        processes = []
        for rank in range(NODES):
            entry = ground.enter_node(rank)
            module = ["benchmarks.all_to_all_rank", str(rank), str(NODES), folder, addresses, stream, *links]
            env = {**os.environ, "GLOO_SOCKET_IFNAME": ground.interface, "OMP_NUM_THREADS": "1"}
            processes.append(
                subprocess.Popen(
                    [*entry.prefix, *module], pass_fds=entry.pass_fds, env=env, stdout=subprocess.PIPE, text=True
                )
            )
        texts = [process.communicate(timeout=120)[0] for process in processes]
    ground.close()
    figures: dict[str, float] = json.loads(texts[0])
    return figures


def _measure_rates(way: str) -> None:
    cluster = ClusterConfig(name="bench", nodes=NODES, attention_s=1, expert_s=1, rate_bytes_per_s=RATE, links=way)
    ground, _ = lay_ground(cluster)
    entries = [ground.enter_node(node) for node in range(NODES)]
    addresses = [ground.address(node) for node in range(NODES)]
    with tempfile.TemporaryDirectory(prefix="capricorn-bench-", dir="/dev/shm") as folder:
        links = Path(folder) / "links" if way == PACED else None
        if links:
            Links.create(links, NODES, RATE).close()
        samples = measure_links(entries, addresses, links)
    ground.close()
    parts = ", ".join(f"{sample.bytes_per_s / RATE:.3f}" for sample in samples)
    trip_s = sorted(sample.round_trip_s for sample in samples)[NODES // 2]
    print(f"{way}: bulk on all links at once, parts of 200 Mbit/s: {parts}; round trip {format_seconds(trip_s)}")


def main() -> None:
    """Prints rates, and all-to-alls under each kind of checkpoint stream, for kernel and user-space links."""
    for way in (NAMESPACES, PACED):
        try:
            _measure_rates(way)
        except ConfigError as error:
            print(f"{way}: {error}")
            continue
        for stream in ("none", "fifo", "low"):
            rounds = [_once(way, stream) for _ in range(ROUNDS)]
            middle = sorted(rounds, key=lambda figures: figures["all_to_all_s"])[ROUNDS // 2]
            ideal_s = middle["bytes"] / RATE
            print(
                f"{way}, checkpoint stream {stream}: all-to-all {format_seconds(middle['all_to_all_s'])}, "
                f"{middle['all_to_all_s'] / ideal_s:.2f} of the ideal; "
                f"stream {middle['stream_bytes_per_s'] * 8e-6:.0f} Mbit/s"
            )
