"""Every kind of failure in runs by the real command line: a run goes on where a copy survives, and ends as ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from capricorn.records.samples import LOADS, LoadSample, read_samples
from tests.support.mounts import tmpfs
from tests.support.processes import commands
from tests.support.runs import Run, assert_ok, assert_same_losses, faults, run

SLOW = pytest.mark.slow
SHORT = ("--iterations", "12")
FILES = ("--system", "torch-save")
LOCAL, PEER, FROM_FILES = ["local", "local"], ["local", "peer"], ["persistent", "persistent"]
CLUSTER = """
nodes = 2
rate_bytes_per_s = "400Mbit"
attention_s = 0.02
expert_s = 0.02
"""


STRUCK = 6
"""The iteration in which failures come."""


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run without failures."""
    return run(tmp_path_factory.mktemp("reference"), *SHORT)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a small measured cluster."""
    path = tmp_path_factory.mktemp("cluster") / "small.toml"
    path.write_text(CLUSTER)
    return path


def assert_as_before(ended: Run, reference: Run) -> None:
    """Losses and the final state are those of a run without failures, and nothing outlives the run."""
    assert_same_losses(ended, reference)
    assert digests(ended) == digests(reference)
    assert ended.folder is not None
    assert not list(Path("/sys/fs/cgroup").rglob(f"capricorn-{ended.folder.name}*"))
    assert not [command for command in commands() if ended.folder.name in command]


def digests(ended: Run) -> dict[int, str]:
    return {event.rank: event.state_digest for event in ended.events if event.event == "finished"}


@pytest.mark.parametrize(
    ("fault", "options", "sources"),
    [
        pytest.param("corrupt@rank=1,iteration=6", (), PEER),
        pytest.param("corrupt@rank=1,iteration=6,where=replica", (), LOCAL, marks=SLOW),
        pytest.param("truncate@rank=1,iteration=6", (), PEER, marks=SLOW),
        pytest.param("truncate@rank=1,iteration=6,where=replica", (), LOCAL, marks=SLOW),
        pytest.param("corrupt@rank=1,iteration=6,where=previous", (), PEER, marks=SLOW),
        pytest.param("truncate@rank=1,iteration=6,where=previous", (), PEER, marks=SLOW),
        pytest.param("neighbour@rank=1,iteration=6,where=stores", (), LOCAL, marks=SLOW),
        pytest.param("neighbour@rank=1,iteration=6,where=job", (), LOCAL, marks=SLOW),
        pytest.param("fork-server@node=1,iteration=6,where=killed", (), PEER, marks=SLOW),
        pytest.param("fork-server@node=1,iteration=6,where=stopped", (), PEER, marks=SLOW),
        pytest.param("torn-commit@rank=1,iteration=6,call=1", (), LOCAL, marks=SLOW),
        pytest.param("torn-commit@rank=1,iteration=6,call=3", (), LOCAL, marks=SLOW),
        pytest.param("torn-commit@rank=1,iteration=6,call=2", FILES, FROM_FILES, marks=SLOW),
        pytest.param("oom@rank=1,iteration=6", (), LOCAL),
        pytest.param("port-taken@rank=0,iteration=6", (), LOCAL, marks=SLOW),
        pytest.param("stop@rank=1,iteration=6", (), LOCAL, marks=SLOW),
        pytest.param("group-loss@node=1,iteration=6", FILES, FROM_FILES, marks=SLOW),
    ],
)
def test_a_run_goes_on_from_what_survives(
    fault: str, options: tuple[str, ...], sources: list[str], tmp_path: Path, reference: Run
) -> None:
    ended = run(tmp_path, *SHORT, *options, *faults(fault))
    assert_ok(ended)
    assert ended.num_triggered == 1
    # What was damaged is not asked for where a slow machine had not completed the newest one on all ranks by then.
    is_older = fault.startswith(("corrupt", "truncate")) and ended.resumed[-1] < STRUCK - 1
    assert is_older or ended.sources[-1] == sources
    assert min(ended.lost) <= 1
    assert_as_before(ended, reference)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "options"),
    [
        ("clock-jump@rank=1,iteration=6", ()),
        ("clock-jump@rank=1,iteration=6,where=back", ()),
        ("pause@iteration=6,seconds=1", ()),
        ("pause@iteration=6,seconds=8", ()),
        ("stop@rank=1,iteration=6,seconds=0.5", ()),
        ("disk-slow@iteration=6,seconds=0.5", FILES),
    ],
)
def test_a_run_is_held_up_and_loses_nothing(
    fault: str, options: tuple[str, ...], tmp_path: Path, reference: Run
) -> None:
    ended = run(tmp_path, *SHORT, *options, *faults(fault))
    assert_ok(ended)
    assert ended.num_triggered == 1
    assert not ended.resumed
    assert_as_before(ended, reference)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["namespaces", "paced"])
@pytest.mark.parametrize("kind", ["slow-link", "partition"])
def test_a_run_waits_for_a_bad_link(way: str, kind: str, cluster: Path, tmp_path: Path, reference: Run) -> None:
    links = ("--cluster", str(cluster), "--set", f"cluster.links={way}")
    ended = run(tmp_path, *SHORT, *links, *faults(f"{kind}@node=1,iteration=6,seconds=1"))
    assert ended.record["verdict"] == "ok" or ended.record["verdict"].startswith("invalid: ")
    assert ended.num_triggered == 1
    assert not ended.resumed
    assert_as_before(ended, reference)


@pytest.mark.slow
def test_a_block_that_was_damaged_on_the_wire_is_refused_and_training_goes_on(tmp_path: Path, reference: Run) -> None:
    ended = run(tmp_path, *SHORT, *faults("corrupt@rank=1,iteration=6,where=wire"))
    assert ended.num_triggered == 1
    assert not ended.resumed
    assert sum(sample.failed_saves for sample in ended.samples) == 1
    assert_as_before(ended, reference)


@pytest.mark.slow
def test_a_full_memory_file_system_stops_no_restart_and_is_empty_afterwards(tmp_path: Path, reference: Run) -> None:
    with tmpfs("64M") as root:
        ended = run(tmp_path, *SHORT, "--set", f"store.root={root}", *faults("tmpfs-full@rank=1,iteration=6"))
        assert not any(root.iterdir())
    assert_ok(ended)
    assert ended.sources == [LOCAL]
    assert_as_before(ended, reference)


@pytest.mark.slow
def test_a_full_disk_under_the_records_is_got_over(tmp_path: Path, reference: Run) -> None:
    with tmpfs("16M") as root:
        ended = run(root, *SHORT, *faults("records-full@iteration=6,seconds=0.3"))
        assert ended.num_triggered == 1
        assert_as_before(ended, reference)


@pytest.mark.slow
def test_a_full_disk_stops_no_training(tmp_path: Path, reference: Run) -> None:
    with tmpfs("64M") as root:
        where = ("--set", f"store.root={root}", "--set", "storage.medium=tmpfs")
        ended = run(tmp_path, *SHORT, *FILES, *where, *faults("disk-full@iteration=6"))
        assert not any(root.iterdir())
    assert ended.num_triggered == 1
    assert 0 < ended.summary["effective"] < ended.summary["requested"]
    assert_as_before(ended, reference)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "note"),
    [("group-loss@node=0", ""), ("corrupt@rank=1,where=disk", "damaged"), ("truncate@rank=1,where=disk", "damaged")],
)
def test_when_all_memory_is_lost_the_newest_checkpoint_on_disk_that_is_whole_is_taken(
    fault: str, note: str, tmp_path: Path
) -> None:
    long = ("--iterations", "200", "--persist-every", "2")  # so that the writers have come to write some
    undisturbed = run(tmp_path / "undisturbed", *long)
    ended = run(tmp_path / "lost", *long, *faults(f"{fault},iteration=190"))
    assert_ok(ended)
    assert ended.sources[-1] == FROM_FILES
    assert ended.resumed[-1] > 0
    assert any(note in event.detail for event in ended.events if event.event == "resumed")
    assert_as_before(ended, undisturbed)


@pytest.mark.slow
def test_nodes_of_different_groups_may_be_lost_at_once(tmp_path: Path) -> None:
    undisturbed = run(tmp_path / "undisturbed", *SHORT, "--nodes", "4")
    ended = run(
        tmp_path / "lost",
        *SHORT,
        "--nodes",
        "4",
        *faults("node-loss@node=1,iteration=6", "node-loss@node=2,iteration=6"),
    )
    assert_ok(ended)
    assert ended.num_triggered == 2
    assert ended.sources[-1] == ["local", "peer", "peer", "local"]
    assert_as_before(ended, undisturbed)


@pytest.mark.slow
def test_a_lost_group_without_a_slow_tier_ends_the_run_in_one_line(tmp_path: Path) -> None:
    ended = run(tmp_path, *SHORT, "-q", *faults("group-loss@node=0,iteration=6"))
    assert ended.exit_code == 1
    assert "no complete checkpoint survives" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_a_failure_that_this_machine_cannot_have_is_refused_in_one_line_before_anything_starts(tmp_path: Path) -> None:
    ended = run(tmp_path, *SHORT, *faults("tmpfs-full@rank=1,iteration=6"))
    assert ended.exit_code == 2
    assert len(ended.stderr.splitlines()) == 1
    assert ended.folder is None


SIXTEEN = ("--nodes", "4", "--ranks-per-node", "4", "--expert-parallel", "8")
FOUR = ("--nodes", "2", "--ranks-per-node", "2", "--expert-parallel", "2", "--set", "train.expert_optimizer=replicated")


@pytest.mark.parametrize(
    ("shape", "fault"),
    [
        (("--expert-parallel", "1"), "node-loss@node=1,iteration=6"),
        pytest.param(FOUR, "node-loss@node=0,iteration=6", marks=SLOW),
        pytest.param(SIXTEEN, "kill@rank=9,iteration=6", marks=SLOW),
        pytest.param(SIXTEEN, "node-loss@node=2,iteration=6", marks=SLOW),
    ],
)
def test_experts_with_replicas_go_on_alike_on_all_of_them(shape: tuple[str, ...], fault: str, tmp_path: Path) -> None:
    undisturbed = run(tmp_path / "undisturbed", *SHORT, *shape, deadline_s=300.0)
    ended = run(tmp_path / "faulty", *SHORT, *shape, *faults(fault), deadline_s=300.0)
    assert_ok(ended)
    assert ended.num_triggered == 1
    assert min(ended.lost) <= 1
    assert_as_before(ended, undisturbed)
    assert undisturbed.folder is not None
    loads = [load.tokens_per_expert for load in read_samples(undisturbed.folder / LOADS, LoadSample)]
    assert {len(each) for each in loads} == {8}, "loads are recorded of all groups together"
    assert len({sum(each) for each in loads}) == 1
