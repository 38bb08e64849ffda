"""Whether this machine can emulate a cluster faithfully, tried out in a few seconds and without training."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import psutil

from capricorn.config.scenario import Scenario
from capricorn.emulation.measure import measure_links
from capricorn.emulation.route import Links
from capricorn.emulation.testbed import PACED, NetworkBackend, create_network
from capricorn.errors import CapricornError
from capricorn.launch.preflight import Check
from capricorn.records.samples import LinkSample
from capricorn.runtime.store.node_store import RunLock
from capricorn.stats.fidelity import MAX_RATE_ERROR
from capricorn.units import Seconds, format_rate, format_seconds

MAX_ROUND_TRIP_S: Seconds = 0.002
MAX_WAKE_ERROR_FRAC = 0.05
"""Of the shortest paced op, how late a sleeper may wake up in the median."""
MAX_OTHERS_FRAC = 0.3
NUM_SLEEPS, SLEEP_S = 100, 0.01
IDLE_S: Seconds = 1.0


def rehearse(scenario: Scenario) -> list[Check]:
    """Checks what the links carry, how punctually sleepers wake, and how much CPU others take."""
    psutil.cpu_percent()
    time.sleep(IDLE_S)
    others = psutil.cpu_percent() / 100
    return [*_check_links(scenario), *_check_pacing(_lateness(scenario.topology.world_size), others, scenario)]


def _check_links(scenario: Scenario) -> list[Check]:
    try:
        network, way = create_network(scenario.cluster)
        try:
            samples = _measure(scenario, network, way)
        finally:
            network.close()
    except (CapricornError, OSError) as error:
        return [Check("links", False, str(error), format_rate(scenario.cluster.rate), "see docs/emulation.md")]
    return [_check_rate(samples, scenario, way), _check_round_trip(samples)]


def _measure(scenario: Scenario, network: NetworkBackend, way: str) -> list[LinkSample]:
    cluster = scenario.cluster
    entries = [network.enter_node(node) for node in range(cluster.nodes)]
    addresses = [network.address(node) for node in range(cluster.nodes)]
    if way != PACED:
        return measure_links(entries, addresses)
    lock = RunLock(Path(scenario.store.root), f"doctor-{secrets.token_hex(4)}")
    try:
        Links.create(lock.folder / "links", cluster.nodes, cluster.rate).close()
        return measure_links(entries, addresses, lock.folder / "links")
    finally:
        lock.release(keep=False)


def _lateness(num_ranks: int) -> list[Seconds]:
    """Returns by how much sleeping threads, one for each rank, wake up late."""

    def sleep(_: int) -> Iterator[Seconds]:
        for _ in range(NUM_SLEEPS):
            due_s = time.perf_counter() + SLEEP_S
            time.sleep(SLEEP_S)
            yield time.perf_counter() - due_s

    with ThreadPoolExecutor(num_ranks) as threads:
        return [late_s for lates in threads.map(lambda rank: list(sleep(rank)), range(num_ranks)) for late_s in lates]


def _check_rate(samples: list[LinkSample], scenario: Scenario, way: str) -> Check:
    wanted = scenario.cluster.rate
    parts = [sample.bytes_per_s / wanted for sample in samples]
    ok = all(abs(part - 1) <= MAX_RATE_ERROR for part in parts)
    found = f"{min(parts):.3f}-{max(parts):.3f} of it, by {way}"
    needed = f"{format_rate(wanted)} within {MAX_RATE_ERROR:.0%}"
    return Check("links", ok, found, needed, "free the CPU, or set cluster.rate_bytes_per_s lower")


def _check_round_trip(samples: list[LinkSample]) -> Check:
    found = median(sample.round_trip_s for sample in samples)
    ok = found <= MAX_ROUND_TRIP_S
    return Check("round trip", ok, format_seconds(found), f"<= {format_seconds(MAX_ROUND_TRIP_S)}", "free the CPU")


def _check_pacing(late_s: list[Seconds], others: float, scenario: Scenario) -> Iterator[Check]:
    assert scenario.emulation is not None
    pace = scenario.emulation.pace
    allowed_s = MAX_WAKE_ERROR_FRAC * min(pace.moe_attention_s, pace.moe_gate_s)
    late_s = sorted(late_s)
    middle_s, worst_s = late_s[len(late_s) // 2], late_s[len(late_s) * 99 // 100]
    found = f"late by p50 {format_seconds(middle_s)}, p99 {format_seconds(worst_s)}"
    yield Check("pacing", middle_s <= allowed_s, found, f"p50 <= {format_seconds(allowed_s)}", "free the CPU")
    found = f"{others:.0%} used by others"
    yield Check("CPU", others <= MAX_OTHERS_FRAC, found, f"<= {MAX_OTHERS_FRAC:.0%}", "free the CPU")
