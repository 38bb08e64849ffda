"""The conventions that no linter knows, checked on the source: no pickle, no swallowed error, no hidden option."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.processes import children_of, command_of, commands
from tests.support.runs import polls
from tests.support.sources import ROOT, imports, module_name, room_of, show, sources

TORCHRUN = {
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR",
    "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID",
}  # fmt: skip
LAUNCHERS = Path("capricorn/config/launcher_environment.py")
"""The one module that reads what Slurm, MPI and torchrun leave in the environment."""
ENVIRONMENT = {
    "SECRET": "CAPRICORN_SECRET, which must stand on no command line, where others would see it",
    "XDG_CACHE_HOME": "where a user keeps caches; tokens are the only thing cached",
    "HOME": "where they are by default; one that is empty or relative is none, which Path.home does not tell",
}

PICKLE_MODULES = (
    "pickle", "_pickle", "pickletools", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "copyreg",
    "multiprocessing", "concurrent.futures.ProcessPoolExecutor", "concurrent.futures.process", "xmlrpc",
    "torch.multiprocessing", "torch.package", "torch.hub", "torch.distributed.rpc", "logging.config.listen",
)  # fmt: skip
"""What pickles, or passes on what it is given pickled: also pipes, queues and processes of multiprocessing."""
PICKLE_CALLS = {"torch.load", "torch.save", "read_pickle", "to_pickle", "ProcessPoolExecutor", "SocketHandler"}
PICKLE_ENDS = ("_object", "_object_list")
"""Of the collectives that take any object."""
PICKLE_SWITCHES = {"allow_pickle": "False", "weights_only": "True"}
MAX_LOAD_ARGUMENTS = 2
"""Of numpy.load; the third is whether to unpickle."""
PICKLING = {
    ("baselines/torch_save.py", "torch.save"): "it is the system that it stands for",
    ("baselines/torch_save.py", "torch.load"): "as above, and of weights only",
    ("baselines/torch_checkpointing.py", "multiprocessing.process"): "the key to its shared memory is read",
    ("baselines/torch_checkpointing.py", "multiprocessing.resource_sharer"): "the thread that hands it over is ended",
    ("baselines/torch_dcp.py", "multiprocessing.parent_process"): "ends with its trainer",
    ("baselines/torch_dcp.py", "multiprocessing.resource_sharer"): "the thread that hands memory over is ended",
}
"""File and name of what may stay, and why; what other people's libraries pickle is not seen here."""


def test_nothing_is_pickled() -> None:
    found = {(str(path), name): line for path, tree in sources().items() for line, name in pickling(path, tree)}
    wrong = [show(Path(path), line, name) for (path, name), line in found.items() if (path, name) not in PICKLING]
    assert not wrong, "\n".join(wrong)
    assert PICKLING.keys() <= found.keys(), "an exception that nobody needs any more"


def pickling(path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of what pickles or unpickles, or may."""
    for line, name in imports(path, tree):
        if any(f"{name}.".startswith(f"{module}.") for module in PICKLE_MODULES):
            yield line, name
    for node in ast.walk(tree):
        name = ast.unparse(node) if isinstance(node, ast.Attribute | ast.Name) else ""
        last = name.rpartition(".")[2]
        if {name, last} & PICKLE_CALLS or last.endswith(PICKLE_ENDS):
            yield node.lineno, name
        if isinstance(node, ast.keyword) and ast.unparse(node.value) != PICKLE_SWITCHES.get(
            node.arg or "", ast.unparse(node.value)
        ):
            yield node.value.lineno, node.arg or ""
        is_load = isinstance(node, ast.Call) and ast.unparse(node.func) in ("np.load", "numpy.load")
        if is_load and len(node.args) > MAX_LOAD_ARGUMENTS:
            yield node.lineno, "numpy.load"


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "def f():\n    from pickle import loads",
        "import os, multiprocessing.connection",
        "from multiprocessing import Pipe",
        "from concurrent.futures import ProcessPoolExecutor",
        "import torch.multiprocessing as mp",
        "import torch\ntorch.load(path)",
        "import torch\nload = torch.load",
        "import torch\ntorch.load(path, weights_only=False)",
        "dist.all_gather_object(a, b)",
        "dist.scatter_object_list(a, b)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=asked)",
        "np.load(path, None, True)",
        "frame.to_pickle(path)",
    ],
)
def test_what_pickles_is_found(code: str) -> None:
    assert list(pickling(Path("capricorn/system.py"), ast.parse(code)))


def test_every_module_says_what_it_is() -> None:
    assert not [str(path) for path, tree in sources().items() if not ast.get_docstring(tree)]


def test_only_known_environment_variables_are_read() -> None:
    known = {*TORCHRUN, *ENVIRONMENT}
    wrong = [
        show(path, line, name)
        for path, tree in sources().items()
        for line, name in environment_reads(tree)
        if name not in known and path != LAUNCHERS
    ]
    assert not wrong, "make it an option, or give a reason in ENVIRONMENT:\n" + "\n".join(wrong)


def environment_reads(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and variable of each read; passing the whole environment on to a process is none."""
    for node in ast.walk(tree):
        key: ast.expr | None = None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and is_environ(node.value):
            key = node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name) and node.args:
            of_environ = isinstance(node.func, ast.Attribute) and is_environ(node.func.value)
            name = ast.unparse(node.func).rpartition(".")[2]
            if name == "getenv" or (of_environ and name in ("get", "pop", "setdefault")):
                key = node.args[0]
        elif isinstance(node, ast.Compare) and any(map(is_environ, node.comparators)):
            key = node.left
        if key is not None:
            yield node.lineno, str(key.value) if isinstance(key, ast.Constant) else ast.unparse(key)


