"""Measuring the links between nodes, on loopback and in the kernel's namespaces."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from capricorn.emulation import measure
from capricorn.emulation.fabric import FabricError, NamespaceEntry, Shape
from capricorn.emulation.measure import measure_links
from capricorn.emulation.paced_link import Link
from capricorn.emulation.probe import NUM_PINGS, PING_BYTES
from capricorn.emulation.route import Links
from capricorn.emulation.testbed import loopback_address
from capricorn.records.samples import LinkSample
from tests.support.booked import high_bytes, low_bytes
from tests.support.namespaces import fabric


def check(figures: list[LinkSample], num_nodes: int) -> None:
    """That there are figures of the whole ring."""
    assert [(link.source, link.target) for link in figures] == [(k, (k + 1) % num_nodes) for k in range(num_nodes)]
    assert all(link.bytes_per_s > 0 and link.round_trip_s > 0 for link in figures)


def test_links_over_loopback_are_measured() -> None:
    check(measure_links([NamespaceEntry()] * 3, [loopback_address(node) for node in range(3)]), 3)


def test_links_paced_in_user_space_are_measured_through_their_pacer(tmp_path: Path) -> None:
    folder = tmp_path / "links"
    Links.create(folder, 2, 10e6).close()
    check(measure_links([NamespaceEntry()] * 2, [loopback_address(node) for node in range(2)], folder), 2)
    for name in ("out0", "in0", "out1", "in1"):
        link = Link(folder / name)
        assert high_bytes(link) > 2 * NUM_PINGS * PING_BYTES, "its pings, those it sent back, and more"
        assert low_bytes(link) == 0
        link.close()


def test_links_between_namespaces_are_measured() -> None:
    with fabric(Shape(2, 10e6, qos=True)) as built:
        check(measure_links([built.enter_node(node) for node in range(2)], [built.address(0), built.address(1)]), 2)


def test_a_single_node_has_no_links() -> None:
    assert measure_links([NamespaceEntry()], [loopback_address(0)]) == []


def test_a_probe_that_fails_is_an_error_of_one_line_with_what_it_said() -> None:
    with pytest.raises(FabricError, match=r"^cannot measure .* node 1: .*assign requested address.*$"):
        measure_links([NamespaceEntry()] * 2, [loopback_address(0), "192.0.2.1"])


def test_a_probe_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "ANSWER_TIMEOUT_S", 0.2)
    hanging = NamespaceEntry(prefix=(sys.executable, "-c", "import time; time.sleep(60)"))
    with pytest.raises(FabricError, match=r"probe on node 0: timed out$"):
        measure_links([hanging, hanging], [loopback_address(0), loopback_address(1)])


def test_a_probe_needs_nothing_heavy() -> None:
    code = "import capricorn.emulation.probe, capricorn.emulation.route, sys; print(*sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"torch", "numpy", "pydantic"} & set(printed.split())
