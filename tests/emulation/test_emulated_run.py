"""Runs in a cluster in a box, by the real command line: the same training, whatever carries its traffic."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from capricorn.config.cluster import ClusterConfig
from capricorn.emulation import testbed
from capricorn.emulation.fabric import Fabric, FabricError
from capricorn.emulation.testbed import NAMESPACES, PACED, USER_NAMESPACES, create_network
from capricorn.errors import ConfigError
from capricorn.records.job_file import JOB, Job
from capricorn.records.samples import LINKS, PACE, LinkSample, PaceSample, read_run, read_samples
from tests.support.namespaces import CLUSTER, refusal
from tests.support.runs import LiveRun, Run, assert_same_losses, command, faults, polls, run

SLOW = pytest.mark.slow
KILL, NODE_LOSS = "kill@rank=1,iteration=5", "node-loss@node=1,iteration=5,op=expert.0.backward"
SHORT = ("--iterations", "8", "--warmup", "2")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same training without emulation."""
    return run(tmp_path_factory.mktemp("local"), *SHORT)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a small measured cluster."""
    path = tmp_path_factory.mktemp("cluster") / "small.toml"
    path.write_text(CLUSTER)
    return path


def need(way: str) -> None:
    """Skips the test where links cannot be made that way."""
    reason = "" if way == PACED else refusal(unprivileged=way == USER_NAMESPACES)
    if reason:
        pytest.skip(reason)


def emulated(out: Path, cluster: Path, way: str, *options: str) -> Run:
    return run(out, *SHORT, "--cluster", str(cluster), "--set", f"cluster.links={way}", *options)


def assert_done(ended: Run) -> None:
    """All was done; that a busy machine could not keep the pace is told and is no fault of the run."""
    verdict = ended.record["verdict"]
    assert verdict == "ok" or verdict.startswith("invalid: "), f"{ended.stderr}\n{ended.stdout}"
    assert ended.exit_code == (0 if verdict == "ok" else 1)
    assert ended.summary["requested"] == ended.summary["effective"] == ended.summary["iterations"] == 8


@pytest.mark.parametrize("way", [NAMESPACES, *(pytest.param(way, marks=SLOW) for way in (USER_NAMESPACES, PACED))])
def test_losses_are_those_of_a_local_run_whatever_makes_the_links(
    way: str, cluster: Path, reference: Run, tmp_path: Path
) -> None:
    need(way)
    ended = emulated(tmp_path, cluster, way)
    assert_done(ended)
    assert_same_losses(ended, reference)
    assert ended.folder is not None
    assert ended.record["mode"] == "emulated"
    assert ended.record["config"]["cluster"]["links"] == way
    assert {sample.source for sample in read_samples(ended.folder / LINKS, LinkSample)} == {0, 1}
    assert Job.read(ended.folder / JOB).storage_dir is not None
    record = read_run(ended.folder)
    assert record.config.emulation is not None
    assert record.summary["rho"] == pytest.approx(record.config.emulation.rho)
    assert record.summary["buffers_s"] > 0
    assert "scale model" in ended.stdout
    assert way in ended.stdout
    paces = list(read_samples(ended.folder / PACE, PaceSample))
    assert {(sample.rank, sample.iteration) for sample in paces} == {(r, i) for r in (0, 1) for i in range(1, 9)}
    # Two layers of attention, gate and experts in both directions; the head is not paced here.
    assert all(len(sample.errors_s) + len(sample.overruns_s) == 12 for sample in paces)


@pytest.mark.parametrize(
    ("way", "fault"),
    [
        (NAMESPACES, NODE_LOSS),
        pytest.param(PACED, KILL, marks=SLOW),
        pytest.param(NAMESPACES, KILL, marks=SLOW),
        pytest.param(PACED, NODE_LOSS, marks=SLOW),
    ],
)
def test_killed_ranks_and_lost_nodes_come_back_in_an_emulation(
    way: str, fault: str, cluster: Path, reference: Run, tmp_path: Path
) -> None:
    need(way)
    ended = emulated(tmp_path, cluster, way, *faults(fault))
    assert_done(ended)
    assert ended.resumed == [4]
    assert ended.sources == [["local", "peer" if "node" in fault else "local"]]
    assert_same_losses(ended, reference)


@pytest.mark.slow
def test_given_loads_are_the_same_again_after_a_restart(cluster: Path, tmp_path: Path) -> None:
    whole = emulated(tmp_path / "whole", cluster, PACED, "--loads", "transient")
    killed = emulated(tmp_path / "killed", cluster, PACED, "--loads", "transient", *faults("kill@rank=0,iteration=4"))
    assert_done(killed)
    assert_same_losses(killed, whole)


def has_network(live: LiveRun) -> bool:
    """Whether processes of the run are in a network of their own."""
    mine = os.stat("/proc/self/ns/net").st_ino
    inodes = []
    for process in live.processes():
        try:
            inodes.append(os.stat(f"/proc/{process.pid}/ns/net").st_ino)
        except OSError:
            continue
    return any(inode != mine for inode in inodes)


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=SLOW), pytest.param(signal.SIGTERM, marks=SLOW), signal.SIGKILL]
)
def test_a_network_goes_with_the_launcher_however_it_ends(
    number: signal.Signals, cluster: Path, tmp_path: Path
) -> None:
    need(NAMESPACES)
    options = ("--cluster", cluster, "--set", f"cluster.links={NAMESPACES}", "--iterations", "200")
    with LiveRun(tmp_path, *options) as live:
        live.wait_iteration(2)
        assert has_network(live)
        store = live.store()
        live.process.send_signal(number)
        live.process.wait(30)
        assert "Traceback" not in live.stderr()
        assert live.process.returncode == (130 if number != signal.SIGKILL else -signal.SIGKILL)
        # The namespaces have no name and no holder but these processes.
        assert any(not live.processes() for _ in polls(20.0))
    if number == signal.SIGKILL:
        assert command("clean").exit_code == 0
    assert not store.exists()


def test_doctor_tries_out_links_pacing_and_cpu(cluster: Path) -> None:
    ended = command("doctor", "--cluster", cluster, "--model", "mixtral-tiny", "--set", "cluster.links=paced", "--json")
    checks = {check["name"]: check for check in ended.json["checks"]}
    assert {"links", "round trip", "pacing", "CPU"} <= checks.keys()
    assert "paced" in checks["links"]["found"]


def test_the_scale_is_shown_before_anything_starts() -> None:
    ended = command("run", "--cluster", "p4d", "--model", "mixtral-8x7b", "--nodes", "4", "--dry-run", "--json")
    emulation = ended.json["config"]["emulation"]
    assert emulation["target"]["name"] == "mixtral-8x7b"
    assert emulation["here"]["compute_s"] > 0
    shown = command("run", "--cluster", "p4d", "--model", "mixtral-8x7b", "--nodes", "4", "--dry-run").stdout
    for word in ("computing", "all-to-all", "checkpoint", "rho", "240 Gbit/s", "80 Mbit/s", "host memory"):
        assert word in shown


MISTAKES: list[tuple[tuple[str, ...], str]] = [
    (("--cluster", "p5d"), "unknown cluster 'p5d'; did you mean 'p4d'?"),
    (("--cluster", "missing.toml"), "cannot read missing.toml"),
    (("--cluster", "p4d", "--nodes", "1"), "needs --nodes 2 or more"),
    (("--cluster", "p4d", "--device", "cuda"), "use --device cpu"),
    (("--cluster", "p4d", "--nnodes", "2", "--rdzv-endpoint", "h:1"), "leave out --nnodes"),
    (("--cluster", "p4d", "--set", "cluster.speed=1"), "unknown key 'cluster.speed'"),
    (("--set", "cluster.rho=0.9"), "cluster.rho means nothing on --cluster local"),
    (
        ("--cluster", "p4d", "--model", "mixtral-8x7b", "--fault", "kill@rank=1,iteration=11,op=expert.20.backward"),
        "can never be triggered",
    ),
    (("--loads", "stabel"), "did you mean 'stable'?"),
    (("--loads", "missing.npz"), "missing.npz cannot be read"),
    (("--loads", "stable", "--model", "gpt-moe-tiny"), "use --loads router"),
]


@pytest.mark.parametrize(("options", "message"), MISTAKES, ids=[" ".join(options) for options, _ in MISTAKES])
def test_a_mistake_about_clusters_is_one_line_and_exit_code_2(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from capricorn.cli.main import main

    with pytest.raises(SystemExit) as ended:
        main(["run", *options])
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]


# --- which way is taken


def refuse(*_: Any, **__: Any) -> Fabric:
    raise FabricError("unshare: Operation not permitted")


def config(**fields: Any) -> ClusterConfig:
    return ClusterConfig(name="mine", device="cpu", attention_s=0.01, expert_s=0.01, rate_bytes_per_s=25e6, **fields)


def test_without_any_right_links_are_paced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testbed.Fabric, "build", refuse)
    network, way = create_network(config())
    network.close()
    assert way == PACED


def test_a_way_that_was_asked_for_and_does_not_work_is_an_error_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(testbed.Fabric, "build", refuse)
    with pytest.raises(ConfigError, match=r"cluster\.links=namespaces does not work here: unshare"):
        create_network(config(links=NAMESPACES))


@pytest.mark.parametrize("nodes", [2, 5])
def test_nodes_of_any_network_have_addresses_that_sort_like_them(nodes: int) -> None:
    builders: list[Callable[[], ClusterConfig]] = [lambda: config(nodes=nodes, links=PACED), lambda: ClusterConfig()]
    for build in builders:
        network, _ = create_network(build())
        addresses = [network.address(node) for node in range(nodes)]
        network.close()
        assert sorted(set(addresses)) == addresses