def is_environ(node: ast.expr) -> bool:
    return ast.unparse(node) in ("os.environ", "environ")


def test_no_error_is_swallowed_unnamed() -> None:
    wrong = []
    for path, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler) and (node.type is None or is_empty(node.body)):
                wrong.append(show(path, node.lineno, "except without a type, or with an empty body"))
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "suppress":
                broad = {"Exception", "BaseException"} & {ast.unparse(argument) for argument in node.args}
                wrong += [show(path, node.lineno, f"suppress({name})") for name in broad]
    assert not wrong, "write contextlib.suppress with the narrow error:\n" + "\n".join(wrong)


PRINTING = {"cli", "report", "records", "stats", "compare", "launch", "campaign"}
"""Rooms whose JSON is for readers outside."""


WALL_CLOCK = {
    "capricorn/records/job_file.py": "at the start of a run, once",
    "capricorn/files.py": "of the same clock as the times of files",
}
"""Where the time of the wall clock is taken, and why."""


def test_json_for_others_is_what_every_reader_takes() -> None:
    wrong = [
        show(path, node.lineno, ast.unparse(node.func))
        for path, tree in sources().items()
        if room_of(module_name(path)) in PRINTING and path.stem != "strict_json"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("json.dumps", "json.dump", "dumps", "dump")
    ]
    assert not wrong, "use records.strict_json, which spells what is no number:\n" + "\n".join(wrong)


def test_no_time_is_taken_from_a_clock_that_somebody_may_set() -> None:
    wrong = [
        show(path, node.lineno, "time.time")
        for path, tree in sources().items()
        if path.as_posix() not in WALL_CLOCK
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("time.time", "time.time_ns")
    ]
    assert not wrong, "use Job.now_s, or time.monotonic:\n" + "\n".join(wrong)


def test_tests_ask_processes_what_they_are_by_helpers_that_expect_them_to_end() -> None:
    asking = re.compile(r"\.(cmdline|children|name|exe)\(|process_iter\(\[")
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if path.name not in ("processes.py", "test_conventions.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if asking.search(line)
    ]
    assert not wrong, "use tests.support.processes:\n" + "\n".join(wrong)


def test_a_process_that_has_ended_has_no_command_whether_or_not_somebody_has_waited_for_it() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = psutil.Process(child.pid)
        for _ in polls(20.0):
            if "input()" in command_of(process):  # not before it has become another program
                break
        assert "input()" in command_of(process)
        assert process in children_of(os.getpid())
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
        assert command_of(process) == ""
        assert process not in children_of(os.getpid())
        child.wait()
        assert command_of(process) == ""
        assert children_of(child.pid) == []
    assert not [command for command in commands() if not command]


def is_empty(body: list[ast.stmt]) -> bool:
    return all(isinstance(statement, ast.Pass) or ast.unparse(statement) == "..." for statement in body)
