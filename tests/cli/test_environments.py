"""Where and how the command is run: it works there, or says in one line why not, and leaves nothing either way."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests.sizing.test_memory_limit import real_cgroup
from tests.support.runs import DEADLINE_S, LiveRun, Run, assert_ok, run

SCRIPT = (str(Path(sys.executable).with_name("capricorn-bench")),)
"""As installed, since an interpreter that is given code itself imports from the working folder."""
SHORT = ("--ckpt", "every-iter", "--iterations", "4", "--warmup", "1")
SHADOWS = ("random", "queue", "torch", "numpy", "capricorn", "socket")
ANY = "*"
UNKNOWN = "4242"
"""A user without a name and a home."""


@dataclass(frozen=True)
class Place:
    """Where and how a command is run."""

    shell: str = ""
    """What a shell does before, in a folder of its own; `$OUT` is that of the run."""
    suffix: str = ""
    """Redirections of the command."""
    unshare: str = ""
    """The namespaces it has of its own, as options of unshare."""
    env: Mapping[str, str | None] = field(default_factory=dict)
    """What differs in its environment; None is not set."""
    options: tuple[str, ...] = ()
    says: str = ""
    """The line by which it is refused begins so, with anything for `ANY`; empty if it works."""

    @property
    def prefix(self) -> list[str]:
        return (["unshare", *self.unshare.split()] if self.unshare else []) + [
            "bash", "-ec", f"{self.shell}\nexec \"$@\" {self.suffix}", "bash"
        ]  # fmt: skip

    @property
    def environment(self) -> dict[str, str]:
        changed = {**os.environ, "TMPDIR": None, **self.env}
        return {name: value for name, value in changed.items() if value is not None}


def as_user(uid: str) -> str:
    """The shell that goes on as that user, to whom this interpreter is shown if it lies where only root may look."""
    base = Path(sys.base_prefix).resolve()
    closed = [folder for folder in base.parents if not folder.stat().st_mode & 1]
    lines = []
    if closed:
        lines += [
            "hold=$(mktemp -d -p .)", f"mount --bind {base} $hold", f"mount -t tmpfs -o mode=755 tmpfs {closed[-1]}",
            f"mkdir -p {base}", f"mount --move $hold {base}", "rmdir $hold",
        ]  # fmt: skip
    return "\n".join([*lines, f'set -- setpriv --reuid={uid} --regid={uid} --clear-groups "$@"'])


def locale(value: str | None, **others: str) -> dict[str, str | None]:
    return {"LANG": value, "LC_ALL": None, "LC_CTYPE": None, "LANGUAGE": None, **others}


NO_HOME = {"HOME": "/proc/none", "XDG_CACHE_HOME": None}
READ_ONLY = "mkdir -p closed; mount --bind closed closed; mount -o remount,ro,bind closed; cd closed"
PLACES = {
    "as it is": Place(),
    # processes
    "process 1 of a container": Place(unshare="-p -f --mount-proc"),
    "process 1, by torchrun": Place(unshare="-p -f --mount-proc", options=("--set", "launch.restart=torchrun")),
    "children are not waited for": Place("trap '' CHLD"),
    "in the background": Place("trap '' INT QUIT"),
    "broken pipes are ignored": Place("trap '' PIPE"),
    "idle priority": Place("set -- chrt -i 0 nice -n 19 \"$@\""),
    "one core": Place("set -- taskset -c 0 \"$@\""),
    # descriptors
    "stdin closed": Place(suffix="<&-"),
    "stdout closed": Place(suffix=">&-"),
    "stderr closed": Place(suffix="2>&-"),
    "stdin and stderr closed": Place(suffix="<&- 2>&-"),
    "all three closed": Place(suffix="<&- >&- 2>&-"),
    "few descriptors": Place("ulimit -n 160"),
    "too few descriptors": Place("ulimit -n 32", says="open files: this run needs"),
    # limits
    "small files only": Place("ulimit -f 200", says="file size: this run needs"),
    "little address space": Place("ulimit -v 1000000", says="address space: this run needs"),
    "large core files": Place("ulimit -S -c unlimited || true"),
    "small stack": Place("ulimit -S -s 1024"),
    # files
    "small /dev/shm": Place("mount -t tmpfs -o size=64m tmpfs /dev/shm", unshare="-m"),
    "too small /dev/shm": Place(
        "mount -t tmpfs -o size=64m tmpfs /dev/shm", unshare="-m", options=("--model", "mixtral-small"),
        says="store /dev/shm: this run needs",
    ),
    "read-only /dev/shm": Place(
        "mount -t tmpfs -o ro tmpfs /dev/shm", unshare="-m", says="store /dev/shm: this run needs"
    ),
    "read-only working folder": Place(READ_ONLY, unshare="-m"),
    "results in a read-only folder": Place(
        READ_ONLY, unshare="-m", options=("--out", "results"), says=f"--out {ANY}/closed/results: this run needs"
    ),
    "results where nothing may be made": Place(
        f"mkdir results\n{READ_ONLY.replace('closed', 'results')}; cd ..", unshare="-m", options=("--out", "results"),
        says=f"--out {ANY}/results: this run needs",
    ),
    "working folder removed": Place("mkdir gone; cd gone; rmdir ../gone", says="working folder: this run needs one"),
    "modules in the working folder": Place(
        "\n".join(f"echo 'raise SystemExit(\"shadowed\")' > {name}.py" for name in SHADOWS)
    ),
    "no temporary folder": Place(env={"TMPDIR": "/proc/none"}),
    "umask 077": Place("umask 077"),
    "umask 000": Place("umask 000"),
    "only $OUT and /dev/shm may be written": Place(
        "mount --bind $OUT $OUT; mount -o remount,ro,bind /", unshare="-m",
        says="temporary folder: this run needs one that may be written",
    ),
    "only $OUT, /dev/shm and TMPDIR may be written": Place(
        "mount --bind $OUT $OUT; mount -o remount,ro,bind /; mount -t tmpfs tmpfs /mnt; export TMPDIR=/mnt",
        unshare="-m",
    ),
    # users
    "nobody": Place("export XDG_CACHE_HOME=$PWD/cache\n" + as_user("65534"), unshare="-m"),
    "nobody without a home": Place(as_user("65534"), unshare="-m", env=NO_HOME, says="cannot write the token cache"),
    "nobody without a name": Place(
        as_user(UNKNOWN), unshare="-m", env={"HOME": None, "XDG_CACHE_HOME": None}, says=f"user {UNKNOWN} has no home"
    ),
    "HOME not set": Place(env={"HOME": None}),
    "HOME empty": Place(env={"HOME": "", "XDG_CACHE_HOME": None}),
    "root in a user namespace": Place(unshare="-r"),
    # words
    "LANG=C": Place(env=locale("C")),
    "no LANG": Place(env=locale(None)),
    "no such LANG": Place(env=locale("xx_XX.UTF-8")),
    "ASCII alone": Place(env=locale("C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", LC_ALL="C")),
    "ASCII streams": Place(env={"PYTHONIOENCODING": "ascii:strict"}),
    "dumb terminal": Place(env={"TERM": "dumb"}),
    "no terminal": Place(env={"TERM": None}),
    "20 columns": Place(env={"COLUMNS": "20"}),
    "0 columns": Place(env={"COLUMNS": "0", "LINES": "0"}),
    # of others
    "inside of torchrun": Place(
        env={"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
             "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1", "TORCHELASTIC_RESTART_COUNT": "2",
             "TORCHELASTIC_RUN_ID": "other", "TORCHELASTIC_USE_AGENT_STORE": "True"},
    ),
    "many threads": Place(env={"OMP_NUM_THREADS": "16", "MKL_NUM_THREADS": "16"}),
    "optimised Python": Place(env={"PYTHONOPTIMIZE": "2"}),
    "nothing in the environment": Place(env={**dict.fromkeys(os.environ), "PATH": "/usr/bin:/bin:/usr/sbin"}),
}  # fmt: skip
QUICK = {"all three closed", "small files only"}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that any user may write into."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        yield Path(name)


@pytest.fixture(scope="session")
def loss(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The last loss of the run, which is the same everywhere."""
    return last_loss(run(tmp_path_factory.mktemp("reference"), *SHORT))


