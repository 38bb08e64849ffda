"""Memory limits of one's own cgroup: the least of all up the tree, in fake trees of both versions and a real one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from capricorn.sizing.memory_limit import available_memory, cgroup_rooms

NO_LIMIT_V1 = str(0x7FFFFFFFFFFFF000)


class Tree:
    """A process with its files `cgroup` and `mountinfo`, and the hierarchies that these name, below one folder."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.v1, self.v2 = folder / "proc", folder / "memory v1", folder / "v2"
        for each in (self.proc, self.v1, self.v2):
            each.mkdir()

    def is_in(self, *cgroups: str, root: str = "/", version: int = 2) -> None:
        """Puts the process into these cgroups, with `root` at the mount point."""
        (self.proc / "cgroup").write_text("\n".join(cgroups) + "\n")
        kinds = {1: (self.v1, "cgroup cgroup rw,memory"), 2: (self.v2, "cgroup2 cgroup2 rw")}
        folder, kind = kinds[version]
        shown = str(folder).replace(" ", r"\040")
        lines = ["21 1 0:20 / /proc rw - proc proc rw", f"30 25 0:26 {root} {shown} ro,nosuid shared:4 - {kind}"]
        (self.proc / "mountinfo").write_text("\n".join(lines) + "\n")

    def rooms(self) -> list[int]:
        return list(cgroup_rooms(self.proc))


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(f"{text}\n")


@pytest.mark.parametrize("where", ["", "slurm", "slurm/job_1", "slurm/job_1/step_0/user/task_0"])
def test_the_least_limit_up_the_tree_counts_wherever_it_is(where: str, tree: Tree) -> None:
    path = "slurm/job_1/step_0/user/task_0"
    tree.is_in(f"0::/{path}")
    for part in ("", "slurm", "slurm/job_1", path):
        write(tree.v2 / part, max="max", current=900)
    write(tree.v2 / where, max=1000, current=900, stat="anon 5\ninactive_file 300")
    assert tree.rooms() == [400]
    assert available_memory(tree.proc) == 400


def test_several_limits_are_all_seen_also_those_that_only_slow_down(tree: Tree) -> None:
    tree.is_in("0::/a/b")
    write(tree.v2 / "a", max=5000, high=4000, current=1000)
    write(tree.v2 / "a/b", max=3000, current=500)
    assert tree.rooms() == [2500, 4000, 3000]
    assert available_memory(tree.proc) == 2500


def test_of_what_is_above_a_mount_only_what_is_shown_counts(tree: Tree) -> None:
    tree.is_in("0::/docker/abc/app", root="/docker/abc")
    write(tree.v2, max=1000, current=400)
    write(tree.v2 / "app", max="max", current=300)
    assert tree.rooms() == [600]


@pytest.mark.parametrize("cgroup", ["0::/", "0::/../../other.slice/x", "0::/not/below"])
def test_in_a_namespace_of_its_own_the_mount_point_counts(cgroup: str, tree: Tree) -> None:
    tree.is_in(cgroup, root="/" if cgroup == "0::/" else "/pods/pod1")
    write(tree.v2, max=1000, current=100)
    assert tree.rooms() == [900]


def test_version_1_counts_memory_and_memory_with_swap_and_what_is_above_its_mount(tree: Tree) -> None:
    tree.is_in("5:cpu,cpuacct:/x", "4:memory:/pod/x", "0::/unrelated", root="/pod", version=1)
    files = {"memsw.limit_in_bytes": 1500, "memsw.usage_in_bytes": 900}
    write(tree.v1 / "x", limit_in_bytes=2000, usage_in_bytes=800, stat="total_inactive_file 100", **files)
    write(
        tree.v1, limit_in_bytes=NO_LIMIT_V1, usage_in_bytes=800,
        stat="total_inactive_file 0\nhierarchical_memory_limit 1200",
    )  # fmt: skip
    assert tree.rooms()[:2] == [1300, 700]
    assert available_memory(tree.proc) == 400


def test_a_group_over_its_limit_leaves_nothing_rather_than_less(tree: Tree) -> None:
    tree.is_in("0::/x")
    write(tree.v2 / "x", max=1000, current=3000)
    assert available_memory(tree.proc) == 0


@pytest.mark.parametrize("text", ["", "nonsense\n", "0::\n", "30 25 - cgroup2\n"])
def test_without_cgroups_the_machine_counts(text: str, tree: Tree) -> None:
    for name in ("cgroup", "mountinfo"):
        (tree.proc / name).write_text(text)
    assert tree.rooms() == []
    assert available_memory(tree.proc) > 0


@contextlib.contextmanager
def real_cgroup(limit_bytes: int) -> Iterator[Path]:
    """A memory cgroup of this machine with that limit; skips the test where none can be made."""
    for parent, limit in ((Path("/sys/fs/cgroup/memory"), "limit_in_bytes"), (Path("/sys/fs/cgroup"), "max")):
        folder = parent / f"capricorn-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if not (folder / f"memory.{limit}").exists():
                continue
            (folder / f"memory.{limit}").write_text(str(limit_bytes))
            yield folder
            return
        finally:
            folder.rmdir()
    pytest.skip("no memory cgroup can be made here")


def test_the_limit_of_a_real_cgroup_is_seen_by_a_process_in_it() -> None:
    code = "from capricorn.sizing.memory_limit import available_memory; print(available_memory())"
    with real_cgroup(600_000_000) as folder:
        shell = f'echo $$ > {folder}/cgroup.procs; exec "$@"'
        command = ["bash", "-c", shell, "bash", sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert 0 < int(done.stdout) < 600_000_000