def last_loss(ended: Run) -> float:
    found = [sample.loss for sample in ended.samples if (sample.rank, sample.iteration) == (0, 4)]
    assert len(found) == 1
    assert math.isfinite(found[0])
    return found[0]


def start(place: Place, folder: Path) -> LiveRun:
    for name in ("tried", "work", "out", "temporary"):
        (folder / name).mkdir()
        (folder / name).chmod(0o777)
    environment = {"TMPDIR": str(folder / "temporary")} | place.environment | {"OUT": str(folder / "out")}
    tried = subprocess.run(
        [*place.prefix, "true"], env=environment, cwd=folder / "tried", stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    if tried.returncode:
        pytest.skip(f"cannot be had here: {tried.stderr.strip()}")
    return LiveRun(
        folder / "out", *SHORT, *place.options, prefix=place.prefix, program=SCRIPT, env=environment,
        cwd=folder / "work",
    )  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in PLACES]
)  # fmt: skip
def test_it_works_or_says_in_one_line_why_not_and_leaves_nothing(name: str, folder: Path, loss: float) -> None:
    place = PLACES[name]
    with start(place, folder) as live:
        ended = live.finish()
    left = [path.name for path in (folder / "temporary").iterdir() if not path.name.startswith("torchinductor_")]
    assert not left, "all but the cache of torch's compiler is removed"
    if place.says:
        assert ended.exit_code == 2, ended.stderr
        assert fnmatchcase(ended.stderr, f"error: {place.says}*")
        assert len(ended.stderr.splitlines()) == 1
        assert not list((folder / "out").iterdir())
        return
    assert_ok(ended)
    assert ended.stderr == ""
    assert last_loss(ended) == loss


@pytest.mark.slow
def test_what_nohup_started_goes_on_when_the_terminal_closes(folder: Path) -> None:
    with LiveRun(folder, "--iterations", "60", prefix=("nohup",), program=SCRIPT) as live:
        live.wait_iteration(2)
        live.interrupt(signal.SIGHUP)
        assert_ok(live.finish())


@pytest.mark.slow
def test_little_memory_of_a_container_is_told_before_anything_starts(folder: Path) -> None:
    with real_cgroup(300_000_000) as group:
        prefix = ("bash", "-ec", f'echo $$ > {group}/cgroup.procs; exec "$@"', "bash")
        ended = run(folder, *SHORT, prefix=prefix)
    assert ended.exit_code == 2
    assert fnmatchcase(ended.stderr, "error: host memory: this run needs *")
    assert len(ended.stderr.splitlines()) == 1
    assert not list(folder.iterdir())
